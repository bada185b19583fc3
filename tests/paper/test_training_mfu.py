"""Table 4: what is trained, what the baselines say, and the committed MFU from the shapes of the models by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paper_page.mfu_table import rows, shares
from ringformer.estimate.choices import memory_settings
from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.workloads import targets
from ringformer.estimate.workloads.targets import compiled_by
from ringformer.estimate.workloads.training import MemorySettings, estimate_command
from ringformer.paper import attempts, training_mfu
from ringformer.paper.attempts import read_runs
from ringformer.paper.training_mfu import (
    BLOCKWISE,
    RING,
    RUNS,
    SHORTER,
    Measured,
    cells,
    expected_mfu,
    fill,
    utilisation,
)
from tests.estimate.search.test_longest_context import estimate_of
from tests.hlo import on_tpu

RESULTS = Path(__file__).parents[2] / "results" / "table4.json"
KNOWN = read_runs(RESULTS)
CELLS = cells()
SEVEN = CELLS[0].workload(BLOCKWISE).model

SHAPES = {"7b": (4096, 32, 11008), "13b": (5120, 40, 13824), "30b": (6656, 60, 17920), "65b": (8192, 80, 22016)}
"""D, L, F of LLaMA, whose H d is D, and whose V is 32,000."""
PEAK = {"a100": {"float32": 156e12, "bfloat16": 312e12}, "v4": {"float32": 275e12, "bfloat16": 275e12}}
DEVICES = {"8xa100-80": 8, "32xa100-80": 32, "v4-1024": 512}


def flops_by_hand(model: str, context: int) -> tuple[float, float]:
    """Of a token: 6 N, N without the input embedding, and 12 L H d T."""
    D, L, F = SHAPES[model]
    params = L * (4 * D * D + 3 * D * F + 2 * D) + D + 32000 * D
    return 6.0 * params, 12.0 * L * D * context


def all_devices_peak(cell) -> float:
    """FLOP/s."""
    _, hardware, _, dtype, _ = cell.name.split("/")
    return DEVICES[hardware] * PEAK["v4" if hardware == "v4-1024" else "a100"][dtype]


def test_the_configurations_are_the_papers():
    """Contexts in K, and batches of 2M tokens on A100 and 4M on TPU; the ring has as many ranks as its context is
    longer, and both runs the same tokens on a device."""
    rows = dict.fromkeys((c.configuration.name, c.configuration.blockwise, c.configuration.ring) for c in CELLS)
    assert list(rows) == [
        ("8xa100-80/7b", 32, 256),
        ("8xa100-80/13b", 16, 128),
        ("32xa100-80/13b", 64, 2048),
        ("v4-1024/30b", 16, 2048),
        ("v4-1024/65b", 8, 1024),
    ]
    for cell in CELLS:
        ring, blockwise, shorter = (cell.workload(run) for run in RUNS)
        for w in (ring, blockwise, shorter):
            w.check()
            assert w.step_tokens == (4 if w.target.chip.kind == "tpu" else 2) * 2**20
            assert (w.local_tokens, w.accumulate) == (ring.local_tokens, ring.accumulate)
            assert (w.model.q_chunk, w.model.k_chunk) == (ring.model.q_chunk, ring.model.k_chunk)
        assert (ring.model.attention, blockwise.model.attention) == ("ring", "blockwise")
        assert ring.mesh_shape[3] == ring.seq_len // blockwise.seq_len and blockwise.seq_len == 2 * shorter.seq_len


def test_a_kernel_stands_where_it_runs():
    kernels = {(c.target.split("-")[0], *c.variant) for c in CELLS}
    xla = {(chip, dtype, "xla") for chip in ("8xA100", "32xA100", "v4") for dtype in ("float32", "bfloat16")}
    cudnn = {(chip, "bfloat16", "cudnn") for chip in ("8xA100", "32xA100")}
    assert kernels == xla | cudnn | {("v4", "bfloat16", "pallas")}


@pytest.mark.parametrize("causal", [False, True])
def test_expected_is_what_the_uses_of_the_baseline_say(causal):
    """Products at 60% of the peak and attention at 35%, by hand: found again, and 256K has mostly attention."""

    def by_hand(context):
        products, attention = flops_by_hand("7b", context)
        attention /= 2 if causal else 1
        seconds = products / 0.6, attention / 0.35
        return Measured((products + attention) / sum(seconds), seconds[1] / sum(seconds))

    used = utilisation(SEVEN, {context: by_hand(context) for context in (16384, 32768)}, causal=causal)
    assert used == pytest.approx((0.6, 0.35))
    expected = expected_mfu(SEVEN, 2**18, used, causal=causal)
    assert expected == pytest.approx(by_hand(2**18).mfu) and used.attention < expected < used.products


def test_runs_that_differ_count_by_their_seconds():
    """Attention of 8K at 40% of the peak and of 24K at 20%: the four parts of a token's FLOPs take 2.5 + 15 of its
    8K's."""
    runs = {}
    for context, use in ((8192, 0.4), (24576, 0.2)):
        products, attention = flops_by_hand("7b", context)
        seconds = products / 0.5, attention / use
        runs[context] = Measured((products + attention) / sum(seconds), seconds[1] / sum(seconds))
    assert utilisation(SEVEN, runs, causal=False) == pytest.approx((0.5, 4 / 17.5))


