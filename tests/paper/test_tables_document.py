"""The written tables: what a cell says, and the closed forms beside the paper's own numbers."""

import json
from pathlib import Path

import pytest

from benchmarks.paper_page.__main__ import main
from benchmarks.paper_page.page import _fits_text, _longest_text, _within_text, write_tables
from ringformer.estimate.search.longest_context import MAX_STEP_SECONDS
from ringformer.paper.attempts import ResultFiles, read
from ringformer.paper.cells import REGIMES, ROWS, Cell, cells
from ringformer.paper.max_context import longest

ROOT = Path(__file__).parents[2]


def attempt(seq_len, fits=True):
    found = {"peak_bytes": 2**33, "hbm_bytes": 2**34, "host_bytes": 0, "hidden_permute_bytes": 99.0}
    found |= {"exposed_permute_bytes": 1.0, "exposed_in_ring_loops_bytes": 0.0, "max_link_hops": 1}
    found |= {"head_groups": 4, "remat_group": 1, "step_seconds_model": 12.0, "compiled_by": "a compiler"}
    found |= {"seconds_source": "a formula", "generated_code": False}
    return found | {"seq_len": seq_len, "fits": fits, "date": "today"}


def test_a_cell_says_what_is_known():
    K = 1024
    assert _longest_text([]) == ""
    assert _longest_text([attempt(8 * K)], 2 * K) == "≥ 8K (4×)"
    assert _longest_text([attempt(8 * K), attempt(16 * K, fits=False)], 2 * K) == "8K (4×)"
    assert _longest_text([attempt(8 * K, fits=False)]) == "< 8K"


def test_a_cell_says_what_a_step_takes():
    K = 1024
    slow = attempt(8 * K) | {"step_seconds_model": 1.6 * 86400}
    assert _fits_text([slow], 2 * K) == "≥ 8K (4×) **⚠ 1.6 days**"
    assert (
        _fits_text([attempt(8 * K) | {"step_seconds_model": 86399.0}], 2 * K) == "≥ 8K (4×) 86,399\N{NO-BREAK SPACE}s"
    )
    assert _fits_text([], 2 * K) == ""


def test_the_other_end_is_the_longest_that_a_person_would_wait_for():
    """Of what was compiled; counted, and said so, where all that fits takes longer."""
    cell = Cell(ROWS[-1], "ring", REGIMES[1], 1)
    n = cell.paper
    known = [
        attempt(n) | {"step_seconds_model": 12.0},
        attempt(2 * n) | {"step_seconds_model": 3600.0},
        attempt(4 * n) | {"step_seconds_model": 3601.0},
        attempt(8 * n, fits=False),
    ]
    assert _within_text(cell, known) == "4,096K (2×) 3,600\u00a0s"
    assert _within_text(cell, known[2:3]) == "~ 4,096K (2×)"
    assert _within_text(cell, known[3:]) == ""


def test_steps_of_more_than_a_day_are_marked_on_the_committed_page():
    """And each is a cell whose compiled attempt takes that long."""
    page = (ROOT / "docs" / "tables.md").read_text()
    attempts = read(ROOT / "results" / "max_context.json")
    rings = [cell for cell in cells(ROWS) if cell.attention == "ring" and cell.kernel == "xla"]
    slow = [cell for cell in rings if longest(attempts[cell.name])["step_seconds_model"] > 86400]
    assert page.partition("## Table 3 with kernels")[0].count("**⚠ ") == len(slow) == 21
    assert f"{len(slow)} of the {len(rings)} maxima" in (ROOT / "docs" / "estimating.md").read_text()
    assert f"at most {MAX_STEP_SECONDS:,.0f} s" in page


def test_baselines_that_are_shorter_than_the_papers_are_named():
    page = (ROOT / "docs" / "tables.md").read_text()
    said = page.partition("shorter than the paper's: ")[2].partition("A closed form")[0]
    assert said.strip().split(", ") == [
        "blockwise of 32xA100-80 7B (64K of 128K)",
        "blockwise of 32xA100-80 13B (32K of 64K).",
    ]


def test_the_page_is_written_where_it_is_told_and_nothing_elsewhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main([f"--results={ROOT}/results/max_context.json", "--docs=page"])
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        "figures",
        "longest_contexts.svg",
        "page",
        "tables.md",
        "training_cost.svg",
        "training_mfu.svg",
    ]
    written = "page/tables.md figures/longest_contexts.svg figures/training_cost.svg figures/training_mfu.svg"
    assert capsys.readouterr().out.split() == written.split()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--results=none.json"], "--results=none.json does not exist"),
        ([f"--results={ROOT}/results/max_context.json", f"--docs={__file__}"], "is a file; give a folder"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_anything_is(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(words)
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_committed_page_is_what_the_results_say(tmp_path):
    write_tables(ResultFiles.beside(ROOT / "results" / "max_context.json"), tmp_path)
    committed = (ROOT / "docs" / "tables.md").read_text()
    assert (tmp_path / "tables.md").read_text() == committed, "python -m benchmarks.paper_page writes it"


def test_tables_and_figures_are_written_from_what_there_is(tmp_path):
    found = {cell.name: [attempt(cell.first_length)] for cell in cells(ROWS[-1:]) if cell.attention == "ring"}
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"cells": found}))
    held = {"local_tokens": 8192, "paper_bytes": 2**26, "forward_bytes": 3 * 2**26, "backward_bytes": 2.0**30}
    (tmp_path / "held.json").write_text(json.dumps({"kinds": {"blockwise": held}}))
    write_tables(
        ResultFiles(results, tmp_path / "held.json", tmp_path / "none.json", tmp_path / "none.json"), tmp_path / "docs"
    )
    text = (tmp_path / "docs" / "tables.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| v5e-256 | 7B | 256/2 | 2,048K |"))
    ends = "≥ {0} 12\u00a0s | {0} 12\u00a0s"  # both: the step of what fits takes 12 s
    assert row.endswith(" | ".join(ends.format(x) for x in ("4,096K (2×)", "8,192K (4×)", "16,384K (8×)")) + " |")
    assert "| blockwise | 8,192 | 2 b s h | 64 | 192 | 1,024 |" in text
    assert "| 256 | ≥ 8,192K | 32,768 | 8.00 | 12 |" in text and "| 32 | - | - | - | - |" in text
    assert "1.00%" in text  # exposed of the ring's bytes
    pictures = {path.name: path.read_text() for path in (tmp_path / "docs" / "figures").iterdir()}
    assert pictures.keys() == {"longest_contexts.svg", "training_cost.svg", "training_mfu.svg"}
    assert "| v4-1024 | 65B | XLA | 8K → 1,024K |  |  |  | 30% to 35% |  |  |  |" in text
    assert "2×" in pictures["longest_contexts.svg"] and "16×" not in pictures["longest_contexts.svg"]
