"""The search of Table 3, with a compiler that is a formula."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from ringformer.estimate.choices import memory_settings
from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.search import longest_context
from ringformer.estimate.workloads import targets
from ringformer.paper import max_context
from ringformer.paper.attempts import read
from ringformer.paper.cells import REGIMES, ROWS, Cell, cells
from ringformer.paper.max_context import fill, judge_maxima, longest
from tests.estimate.search.test_longest_context import estimate_of

pytestmark = pytest.mark.usefixtures("installed")


def test_the_rows_are_the_papers():
    """n/m is the ratio of the ring and blockwise columns."""
    ratios = [row.paper[3] / row.paper[2] for row in ROWS]
    assert ratios == [row.devices / row.sequences for row in ROWS]


def test_cells():
    names = [cell.name for cell in cells()]
    assert len(set(names)) == len(names) == 13 * 3 + 6 * 3 + 13 * 3 + 3 + 14 * 2
    ring = Cell(ROWS[-1], "ring", REGIMES[1], 2).workload(4096)
    assert (ring.name, ring.target.name, ring.mesh_dim, ring.batch_size) == ("llama_7b", "v5e-256", "1,2,1,128", 2)
    assert (ring.model.attention, ring.model.compute_dtype, ring.model.offload) == ("ring", "bfloat16", False)
    baseline = Cell(ROWS[-1], "vanilla", REGIMES[0], 256).workload(4096)
    assert (baseline.mesh_dim, baseline.batch_size, baseline.model.compute_dtype) == ("1,256,1,1", 256, "float32")


def test_cells_with_kernels_are_of_chips_that_have_one():
    """v3 has none, and cuDNN none for 3B's heads of 100 features; what else decides a run is that of XLA's cell."""
    kernels = [cell for cell in cells() if cell.kernel != "xla"]
    of = {(cell.row.target, cell.row.model): cell.workload(2**21).model.kernel for cell in kernels}
    assert {target for target, _ in of} == {"8xA100-80", "32xA100-80", "v4-1024", "v5e-256"}
    assert ("8xA100-80", "llama_3b") not in of and of["v5e-256", "llama_3b"] == "pallas"
    assert all(kernel == ("cudnn" if "A100" in target else "pallas") for (target, _), kernel in of.items())
    for cell in kernels:
        here, there = cell.workload(2**21), cell.with_xla.workload(2**21)
        chunks = dict(kernel="xla", q_chunk=None, k_chunk=None)
        assert replace(here, model=replace(here.model, **chunks)) == there and cell.with_xla in cells()


def test_a_search_with_a_kernel_begins_where_the_one_without_ended(tmp_path, compiled):
    plain, kernel = (
        next(c for c in cells() if c.name == f"v5e-256/7b/ring/{name}/m=1") for name in ("bfloat16", "bfloat16+kernel")
    )
    fill(tmp_path / "t.json", [plain], lambda line: None)
    fill(tmp_path / "t.json", [kernel], lambda line: None)
    found = read(tmp_path / "t.json")
    assert found[kernel.name][0]["seq_len"] == longest(found[plain.name])["seq_len"]
    assert "--kernel=pallas --seq_len=" in found[kernel.name][0]["command"]
    assert longest_context.longest_within(found[kernel.name]), "it ends with a step of an hour"


@pytest.fixture
def compiled(monkeypatch):
    """The workloads that were compiled: they fit up to 2**22 tokens, with two-level remat to 2**23."""
    workloads = []

    def compile_apart(workload, generate_code):
        workloads.append(workload)
        return estimate_of(workload, fits=workload.seq_len <= (2**23 if workload.model.remat_group > 1 else 2**22))

    monkeypatch.setattr(memory_settings, "compile_apart", compile_apart)
    return workloads


def test_fill_finds_the_maximum_and_goes_on_where_it_was(tmp_path, compiled):
    """Interrupted after each length, a search ends with the same attempts, and a finished one runs nothing."""
    wanted = [cell for cell in cells() if cell.name == "v5e-256/7b/ring/bfloat16/m=1"]
    once, pieces = tmp_path / "once.json", tmp_path / "pieces.json"
    fill(once, wanted, lambda line: None)
    while len(compiled) < 100:
        before = len(compiled)
        fill(pieces, wanted, lambda line: None, passes=1)
        if len(compiled) == before:
            break
    attempts = read(once)["v5e-256/7b/ring/bfloat16/m=1"]
    assert [(a["seq_len"], a["fits"]) for a in attempts] == [(2**23, True), (2**24, False)]
    assert attempts[0]["remat_group"] > 1 and attempts[0]["command"].startswith("ringformer estimate --model=llama_7b")
    assert read(once) == read(pieces)
    assert json.loads(once.read_text())["what"].startswith("compiled")


def test_an_attempt_has_the_keys_of_those_that_are_committed(tmp_path, compiled):
    """So that a file begun by an earlier release is gone on with."""
    committed = json.loads((Path(__file__).parents[2] / "results/max_context.json").read_text())["cells"]
    (cell,) = (cell for cell in cells() if cell.name == "v5e-256/7b/ring/bfloat16/m=1")
    fill(tmp_path / "t.json", [cell], lambda line: None, passes=1)
    (attempt,) = read(tmp_path / "t.json")[cell.name]
    assert set(committed[cell.name][0]) <= set(attempt)


def test_a_broken_compiler_is_no_answer(tmp_path, monkeypatch):
    """A search ends if the compiler breaks down on all that is left."""

    def breaks_down(workload, generate_code):
        raise CompilerFailure("its process ended with -6")

    monkeypatch.setattr(memory_settings, "compile_apart", breaks_down)
    lines = []
    fill(tmp_path / "t.json", cells()[:2], lines.append)
    assert read(tmp_path / "t.json") == {}
    assert sum("the compiler broke down: its process ended with -6" in line for line in lines) == 2


def test_what_is_refused_by_name_is_an_answer(tmp_path, compiled, monkeypatch):
    """The compiler is known to die of twice the length: the maximum is known, and nothing asked it."""
    (cell,) = (cell for cell in cells() if cell.name == "v5e-256/7b/ring/offload+kernel/m=1")
    refused = "the TPU compiler dies of transfers of 4 GiB"
    monkeypatch.setattr(max_context, "known_failure", lambda w: refused if w.seq_len > cell.first_length else "")
    monkeypatch.setattr(memory_settings, "compile_apart", lambda w, generate_code: estimate_of(w, fits=True))
    fill(tmp_path / "t.json", [cell], lambda line: None)
    fits, fails = read(tmp_path / "t.json")[cell.name]
    assert fits["fits"] and fails["seq_len"] == 2 * fits["seq_len"] and not fails["fits"]
    assert fails["reasons_against"] == [refused] and fails["head_groups"] == 1
    assert fails["command"].startswith("ringformer estimate") and not compiled


def test_cells_without_their_compiler_are_left_out(tmp_path, compiled, monkeypatch):
    """Of a row of GPUs and one of TPUs only the one is searched whose compiler is there; no closed form is written."""
    monkeypatch.setattr(targets, "find_spec", lambda name: "there" if name == "libtpu" else None)
    gpu, tpu = (next(c for c in cells() if c.row.target == name) for name in ("8xA100-80", "v5e-256"))
    lines = []
    fill(tmp_path / "t.json", [gpu, tpu], lines.append, passes=1)
    assert list(read(tmp_path / "t.json")) == [tpu.name]
    assert any("8xA100-80 is left out" in line and "pip install 'jax[cuda13]'" in line for line in lines)


def test_a_maximum_whose_run_fails_falls(tmp_path, compiled, monkeypatch):
    """Each program of the run at the longest context is compiled, once; where the evaluation dies of machine code the
    run does not fit, and the search goes on below."""
    wanted = [cell for cell in cells() if cell.name == "v5e-256/7b/ring/bfloat16/m=1"]
    path, others = tmp_path / "attempts.json", []

    def compile_others(workload, generate_code):
        others.append((workload.seq_len, generate_code))
        if generate_code and workload.seq_len > 2**22:
            raise CompilerFailure("evaluation: the compiler died")
        return [replace(estimate_of(workload, fits=True), program="evaluation")]

    def compile_apart(workload, generate_code):
        return replace(estimate_of(workload, fits=workload.seq_len <= 2**23), generated_code=generate_code)

    monkeypatch.setattr(longest_context, "compile_others", compile_others)
    monkeypatch.setattr(memory_settings, "compile_apart", compile_apart)
    fill(path, wanted, lambda line: None)
    judge = partial(judge_maxima, path, wanted, lambda line: None)
    judge(generate_code=False)
    judge(generate_code=False)
    assert others == [(2**23, False)] and longest(read(path)[wanted[0].name])["seq_len"] == 2**23
    for _ in range(2):
        judge(generate_code=True)
        fill(path, wanted, lambda line: None)
    assert others[1:] == [(2**23, True), (2**22, True)]
    best = longest(read(path)[wanted[0].name])
    assert best["seq_len"] == 2**22 and best["generated_code"] and len(best["programs"]) == 2
