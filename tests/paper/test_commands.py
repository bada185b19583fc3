"""`ringformer tables`: it writes where it is told."""

import json
import re
from pathlib import Path

import pytest

from ringformer.cli import main
from ringformer.estimate.workloads import targets
from ringformer.paper import activation_memory, attempts, cells, max_context, training_mfu
from ringformer.paper.attempts import read
from ringformer.paper.commands import add_tables
from tests.verbs import run_verb

RESULTS = Path(__file__).parents[2] / "results" / "max_context.json"


def test_another_compiler_than_that_of_the_results_is_said_and_not_refused(monkeypatch, capsys):
    monkeypatch.setattr(targets, "find_spec", lambda name: "there" if name == "libtpu" else None)
    monkeypatch.setattr(targets, "version", lambda wheel: "1.2.3")
    run_verb(add_tables, f"--out={RESULTS}", "--row=v5e-64/7b", "--passes=0")
    said = capsys.readouterr().err
    assert re.search(r"v5e-64: the file has attempts by jax .*, libtpu .*, the installed compiler is jax 1.2.3", said)
    (made,) = {a["compiled_by"] for a in read(RESULTS)["v5e-64/7b/ring/bfloat16/m=1"]}
    monkeypatch.setattr(attempts, "compiled_by", lambda target: made)
    run_verb(add_tables, f"--out={RESULTS}", "--row=v5e-64/7b", "--passes=0")
    assert not capsys.readouterr().err


def test_a_row_that_is_searched_changes_no_other_file(tmp_path, monkeypatch, capsys):
    """Every maximum of this row is known: nothing is compiled."""
    monkeypatch.chdir(tmp_path)
    run_verb(add_tables, f"--out={RESULTS}", "--row=v5e-64/7b")
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out.endswith(f"\n{RESULTS}\n")


def table(text):
    """The printed columns by cell: {cell: [paper, file, ...]}."""
    lines = [re.split(r"  +", line) for line in text.splitlines()]
    return {words[0]: words[1:] for words in lines if "/ring/" in words[0] or words[0] == "cell"}


def test_a_row_is_printed_beside_the_paper_s(capsys, filled):
    run_verb(add_tables, f"--out={RESULTS}", "--row=v5e-256/7b", "--only=ring")
    printed = table(capsys.readouterr().out)
    known = json.loads(RESULTS.read_text())["cells"]
    assert printed.pop("cell") == ["paper", "max_context.json"] and len(printed) == 10
    for cell, (paper, file) in printed.items():
        assert paper == "2,097,152"  # Table 3, 7B on TPUv5e-512: 2048K
        assert file == f"{max(a['seq_len'] for a in known[cell] if a['fits']):,}"


def test_again_compiles_anew_and_changes_no_file(tmp_path, monkeypatch, capsys):
    """A compiler that fits 1M tokens: the search begins where it would without a file, and asks it each time."""
    asked, before = [], RESULTS.read_bytes()

    def attempt(workload, log):
        asked.append(workload.seq_len)
        answer = {"seq_len": workload.seq_len, "fits": workload.seq_len <= 2**20, "fits_host": True, "peak_bytes": 1}
        answer |= dict.fromkeys(attempts.FITTING, 1) | {"seconds_source": "a stand-in", "tokens_per_second_model": 1}
        return answer | {"hbm_bytes": 1, "host_bytes": 0, "compile_seconds": 0.0} | vars(workload.settings)

    monkeypatch.setattr(max_context, "attempt", attempt)
    monkeypatch.setattr(max_context, "compilable", lambda cells, log: cells)
    monkeypatch.setattr(max_context, "stamp", lambda target: {"date": "today", "compiled_by": "a stand-in"})
    for _ in range(2):
        asked.clear()
        run_verb(add_tables, f"--out={RESULTS}", "--row=v5e-256/7b", "--only=ring/bfloat16/m=1", "--again")
        assert asked[0] == 2**23 and 2**20 in asked and 2**21 in asked
        said = capsys.readouterr().out
        printed = table(said)
        assert printed["cell"] == ["paper", "max_context.json", "again"]
        assert printed["v5e-256/7b/ring/bfloat16/m=1"] == ["2,097,152", "16,777,216", "1,048,576"]
        assert "a stand-in" in said
    assert RESULTS.read_bytes() == before


