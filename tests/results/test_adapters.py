"""The table of docs/finetuning.md on adapters is what its commands print today."""

import json
import re
from pathlib import Path

from ringformer.cli import main

ROOT = Path(__file__).parents[2]


def test_the_table_is_that_of_its_commands(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    section = (ROOT / "docs" / "finetuning.md").read_text().partition("## Train adapters (LoRA)")[2]
    commands = re.findall(r"^ringformer (estimate .*--closed_form)$", section.replace("\\\n", ""), re.MULTILINE)
    rows = []
    for command in commands:
        assert main([*command.split(), "--json"]) == 0
        last = json.loads(capsys.readouterr().out.splitlines()[-1])
        gib, seconds = last["peak_bytes"] / 2**30, last["step_seconds_model"]
        rows.append(f"| {last['seq_len']:,} | {last['batch_size']} | {last['target']} | {gib:.1f} | {seconds:.1f} |")
    assert len(rows) == 2 and all(row in section for row in rows), rows