@pytest.fixture
def compiled(monkeypatch):
    """The workloads that a compiler compiled that is a formula: all fit, a step takes a second."""
    workloads = []

    def compile_formula(workload, generate_code):
        workloads.append(workload)
        return estimate_of(workload, fits=workload.model.head_groups > 1)

    monkeypatch.setattr(targets, "find_spec", lambda name: "there")
    monkeypatch.setattr(attempts, "compiled_by", lambda target: "a formula")
    monkeypatch.setattr(memory_settings, "compile_apart", compile_formula)
    monkeypatch.setattr(training_mfu, "with_machine_code", lambda workload, estimate, log: estimate)
    return workloads


def test_fill_goes_on_where_it_was_and_the_baseline_has_the_settings_of_the_ring(tmp_path, compiled):
    cell, path = CELLS[0], tmp_path / "t.json"
    fill(path, [cell], lambda line: None)
    accepted = [w for w in compiled if w.model.head_groups > 1]
    assert [w.model.attention for w in accepted] == ["ring", "blockwise", "blockwise"]
    assert len({w.settings for w in accepted}) == 1 and len(compiled) == 4  # the ring's first settings did not fit
    found = read_runs(path)
    assert list(found[cell.name]) == list(RUNS) and set(KNOWN[cell.name][RING]) <= set(found[cell.name][RING])
    fill(path, [cell], lambda line: None)
    assert len(compiled) == 4
    del found[cell.name][SHORTER]
    path.write_text(json.dumps({"cells": found}))
    fill(path, [cell], lambda line: None)
    assert len(compiled) == 5 and compiled[-1].seq_len == cell.workload(SHORTER).seq_len
    assert json.loads(path.read_text())["command"] == "ringformer tables --only=table4"


def test_a_broken_compiler_is_no_answer(tmp_path, compiled, monkeypatch):
    def breaks_down(workload, generate_code):
        raise CompilerFailure("its process ended with -6")

    monkeypatch.setattr(memory_settings, "compile_apart", breaks_down)
    lines = []
    fill(tmp_path / "t.json", CELLS[:2], lines.append)
    assert read_runs(tmp_path / "t.json") == {}
    assert sum("the compiler broke down: its process ended with -6" in line for line in lines) == 2


