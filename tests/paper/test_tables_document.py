"""The written tables: what a cell says, and the closed forms beside the paper's own numbers."""

import json

import pytest

from ringformer.paper.max_context import ROWS, cells
from ringformer.paper.tables_document import _longest_text, flops_ratio, write_tables


def attempt(seq_len, fits=True):
    found = {"peak_bytes": 2**33, "hbm_bytes": 2**34, "host_bytes": 0, "hidden_permute_bytes": 99.0}
    found |= {"exposed_permute_bytes": 1.0, "exposed_in_ring_loops_bytes": 0.0, "max_link_hops": 1}
    found |= {"head_groups": 4, "remat_group": 1, "step_seconds_model": 12.0, "compiled_by": "a compiler"}
    return found | {"seq_len": seq_len, "fits": fits, "date": "today"}


def test_a_cell_says_what_is_known():
    K = 1024
    assert _longest_text([]) == ""
    assert _longest_text([attempt(8 * K)], 2 * K) == "≥ 8K (4×)"
    assert _longest_text([attempt(8 * K), attempt(16 * K, fits=False)], 2 * K) == "8K (4×)"
    assert _longest_text([attempt(8 * K, fits=False)]) == "< 8K"


@pytest.mark.parametrize(
    ("hidden_size", "context", "ratio"),
    [(4096, 2**15, 2.00), (4096, 2**17, 5.43), (4096, 2**20, 37.4), (8192, 2**20, 20.6)],
)
def test_flops_of_a_dataset_are_those_of_figure_5(hidden_size, context, ratio):
    assert flops_ratio(hidden_size, context) == pytest.approx(ratio, rel=3e-3)


def test_tables_and_figures_are_written_from_what_there_is(tmp_path):
    found = {cell.name: [attempt(cell.first_length)] for cell in cells(ROWS[-1:]) if cell.attention == "ring"}
    results = tmp_path / "results.json"
    results.write_longest_text(json.dumps({"cells": found}))
    held = {"local_tokens": 8192, "paper_bytes": 2**26, "forward_bytes": 3 * 2**26, "backward_bytes": 2.0**30}
    (tmp_path / "held.json").write_longest_text(json.dumps({"kinds": {"blockwise": held}}))
    write_tables(results, tmp_path / "held.json", tmp_path / "docs")
    text = (tmp_path / "docs" / "tables.md").read_longest_text()
    assert "| v5e-256 | 7B | 256/2 | 2,048K | ≥ 4,096K (2×) | ≥ 8,192K (4×) | ≥ 16,384K (8×) |" in text
    assert "| blockwise | 8,192 | 2 b s h | 64 | 192 | 1,024 |" in text
    assert "| 256 | ≥ 8,192K | 32,768 | 8.00 |" in text and "| 32 | - | - | - |" in text
    assert "1.00%" in text  # exposed of the ring's bytes
    for name in ("figure1.png", "figure5.png"):
        assert (tmp_path / "docs" / name).stat().st_size > 10_000
