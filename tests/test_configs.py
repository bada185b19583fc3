"""The shipped configs: each parses, its stages are runs, and fit their hardware by the closed forms."""

import ast
import dataclasses
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest

from benchmarks.stages import BEGIN, END, END_OF_RECIPES, RECIPES, SHIPPED, recipes, stages, table, write
from benchmarks.tables import write_table
from ringformer.data import parse_mixture
from ringformer.estimate.closed_forms.training import ring_hops
from ringformer.estimate.commands import add_estimate
from ringformer.estimate.workloads import targets
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import stage_workloads
from ringformer.models.registry import preset_config, registered_by
from ringformer.ops.tokenwise.rope import RopeScaling
from ringformer.runs.config_file import load_config, parse_stages
from tests.test_documentation import check_script, check_verb
from tests.verbs import run_verb

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(ROOT.glob("configs/*.py"))


def runs_of(name, *overrides):
    return parse_stages(load_config(ROOT / f"configs/{name}.py", list(overrides)), inherit=False)


def docstring(path):
    return ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_a_list_of_runs(path):
    runs = parse_stages(load_config(path, []), inherit=False)
    assert len({run.seed for run in runs}) == len({run.run_dir for run in runs}) == len(runs)
    assert f"--config=configs/{path.name}" in path.read_text(), "a config opens with the command that runs it"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_commands_of_a_config_are_commands(path, monkeypatch):
    monkeypatch.setenv("RINGFORMER_PYTHON", "false")  # a dry run then makes no estimate
    lines = re.findall(r"^    (\S.*)", docstring(path).replace("\\\n", " "), re.MULTILINE)
    for program, *words in (shlex.split(line, comments=True) for line in lines):
        {"ringformer": check_verb, "bash": check_script, "sbatch": check_script}[program](words)
    assert sum(f"--config=configs/{path.name}" in line for line in lines) >= 1 + (path.stem in SHIPPED)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_tokens_that_a_config_names_are_its_own(path):
    """In its docstring: "1.01B tokens (240 steps with 4,194,304 tokens)"."""
    run, *later = runs_of(path.stem)
    text = " ".join(docstring(path).split())
    named = re.search(r"Expected: ([\d.]+)([BM]) tokens \(([\d,]+) steps(?: with ([\d,]+) tokens)?\)", text)
    assert named or path.stem not in SHIPPED or later, "a config of one run says how many tokens it trains on"
    if named:
        assert int(named[3].replace(",", "")) == run.steps
        assert not named[4] or int(named[4].replace(",", "")) == run.batch_size * run.seq_len
        tokens = run.steps * run.batch_size * run.seq_len / {"B": 1e9, "M": 1e6}[named[2]]
        assert f"{tokens:.{len(named[1].partition('.')[2])}f}" == named[1]


@pytest.mark.parametrize("name", SHIPPED)
def test_stages_suit_their_hardware(name):
    """Meshes use all devices, batches divide over them, and on a ring every hop has a block to hide under."""
    for stage in stage_workloads(runs_of(name), find_target(SHIPPED[name].target)):
        dp, fsdp, tp, sp = stage.mesh_shape
        assert stage.batch_size % (dp * fsdp * stage.accumulate) == 0 and stage.seq_len % (2 * sp) == 0
        assert tp <= 8 and stage.model.num_heads % tp == 0
        assert 2**21 <= stage.step_tokens <= 2**23
        assert all(hop.compute > hop.link for hop in ring_hops(stage).values()), stage


def test_lwm_has_its_published_stages():
    runs = runs_of("lwm_7b_1m")
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


ULTRALONG = {"ultralong_8b_1m": (2**20, 128.0), "ultralong_8b_4m": (2**22, 512.0)}
"""Contexts, and YaRN's factors over the 8,192 tokens that LLaMA 3 was first trained at (arXiv:2504.06214)."""


@pytest.mark.parametrize("name", ULTRALONG)
def test_ultralong_has_its_published_rope_and_packing(name):
    """One step on some 1B tokens; documents follow each other in one sequence, without masks."""
    (run,) = runs_of(name)
    seq_len, factor = ULTRALONG[name]
    assert run.seq_len == seq_len == 8192 * factor and run.optimizer.learning_rate == 3e-5
    assert run.model.rope_scaling == RopeScaling("yarn", factor, 8192, beta_slow=1.0, beta_fast=4.0)
    assert run.model.rope_theta == 5e5 and not run.data.has_segments and run.data.separator == "<s>"
    assert 1e9 <= run.steps * run.batch_size * seq_len < 1.3e9


def test_ultralong_at_4m_has_its_published_iterations():
    (run,) = runs_of("ultralong_8b_4m")
    assert (run.steps, run.batch_size) == (150, 2)


def test_olmo_has_its_published_stage():
    """50B tokens at 65,536; YaRN in the eight layers with full attention alone; a third of the mixture is long."""
    (run,) = runs_of("olmo3_7b_64k")
    assert run.batch_size * run.seq_len == 2**22 and round(run.steps * 2**22 / 1e9, 3) == 50.0
    assert (run.optimizer.learning_rate, run.optimizer.warmup_steps) == (2.0712e-4, 200)
    assert (run.data.packing, run.data.packed_attention) == ("whole", "document")
    assert run.data.mixture_by == "tokens"
    shares = {path: share / 50 for path, share in parse_mixture(run.data.mixture)}
    assert shares == {"data/long": 0.34, "data/short": 0.66}
    kinds = {(kind.window, kind.rope[1].kind) for kind in run.model.layer_kinds}
    assert kinds == {(0, "yarn"), (4096, "none")} and run.model.windows == {0: 8, 4096: 24}


