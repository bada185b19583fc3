"""Rates of docs/data.md are those of results/."""

import json
import statistics
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def rows_of(title: str) -> list[list[str]]:
    """The cells of the table below the first line that begins with `title`."""
    _, _, rest = (ROOT / "docs" / "data.md").read_text().partition(title)
    lines = rest[rest.index("\n| ") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_rates_of_tokens():
    rows = json.loads((ROOT / "results" / "prepare_tokens.json").read_text())["rows"]
    for row in rows:
        assert row["tokens_per_second"] == statistics.median(row["rates"])
    rates = [f"{row['tokens_per_second'] / 1e6:.1f}" for row in rows]
    lengths = [f"{row['row_tokens']:,}" for row in rows]
    expected = [[lengths[i], rates[i], rates[i + 1]] for i in range(0, len(rows), 2)]
    assert rows_of("**Rows of tokens.** `--format=tokens` reads") == expected
    assert [row["labels"] for row in rows] == [False, True] * 4


def test_rates_of_text():
    rows = json.loads((ROOT / "results" / "prepare.json").read_text())["rows"]
    expected = [(f"{r['rate_over_bare']:.2f}", f"{min(r['ratios']):.2f} to {max(r['ratios']):.2f}") for r in rows]
    assert [tuple(cells[2:]) for cells in rows_of("## Preparation")] == expected
