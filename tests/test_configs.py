"""The shipped configs: each parses, its stages are runs, and fit their hardware by the closed forms."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.stages import BEGIN, END, SHIPPED, stages, table, write
from benchmarks.tables import write_table
from ringformer.estimate import targets
from ringformer.estimate.closed_forms import ring_hops
from ringformer.estimate.commands import add_estimate
from ringformer.estimate.targets import find_target
from ringformer.estimate.workload import stage_workloads
from ringformer.runs.config_file import load_config, parse_stages
from tests.verbs import run_verb

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(ROOT.glob("configs/*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_a_list_of_runs(path):
    runs = parse_stages(load_config(path, []), inherit=False)
    assert len({run.seed for run in runs}) == len({run.run_dir for run in runs}) == len(runs)
    assert f"--config=configs/{path.name}" in path.read_text(), "a config opens with the command that runs it"


@pytest.mark.parametrize("name", SHIPPED)
def test_stages_suit_their_hardware(name):
    """Meshes use all devices, batches divide over them, and on a ring every hop has a block to hide under."""
    configs = parse_stages(load_config(ROOT / f"configs/{name}.py", []), inherit=False)
    for stage in stage_workloads(configs, find_target(SHIPPED[name])):
        dp, fsdp, tp, sp = stage.mesh_shape
        assert stage.batch_size % (dp * fsdp * stage.accumulate) == 0 and stage.seq_len % (2 * sp) == 0
        assert tp <= 8 and stage.model.num_heads % tp == 0
        assert 2**21 <= stage.step_tokens <= 2**22
        assert all(hop.compute > hop.link for hop in ring_hops(stage).values()), stage


def test_lwm_has_its_published_stages():
    runs = parse_stages(load_config(ROOT / "configs/lwm_7b_1m.py", []), inherit=False)
    assert [r.seq_len for r in runs] == [2**15, 2**17, 2**18, 2**19, 2**20]
    assert [r.model.rope_theta for r in runs] == [1e6, 1e7, 1e7, 2.5e7, 5e7]
    assert [(r.steps, r.optimizer.warmup_steps) for r in runs] == [
        (1200, 100),
        (3000, 200),
        (3000, 200),
        (720, 50),
        (450, 25),
    ]
    assert [(r.data.min_length, r.data.max_length) for r in runs] == [
        (10_000, 100_000),
        (100_000, 200_000),
        (200_000, 500_000),
        (500_000, 1_000_000),
        (1_000_000, 0),
    ]
    assert all(r.batch_size * r.seq_len == 2**22 and r.optimizer.learning_rate == 4e-5 for r in runs)


@pytest.mark.parametrize("name", SHIPPED)
def test_stages_fit_by_the_closed_forms(name, monkeypatch, capsys):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    arguments = [f"--config={ROOT}/configs/{name}.py", f"--target={SHIPPED[name]}", "--require_fit"]
    assert run_verb(add_estimate, *arguments) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if not line.startswith("environment: ")]
    head, rows = lines[0].split(), [line.split() for line in lines if line.endswith("should fit")]
    assert head[-6:] == ["s/step", "tokens/s", "MFU", "days", "device-hours", "passes"] and len(rows) > 1
    floor = 40 if "a100" in name or "h100" in name or "h200" in name else 50
    assert all(int(row[-6].removesuffix("%")) >= floor for row in rows)
    assert any(": not compiled: closed form: " in line for line in lines) and lines[-2].startswith("s/step: one opt")


def test_estimates_of_stages_without_a_compiler(monkeypatch, capsys):
    """One row a stage with the cost of its tokens; one that does not fit is an exit code of its own if it must."""
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    command = [add_estimate, f"--config={ROOT}/configs/llama3_8b_1m_8xh200.py"]
    assert run_verb(*command, "--target=8xH200", "--json") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["seq_len"] for row in rows] == [2**18, 2**19, 2**20]
    assert [row["tokens"] for row in rows] == [24 * 2**22, 100 * 2**22, 200 * 2**22]
    for row in rows:
        assert row["closed_form"] and row["fits"]
        assert row["days_model"] == pytest.approx(row["tokens"] / row["tokens_per_second_model"] / 86400)
        assert row["device_hours_model"] == pytest.approx(8 * 24 * row["days_model"])
    assert run_verb(*command, "--target=8xA100-80", "--stage=3", "--require_fit") == 3
    assert "DOES NOT FIT" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--stage=4 does not exist: the config has 3 stages"):
        run_verb(*command, "--target=8xH200", "--stage=4")


def test_the_table_of_stages_is_kept_between_its_marks(tmp_path):
    """From the committed results; what is not compiled yet says so."""
    rows = json.loads((ROOT / "results/stages.json").read_text())["stages"]
    assert rows.keys() <= stages().keys() and all(not row["closed_form"] for row in rows.values())
    out, page = tmp_path / "stages.json", tmp_path / "page.md"
    write(out, rows)
    assert json.loads(out.read_text())["stages"] == rows
    page.write_text((ROOT / "docs/finetuning.md").read_text())
    write_table(page, BEGIN, table(rows), END)
    assert page.read_text() == (ROOT / "docs/finetuning.md").read_text(), "python benchmarks/stages.py writes it"
    assert len(re.findall(r"not compiled yet \|", table({}))) == len(stages())