YARN = {"ultralong_8b_1m", "ultralong_8b_4m", "qwen3_8b_512k_8xh100", "qwen3_8b_512k_lora_8xh100", "olmo3_7b_64k"}


@pytest.mark.parametrize("name", sorted(YARN))
@pytest.mark.parametrize("before", ["none", "llama3"])
def test_yarn_reaches_the_context_whatever_the_checkpoint_s_scaling(name, before, tmp_path):
    """The factor times the tokens of the first training is the context; theta is the checkpoint's."""
    config = runpy.run_path(str(ROOT / f"configs/{name}.py"))["get_config"]()
    scaling = {"none": RopeScaling(), "llama3": RopeScaling("llama3", 8.0, 8192)}[before]
    model = preset_config(config.preset, rope_scaling=scaling, rope_theta=123456.0)
    (tmp_path / "config.json").write_text(json.dumps({"model": dataclasses.asdict(model)} | registered_by(model)))
    config.init_from = str(tmp_path)
    (run,) = parse_stages(config)
    scaling = run.model.rope_scaling
    assert scaling.kind == "yarn" and scaling.factor * scaling.original_max_position == run.seq_len
    assert run.model.rope_theta == 123456.0


@pytest.mark.parametrize("name", ["llama3_8b_512k", "qwen3_8b_512k"])
def test_adapters_train_what_the_full_config_trains(name):
    """At its longest context, with its rope, data and hardware, on no more tokens."""
    full, lora = runs_of(f"{name}_8xh100")[-1], runs_of(f"{name}_lora_8xh100")[-1]
    assert (lora.lora.rank, lora.lora.base_dtype, full.lora.rank) == (16, "bfloat16", 0)
    assert lora.model == dataclasses.replace(full.model, offload=False) and lora.seq_len == 2**19
    assert lora.data == full.data and lora.mesh_dim == full.mesh_dim
    assert lora.steps * lora.batch_size <= full.steps * full.batch_size


def floor_of(name):
    """The lowest share of the peak that a step may reach."""
    return 0.4 if any(gpu in SHIPPED[name].target for gpu in ("A100", "H100", "H200")) else 0.5


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_fit_by_the_closed_forms(name, monkeypatch, capsys):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    arguments = [f"--config={ROOT}/configs/{name}.py", f"--target={SHIPPED[name].target}", "--require_fit", "--json"]
    assert run_verb(add_estimate, *arguments) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == len(runs_of(name)) and all(row["closed_form"] and row["fits"] for row in rows)
    assert all(row["mfu_causal_model"] >= floor_of(name) for row in rows)


@pytest.mark.parametrize("name", ["llama3_8b_1m_8xh200", "lwm_7b_1m"])
def test_stages_are_a_table(name, monkeypatch, capsys):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    arguments = [f"--config={ROOT}/configs/{name}.py", f"--target={SHIPPED[name].target}", "--require_fit"]
    assert run_verb(add_estimate, *arguments) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if not line.startswith("environment: ")]
    head, rows = lines[0].split(), [line.split() for line in lines if line.endswith("should fit")]
    assert head[-6:] == ["s/step", "tokens/s", "MFU", "duration", "device-hours", "passes"] and len(rows) > 1
    shares = [next(word for word in row if word.endswith("%")) for row in rows]
    assert all(int(mfu.removesuffix("%")) >= 100 * floor_of(name) for mfu in shares)
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


def test_the_tables_of_recipes_and_stages_are_kept_between_their_marks(tmp_path):
    """From the committed results; what is not compiled yet says so."""
    rows = json.loads((ROOT / "results/stages.json").read_text())["stages"]
    assert rows.keys() <= stages().keys() and all(not row["closed_form"] for row in rows.values())
    out, page = tmp_path / "stages.json", tmp_path / "page.md"
    write(out, rows)
    assert json.loads(out.read_text())["stages"] == rows
    page.write_text((ROOT / "docs/finetuning.md").read_text())
    write_table(page, RECIPES, recipes(rows), END_OF_RECIPES)
    write_table(page, BEGIN, table(rows), END)
    assert page.read_text() == (ROOT / "docs/finetuning.md").read_text(), "python benchmarks/stages.py writes it"
    assert len(re.findall(r"not compiled yet \|", table({}))) == len(stages())
    assert len(re.findall(r"not compiled yet \|", recipes({}))) == len(SHIPPED)


def test_a_recipe_s_days_and_tokens_are_those_of_all_its_stages():
    """By hand, from the table of stages: LWM's five."""
    page = (ROOT / "docs/finetuning.md").read_text()
    section = page.partition("**lwm_7b_1m** on v4-512")[2].partition("Compiled by")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| stage-")]
    (row,) = re.findall(r"^\| \[lwm_7b_1m\].*", page, re.MULTILINE)
    _, _, _, context, tokens, target, days = row.strip("| ").split(" | ")
    assert (context, target, len(rows)) == ("1,048,576", "v4-512", 5)
    millions = sum(int(row[4].removesuffix("M").replace(",", "")) for row in rows)
    assert float(tokens.removesuffix("B")) == pytest.approx(millions / 1e3, abs=0.01)
    assert float(days) == pytest.approx(sum(float(row[-2]) for row in rows), abs=0.03)