def test_what_does_not_fit_says_so_and_lets_expect_nothing():
    cell = CELLS[0]
    runs = dict(KNOWN[cell.name])
    runs[BLOCKWISE] = runs[BLOCKWISE] | {"fits": False}
    found = [row for dtype in ("float32", "bfloat16") for row in rows({cell.name: runs}, dtype)]
    found = [row for row in found if row.startswith("| 8xA100-80 | 7B | XLA | 32K")]
    assert re.search(r"256K \| does not fit \|  \| \d+\.\d% \(b\) \| 30% to 35% \| does not fit \|  \| \d", found[0])
    assert "fit" not in found[1]
    assert shares(cell, runs, causal=True)[:2] == (None, None)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_committed_mfu_is_that_of_its_seconds(cell):
    """Tokens a second times FLOPs of a token, over the peak of all devices; and the causal one is a share of what can
    be done."""
    model = cell.name.split("/")[2]
    for run in RUNS:
        found = KNOWN[cell.name][run]
        products, pairs = flops_by_hand(model, found["seq_len"])
        rate = found["batch_size"] * found["seq_len"] / found["step_seconds_model"] / all_devices_peak(cell)
        assert found["mfu_palm_model"] == pytest.approx(rate * (products + pairs), rel=1e-6)
        assert found["mfu_causal_model"] == pytest.approx(rate * (products + pairs / 2), rel=1e-6)
        assert 0.05 < found["mfu_causal_model"] < 1
        assert found["fits"] and found["peak_bytes"] <= found["hbm_bytes"]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_committed_run_is_that_of_its_cell(cell):
    """So that a number of the table can be had again; the baseline has the ring's memory settings."""
    runs = KNOWN[cell.name]
    settings = MemorySettings(**{name: runs[RING][name] for name in vars(MemorySettings())})
    for run in RUNS:
        assert estimate_command(cell.workload(run).with_settings(settings)) == runs[run]["command"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_ring_meets_what_its_baseline_lets_expect(cell, causal):
    """Within a tenth; and that is between what attention and all the rest of both baselines reach, by hand."""

    def flops(run):
        products, pairs = flops_by_hand(cell.name.split("/")[2], KNOWN[cell.name][run]["seq_len"])
        return products, pairs / 2 if causal else pairs

    done, took = [0.0, 0.0], [0.0, 0.0]
    for run in (BLOCKWISE, SHORTER):
        spent = KNOWN[cell.name][run]["seconds_by_purpose"]
        attention = sum(spent[f"attention {name}"] for name in ("forward", "recomputed", "backward"))
        seconds = KNOWN[cell.name][run]["step_seconds_model"] * all_devices_peak(cell) / cell.workload(run).step_tokens
        share = attention / KNOWN[cell.name][run]["step_seconds_model"]
        for part, (x, of_it) in enumerate(zip(flops(run), (1 - share, share), strict=True)):
            done[part] += x
            took[part] += of_it * seconds
    used = [x / seconds for x, seconds in zip(done, took, strict=True)]
    expected = sum(flops(RING)) / sum(x / u for x, u in zip(flops(RING), used, strict=True))
    found = shares(cell, KNOWN[cell.name], causal=causal)
    assert found.expected == pytest.approx(expected, rel=1e-6) and min(used) < expected < max(used)
    assert 0.9 * expected < found.ring < 1.1 * expected


@on_tpu
@pytest.mark.slow
def test_a_committed_run_compiles_to_the_same_again():
    """The schedule of a baseline: its bytes, and the FLOPs of a device."""
    (cell,) = (cell for cell in CELLS if cell.name == "table4/v4-1024/65b/bfloat16/xla")
    before = KNOWN[cell.name][SHORTER]
    workload = cell.workload(SHORTER)
    settings = replace(workload.settings, head_groups=before["head_groups"], remat_group=before["remat_group"])
    estimate = compile_apart(workload.with_settings(settings))
    same = compiled_by(workload.target) == before["compiled_by"]
    assert estimate.peak_bytes == pytest.approx(before["peak_bytes"], rel=1e-9 if same else 0.05)
    assert estimate.schedule.flops == pytest.approx(before["flops"], rel=1e-9 if same else 0.01)
