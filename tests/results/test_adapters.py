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
    gib = []
    for config in ("llama3_8b_512k_8xh100", "llama3_8b_1m_8xh200"):
        adapters = ["--config.init_from=runs/llama3-8b", "--config.lora.rank=16", "--config.lora.base_dtype=bfloat16"]
        command = ["estimate", f"--config=configs/{config}.py", "--target=8xH100", *adapters, "--closed_form", "--json"]
        assert main(command) == 0
        gib.append(json.loads(capsys.readouterr().out.splitlines()[-1])["peak_bytes"] / 2**30)
    assert f"512K fits on 8xH100 ({gib[0]:.1f} GiB), and 1M does not ({gib[1]:.1f})" in section, gib