@pytest.fixture
def filled(monkeypatch):
    """How many cells of each module's table are filled; nothing is compiled."""
    found = {}
    monkeypatch.setattr(max_context, "fill", lambda path, wanted, *_: found.update({path.name: len(wanted)}))
    monkeypatch.setattr(training_mfu, "fill", lambda path, wanted, *_: found.update({path.name: len(wanted)}))
    monkeypatch.setattr(activation_memory, "fill", lambda path, log: found.update({path.name: 1}))
    return found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--only=table4"], {"table4.json": 15}),
        (["--only=table4/v4-1024/65b"], {"table4.json": 3}),
        (["--only=table5"], {"table5.json": 24}),
        (["--only=table5/v5e-8/350m/ring"], {"table5.json": 2}),
        (["--only=ring/bfloat16/m=2"], {"max_context.json": 5}),
        (["--row=v5e-64/7b"], {"max_context.json": 1}),
        (
            [],
            {"max_context.json": len(cells.cells()), "table5.json": 24, "table4.json": 15, "activations.json": 1},
        ),
    ],
)
def test_a_pattern_selects_its_table_alone(arguments, expected, filled, capsys):
    run_verb(add_tables, f"--out={RESULTS}", *arguments)
    assert {name: count for name, count in filled.items() if count} == expected
    named = [str(RESULTS.with_name(name)) for name in expected if name != "activations.json"]
    assert capsys.readouterr().out.splitlines()[-1] == ", ".join(named)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--row=v5e-256/9b"], "--row=v5e-256/9b is not a row; rows: .*v5e-256/7b"),
        (["--only=ringg", "--passes=0"], "--only=ringg is in no cell's name.*, table4/.*, or table1"),
        (
            ["--only=table4/9b"],
            "--only=table4/9b is in no cell's name.*, table4/8xa100-80/7b/float32/xla, .*, or table1",
        ),
        (["--only=table5/v4-16/7b"], "in no cell's name.*, table5/v4-16/350m/vanilla/float32/m=8, or table1"),
        (
            ["--row=v5e-256/7b", "--only=table5", "--passes=0"],
            "--only=table5 is in the name of no cell of --row=v5e-256/7b, e.g. v5e-256/7b/ring/",
        ),
        (["--out=.", "--passes=0"], "--out=. is a folder"),
        (["--again"], "--again needs --row=NAME"),
        (["--again", "--row=v5e-64/7b", "--whole_runs"], "--again needs --row=NAME"),
        (["--passes=-1"], "--passes=-1 must be at least 0"),
        (["--passes=0"], "--passes=0 compiles nothing: give --row=NAME to print a row of the file"),
    ],
)
def test_searches_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        run_verb(add_tables, *arguments)


A_RUN = {"seq_len": 8, "fits": False, "head_groups": 1, "remat_group": 1, "compiled_by": "jax", "date": "2026-11-22"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("max_context.json", "garbage", "it is not JSON: Expecting value"),
        ("max_context.json", "\0\0", "it is not JSON"),
        ("max_context.json", "[]", "it has no object 'cells'"),
        ("max_context.json", '{"a":1}', "it has no object 'cells'"),
        ("max_context.json", '{"cells":[]}', "it has no object 'cells'"),
        ("max_context.json", '{"cells":{"x":{}}}', "x is not a list of attempts"),
        ("max_context.json", '{"cells":{"x":[1]}}', "attempt 0 of x is not an object"),
        ("max_context.json", '{"cells":{"x":[{}]}}', "attempt 0 of x has no 'seq_len'"),
        ("max_context.json", {"cells": {"x": [A_RUN | {"fits": None}]}}, "has another type of 'fits'"),
        ("max_context.json", {"cells": {"x": [A_RUN, A_RUN | {"fits": True}]}}, "attempt 1 of x has no 'peak_bytes'"),
        ("table4.json", "[]", "it has no object 'cells'"),
        ("table4.json", '{"cells":{"x":[]}}', "x is not an object of runs"),
        ("table4.json", {"cells": {"x": {"ring": A_RUN}}}, "ring of x has no 'peak_bytes'"),
        ("table5.json", {"cells": {"x": {}}}, "x is not a list of attempts"),
        ("activations.json", "[]", "it has no object 'kinds'"),
        ("activations.json", '{"kinds":{"ring":{}}}', "ring has no 'local_tokens'"),
    ],
)
def test_a_damaged_file_is_named_in_one_line_before_anything_is_compiled(
    name, content, message, tmp_path, capsys, filled
):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert main(["tables", f"--out={tmp_path}/max_context.json"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"ringformer tables: {path} is not a file of these results: ") and message in said
    assert said.endswith(f"; delete it, or restore it: git checkout {path}\n") and said.count("\n") == 1
    assert not any(filled.values())
