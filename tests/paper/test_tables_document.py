"""The written tables: what a cell says, and the closed forms beside the paper's own numbers."""

import json
from pathlib import Path

from ringformer.paper.max_context import ROWS, cells
from ringformer.paper.tables_document import _longest_text, write_tables

ROOT = Path(__file__).parents[2]


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


def test_the_committed_page_is_what_the_results_say(tmp_path):
    write_tables(ROOT / "results" / "max_context.json", ROOT / "results" / "activations.json", tmp_path)
    committed = (ROOT / "docs" / "tables.md").read_text()
    assert (tmp_path / "tables.md").read_text() == committed, "ringformer tables writes it"


def test_tables_and_figures_are_written_from_what_there_is(tmp_path):
    found = {cell.name: [attempt(cell.first_length)] for cell in cells(ROWS[-1:]) if cell.attention == "ring"}
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"cells": found}))
    held = {"local_tokens": 8192, "paper_bytes": 2**26, "forward_bytes": 3 * 2**26, "backward_bytes": 2.0**30}
    (tmp_path / "held.json").write_text(json.dumps({"kinds": {"blockwise": held}}))
    write_tables(results, tmp_path / "held.json", tmp_path / "docs")
    text = (tmp_path / "docs" / "tables.md").read_text()
    assert "| v5e-256 | 7B | 256/2 | 2,048K | ≥ 4,096K (2×) | ≥ 8,192K (4×) | ≥ 16,384K (8×) |" in text
    assert "| blockwise | 8,192 | 2 b s h | 64 | 192 | 1,024 |" in text
    assert "| 256 | ≥ 8,192K | 32,768 | 8.00 |" in text and "| 32 | - | - | - |" in text
    assert "1.00%" in text  # exposed of the ring's bytes
    pictures = {path.name: path.read_text() for path in (tmp_path / "docs" / "figures").iterdir()}
    assert pictures.keys() == {"longest_contexts.svg", "training_cost.svg"}
    assert "2×" in pictures["longest_contexts.svg"] and "16×" not in pictures["longest_contexts.svg"]
