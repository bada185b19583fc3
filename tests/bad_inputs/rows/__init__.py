"""The rows, by what is bad. `lines.tsv` has the exit code and a part of the line of each that is refused."""

from dataclasses import replace
from pathlib import Path

from tests.bad_inputs.rows import configs, json_files, models, numbers, paths, sources, tokenizers
from tests.bad_inputs.runner import Row

LINES = Path(__file__).with_name("lines.tsv")


def _table() -> list[Row]:
    """Return all rows, with the exit code and the message of each that is refused."""
    expected = {}
    for line in LINES.read_text(encoding="utf-8").split("\n"):
        if line:
            code, name, message = line.split("\t")
            expected[name] = (int(code), message)
    rows = []
    for module in (numbers, configs, json_files, sources, tokenizers, models, paths):
        for row in module.ROWS:
            if not row.harmless:
                code, message = expected.pop(row.name)
                row = replace(row, code=code, message=message)
            rows.append(row)
    assert not expected, f"{LINES} has lines of rows that do not exist: {list(expected)}"
    return rows


ROWS = _table()
