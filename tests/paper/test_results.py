"""What the committed tables claim: the multiples of the paper's contexts, each one executable with its ring hidden."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from ringformer.estimate.longest_context import next_length
from ringformer.estimate.targets import find_target
from ringformer.paper.max_context import REGIMES, ROWS, SCALING, Cell, cells, read
from ringformer.paper.tables_document import longest
from ringformer.runtime_environment import GPU_FRACTION

RESULTS = Path(__file__).parents[2] / "results"
ATTEMPTS = read(RESULTS / "max_context.json")
CELLS = [Cell(row, "ring", regime, row.sequences) for row in ROWS for regime in REGIMES]
SINGLE = [cell for cell in cells() if cell.attention == "ring" and cell.sequences == 1]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_ring_reaches_its_multiple_of_the_paper(cell):
    best, target = longest(ATTEMPTS[cell.name]), find_target(cell.row.target)
    assert best["seq_len"] >= cell.regime.wanted_multiple(cell.row) * cell.paper
    assert best["peak_bytes"] <= target.chip.hbm_bytes * (GPU_FRACTION if target.chip.kind == "gpu" else 1)
    assert best["host_bytes"] <= target.chip.host_bytes and (best["host_bytes"] > 0) == cell.regime.offload
    if target.chip.name.startswith("TPU v3"):  # synchronous by nature
        return
    ring = best["hidden_permute_bytes"] + best["exposed_permute_bytes"]
    allowed = (1 if target.chip.kind == "tpu" else 2) / (cell.row.devices // cell.sequences)
    assert best["exposed_in_ring_loops_bytes"] == 0 and best["exposed_permute_bytes"] <= allowed * ring
    assert best["max_link_hops"] == (1 if target.chip.kind == "tpu" else None)


def test_the_longest_context_at_least_doubles_with_the_chips():
    rows = (*SCALING, ROWS[-1])
    lengths = [longest(ATTEMPTS[Cell(row, "ring", REGIMES[1], 1).name])["seq_len"] for row in rows]
    assert [row.devices for row in rows] == [32, 64, 128, 256]
    assert all(2 * short <= long for short, long in pairwise(lengths)), lengths


def test_beyond_100m_tokens():
    assert longest(ATTEMPTS["v4-1024/3b/ring/offload/m=1"])["seq_len"] > 100e6


def test_llama3_8b_on_one_node():
    """5M tokens, the best published, with at most 2 TB of host memory for the node."""
    found = json.loads((RESULTS / "llama3_8b_8xh100.json").read_text())
    assert found["fits"] and "--seq_len=5242880" in found["command"]
    assert found["peak_bytes"] <= GPU_FRACTION * found["hbm_bytes"] and 8 * found["host_bytes"] <= 2e12
    assert found["exposed_in_ring_loops_bytes"] == 0


@pytest.mark.parametrize("cell", SINGLE, ids=lambda cell: cell.name)
def test_a_ring_of_all_devices_is_hidden(cell):
    """One sequence over the whole slice, where it is longest."""
    best, target = longest(ATTEMPTS[cell.name]), find_target(cell.row.target)
    assert best["host_bytes"] <= target.chip.host_bytes
    if not target.chip.name.startswith("TPU v3"):
        assert best["exposed_in_ring_loops_bytes"] == 0
        assert best["max_link_hops"] == (1 if target.chip.kind == "tpu" else None)


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: cell.name)
def test_every_maximum_is_known(cell):
    """The double was refused, by the compiler or for want of host memory."""
    assert next_length(ATTEMPTS[cell.name], cell.first_length) is None
