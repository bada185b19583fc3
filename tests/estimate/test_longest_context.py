"""The search for the longest context, with a compiler that is a formula."""

import json

import pytest

from ringformer.estimate import longest_context, targets
from ringformer.estimate.longest_context import Case, Saving, next_length, savings
from ringformer.models.llama_config import LlamaConfig
from ringformer.models.llama_presets import preset
from ringformer.paper import max_context
from ringformer.paper.max_context import ROWS, Cell, cells, fill, read


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Every compiler is; none is called here."""
    monkeypatch.setattr(targets, "find_spec", lambda name: "there")


def tried(*results):
    return [{"seq_len": n, "fits": fits} for n, fits in results]


def test_next_length():
    assert next_length([], 4096) == 4096
    assert next_length(tried((4096, True)), 4096) == 8192
    assert next_length(tried((4096, False)), 4096) == 2048
    assert next_length(tried((4096, True), (8192, False)), 4096) is None
    assert next_length(tried((4096, False), (2048, True)), 4096) is None
    assert next_length(tried((1024, False)), 4096) is None  # nothing fits


@pytest.mark.parametrize("name", ["llama_3b", "llama_7b", "llama_13b", "llama_30b", "llama_65b", "llama3_8b"])
def test_savings_are_settings_that_the_model_takes(name):
    found = list(savings(LlamaConfig(**preset(name))))
    assert found[0] == Saving() and len(set(found)) == len(found) >= 3
    for saving in found:
        LlamaConfig(**preset(name) | vars(saving))


def test_the_rows_are_the_papers():
    """n/m is the ratio of the ring and blockwise columns."""
    ratios = [row.paper[3] / row.paper[2] for row in ROWS]
    assert ratios == [row.devices / row.sequences for row in ROWS]


def test_cells():
    names = [cell.name for cell in cells()]
    assert len(set(names)) == len(names) == 13 * 3 + 6 * 3 + 13 * 3 + 3
    assert Cell(ROWS[-1], "ring", max_context.REGIMES[1], 2).case == Case(
        "llama_7b", "v5e-256", "ring", "bfloat16", "1,2,1,128", 2
    )


@pytest.fixture
def compiler(monkeypatch):
    """Commands that fit up to 2**22 tokens, with two-level remat to 2**23; and the commands that were run."""
    commands = []

    def run(command):
        commands.append(command)
        options = dict(word[2:].split("=") for word in command if "=" in word)
        limit = 2**23 if int(options["remat_group"]) > 1 else 2**22
        fits = int(options["seq_len"]) <= limit
        host = int(options["seq_len"]) * 2**14 if "--offload" in command else 0
        return {"fits": fits, "peak_bytes": 2**30, "hbm_bytes": 2**34, "host_bytes": host, "compile_seconds": 1.0,
                "fits_host": host <= 42 * 2**30}  # fmt: skip

    monkeypatch.setattr(longest_context, "run", run)
    monkeypatch.setattr(max_context, "compiled_by", lambda command: "a formula")
    return commands


def test_fill_finds_the_maximum_and_goes_on_where_it_was(tmp_path, compiler):
    """Interrupted after each length, a search ends with the same attempts, and a finished one runs nothing."""
    wanted = [cell for cell in cells() if cell.name == "v5e-256/7b/ring/bfloat16/m=1"]
    whole, pieces = tmp_path / "whole.json", tmp_path / "pieces.json"
    fill(whole, wanted, lambda line: None)
    while len(compiler) < 100:
        before = len(compiler)
        fill(pieces, wanted, lambda line: None, passes=1)
        if len(compiler) == before:
            break
    attempts = read(whole)["v5e-256/7b/ring/bfloat16/m=1"]
    assert [(a["seq_len"], a["fits"]) for a in attempts] == [(2**23, True), (2**24, False)]
    assert attempts[0]["remat_group"] > 1 and attempts[0]["command"].startswith("ringformer estimate --model=llama_7b")
    assert read(whole) == read(pieces)
    assert json.loads(whole.read_text())["what"].startswith("compiled")


def test_what_a_usual_host_cannot_hold_does_not_fit(compiler):
    """16 KiB a token here: 42 GiB of a v5e's host end before the compiler's limit."""
    case = next(cell.case for cell in cells() if cell.name == "v5e-256/7b/ring/offload/m=1")
    lengths = [2**20, 2**21, 2**22]
    assert [longest_context.attempt(case, n)["fits"] for n in lengths] == [True, True, False]


def test_a_broken_compiler_is_no_answer(tmp_path, monkeypatch):
    def run(command):
        raise RuntimeError("ended with -6: the compiler aborted")

    monkeypatch.setattr(longest_context, "run", run)
    lines = []
    fill(tmp_path / "t.json", cells()[:1], lines.append, passes=1)
    assert read(tmp_path / "t.json") == {}
    assert any("broke down" in line and "-6" in line for line in lines)


def test_cells_without_their_compiler_are_left_out(tmp_path, compiler, monkeypatch):
    """Of a row of GPUs and one of TPUs only the one is searched whose compiler is there; no closed form is written."""
    monkeypatch.setattr(targets, "find_spec", lambda name: "there" if name == "libtpu" else None)
    gpu, tpu = (next(c for c in cells() if c.row.target == name) for name in ("8xA100-80", "v5e-256"))
    lines = []
    fill(tmp_path / "t.json", [gpu, tpu], lines.append, passes=1)
    assert list(read(tmp_path / "t.json")) == [tpu.name]
    assert any("8xA100-80 is left out" in line and "pip install 'jax[cuda13]'" in line for line in lines)


def test_a_search_ends_if_the_compiler_breaks_down_on_all_that_is_left(tmp_path, monkeypatch):
    def breaks_down(case, seq_len, log):
        raise RuntimeError("crashed")

    monkeypatch.setattr(max_context, "attempt", breaks_down)
    lines = []
    fill(tmp_path / "t.json", cells()[:2], lines.append)
    assert sum("the compiler broke down: crashed" in line for line in lines) == 2
