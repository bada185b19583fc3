"""Edits between two starts of a run: each is listed, or refused by name, or shown to change nothing; none is silent."""

import dataclasses
import hashlib
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from ringformer.checkpoints.saved_model import model_of
from ringformer.files.untrusted import read_object
from ringformer.inference.generator import load_model
from ringformer.models.families.llama import LlamaConfig
from ringformer.ops.tokenwise.rope import RopeScaling
from ringformer.runs.config import Config, DataConfig, OptimizerConfig
from ringformer.runs.identity import run_identity
from ringformer.runs.record import RunChanged, check_run, keep_record
from ringformer.train import evaluation, loop, program
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from tests.data.chat_samples import llama3

MODEL = LlamaConfig(
    vocab_size=420,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=8,
    init_std=0.2,
    compute_dtype="float32",
    attention="vanilla",
    remat="none",
    loss_chunk=16,
)


def counting_step(state, batch):
    """A train step that compiles nothing."""
    del batch
    return state._replace(step=state.step + 1), {"loss": 1.0, "grad_norm": 1.0, "tokens": 64, "masked": 0, "skipped": 0}


@pytest.fixture
def no_training(monkeypatch):
    fake(monkeypatch)


def fake(monkeypatch):
    monkeypatch.setattr(program, "make_train_step", lambda *_, **__: counting_step)
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: None)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of four steps that was killed after its save of the second, what it began with, and other stores."""
    folder = tmp_path_factory.mktemp("begun")
    rng = np.random.default_rng(0)
    for name, words in (("texts", ["ring", "block", "key"]), ("others", ["query", "value"])):
        (folder / name).mkdir()
        for i in range(60):
            (folder / name / f"{i}.txt").write_text(" ".join(rng.choice(words, rng.integers(20, 200))))
    llama3(folder / "tokenizer")
    data = DataConfig(store=str(folder / "store"), source=f"text:{folder}/texts/*.txt", held_out=0.2)
    first = Config(
        model=MODEL,
        data=data,
        optimizer=OptimizerConfig(warmup_steps=1, learning_rate=1e-2),
        run_dir=str(folder / "first"),
        mesh_dim="4,2,1,1",
        seq_len=64,
        batch_size=8,
        steps=2,
        eval_batches=1,
    )
    with pytest.MonkeyPatch.context() as patch:
        fake(patch)
        train(prepare(first))
    others = dataclasses.replace(data, store=str(folder / "other"), source=f"text:{folder}/others/*.txt")
    prepare(dataclasses.replace(first, run_dir=str(folder / "none"), data=others))
    config = dataclasses.replace(
        first, run_dir=str(folder / "run"), init_from=first.run_dir, steps=4, checkpoint_every=2
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "evaluate", lambda *_, **__: None)
        train(prepare(config))
    losses = [row["loss"] for row in rows(config.run_dir) if "loss" in row]
    shutil.rmtree(folder / "run" / "checkpoints" / "4")
    keep_rows(config.run_dir, 2)
    return SimpleNamespace(folder=folder, config=config, losses=losses)


def rows(run_dir) -> list[dict]:
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


def keep_rows(run_dir, last: int) -> None:
    kept = [row for row in rows(run_dir) if row["step"] <= last]
    Path(run_dir, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))


def contents(folder) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() + str(path.stat().st_mtime_ns)
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def edited(config: Config, edits: dict) -> Config:
    """Dotted keys of a config replaced; the optimizer's after `steps`."""
    for key, value in edits.items():
        part, _, name = key.rpartition(".")
        if part:
            config = dataclasses.replace(config, **{part: dataclasses.replace(getattr(config, part), **{name: value})})
        else:
            config = dataclasses.replace(config, **{name: value})
    return config


def mixture(folder, first: int, second: int) -> dict:
    return {"data": DataConfig(mixture=f"{folder}/store:{first},{folder}/other:{second}", held_out=0.2)}


LISTED = {
    # As the issue found them silent.
    "learning rate x 100": {"optimizer.learning_rate": 1.0},
    "seed": {"seed": 1},
    "theta": {"model.rope_theta": 1e6},
    "batch": {"batch_size": 16},
    "context": {"seq_len": 128},
    "b1": {"optimizer.b1": 0.8},
    "b2": {"optimizer.b2": 0.99},
    "schedule": {"optimizer.schedule": "constant"},
    "warm-up": {"optimizer.warmup_steps": 2},
    "warm-up unset": {"optimizer.warmup_steps": None},
    "steps": {"steps": 8},
    "weight decay": {"optimizer.weight_decay": 0.0},
    "clip norm": {"optimizer.clip_norm": 0.1},
    "packing": {"data.packing": "whole"},
    # Others.
    "end of the cosine": {"optimizer.final_fraction": 0.0},
    "eps": {"optimizer.eps": 1e-6},
    "scaling": {"model.rope_scaling": RopeScaling("linear", 2.0)},
    "dtype": {"model.compute_dtype": "bfloat16"},
    "first weights": {"model.init_std": 0.02},
    "packed attention": {"data.packed_attention": "sequence"},
    "shortest document": {"data.min_length": 30},
    "longest document": {"data.max_length": 900},
    "from nothing": {"init_from": ""},
    "heads exchanged": {"model.ulysses": 2, "model.attention": "ring", "mesh_dim": "1,4,1,2"},
    "way of the keys": {"model.ring": "gathered", "model.attention": "ring", "mesh_dim": "1,4,1,2"},
    "two at once": {"seed": 3, "optimizer.eps": 1e-5},
    "a harmless one beside": {"seed": 3, "mesh_dim": "1,8,1,1", "eval_every": 1},
}
ALSO = {
    "schedule": {"steps", "optimizer.final_fraction"},
    "a harmless one beside": {"mesh_dim", "eval_every"},
    "heads exchanged": {"model.attention", "mesh_dim"},
    "way of the keys": {"model.attention", "mesh_dim"},
}
"""Keys that are listed besides, or not."""


def assert_listed(run_dir, config: Config, keys: set[str]) -> None:
    """Refused with these keys, before anything is written; allowed with them all, and not without one."""
    before = contents(run_dir)
    with pytest.raises(RunChanged) as error:
        prepare(config)
    assert set(error.value.keys) == keys
    said = str(error.value)
    assert all(f"{key} " in said for key in keys) and said.endswith(f"--allow={','.join(error.value.keys)}")
    assert "\n" not in said
    for key in keys:
        with pytest.raises(RunChanged):
            prepare(config, keys - {key})
    prepare(config, keys)
    assert contents(run_dir) == before


@pytest.mark.parametrize("name", LISTED)
def test_an_edit_that_makes_another_run_is_listed(begun, name):
    keys = set(LISTED[name]) ^ ALSO.get(name, set())
    assert_listed(begun.config.run_dir, edited(begun.config, LISTED[name]), keys)


def test_other_data_are_listed(begun):
    folder, c = begun.folder, begun.config
    others = f"text:{folder}/others/*.txt"
    for edits in (
        {"data.store": f"{folder}/other", "data.source": others},
        mixture(folder, 1, 3),
        mixture(folder, 3, 1),
        {"data": DataConfig(mixture=f"{folder}/other:1", held_out=0.2)},
        {"data": DataConfig(mixture=f"{folder}/store:1", held_out=0.0)},
    ):
        assert_listed(c.run_dir, edited(c, edits), {"data.store"})


def test_weights_of_a_mixture_are_listed_and_their_common_factor_is_not(begun, tmp_path):
    c = edited(copy(begun, tmp_path), mixture(begun.folder, 1, 3))
    record(c)
    prepare(edited(c, mixture(begun.folder, 2, 6)))
    for shares in ((3, 1), (1, 4)):
        assert_listed(c.run_dir, edited(c, mixture(begun.folder, *shares)), {"data.store"})
    turned = {"data": DataConfig(mixture=f"{begun.folder}/other:3,{begun.folder}/store:1", held_out=0.2)}
    assert_listed(c.run_dir, edited(c, turned), {"data.store"})


def test_a_store_that_is_built_anew_is_listed_if_its_documents_are_others(begun, tmp_path):
    c = copy(begun, tmp_path)
    shutil.copytree(begun.folder / "texts", tmp_path / "texts")
    c = edited(c, {"data.store": f"{tmp_path}/store", "data.source": f"text:{tmp_path}/texts/*.txt"})
    prepare(c)  # the same documents elsewhere
    shutil.rmtree(tmp_path / "store")
    with (tmp_path / "texts" / "7.txt").open("a") as file:
        file.write(" ring")
    assert_listed(c.run_dir, c, {"data.store"})


def test_another_beginning_is_listed_and_the_same_one_elsewhere_is_not(begun, tmp_path):
    c, first = copy(begun, tmp_path), begun.config.init_from
    shutil.copytree(first, tmp_path / "moved")
    prepare(edited(c, {"init_from": f"{tmp_path}/moved"}))
    (tmp_path / "moved" / "checkpoints" / "2").rename(tmp_path / "moved" / "checkpoints" / "3")
    assert_listed(c.run_dir, edited(c, {"init_from": f"{tmp_path}/moved"}), {"init_from"})
    assert_listed(c.run_dir, edited(c, {"init_from": c.run_dir}), {"init_from"})
    # Its own checkpoint is what the run goes on from: the other folder may go, but not change its name and go.
    record(edited(c, {"init_from": f"{tmp_path}/moved"}))
    shutil.rmtree(tmp_path / "moved" / "checkpoints")
    prepare(edited(c, {"init_from": f"{tmp_path}/moved"}))
    (tmp_path / "empty").mkdir()
    assert_listed(c.run_dir, edited(c, {"init_from": f"{tmp_path}/empty"}), {"init_from"})


REFUSED = {
    "tokenizer": ({"data.tokenizer": "{folder}/tokenizer"}, "data.tokenizer bytes -> "),
    "width": ({"model.hidden_size": 32}, r"another model \(hidden_size 16 there, 32 here\)"),
    "layers": ({"model.num_layers": 1}, r"another model \(num_layers 2 there, 1 here\)"),
    "norm": ({"model.norm_eps": 1e-5}, r"another model \(norm_eps 1e-06 there, 1e-05 here\)"),
    "source": ({"data.source": "text:{folder}/others/*.txt"}, "were built with other options: source is"),
    "empty documents": ({"data.skip_empty": True}, "were built with other options: skip_empty is"),
    "cleaning": ({"data.clean": "html"}, "were built with other options: clean is '', not 'html'"),
    "malformed records": ({"data.skip_malformed": True}, "skip_malformed is False, not True"),
    "held out": ({"data.held_out": 0.3}, "were built with other options: held_out is 0.2, not 0.3"),
    "none held out": ({"data.held_out": 0.0}, r"data\.store .*store \(.*\) -> "),
    "format": ({"data.format": "messages"}, "were built with other options: "),
    "fewer steps than it has": ({"optimizer.warmup_steps": 0, "steps": 1}, "steps 4 -> 1; "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_edit_that_cannot_be_is_refused_by_name(begun, name):
    edits, message = REFUSED[name]
    edits = {k: v.format(folder=begun.folder) if isinstance(v, str) else v for k, v in edits.items()}
    before = contents(begun.config.run_dir)
    with pytest.raises(ValueError, match=message):
        prepare(edited(begun.config, edits))
    assert contents(begun.config.run_dir) == before


ON_A_MESH = {
    "mesh_dim": "1,2,2,2",
    "accumulate": 2,
    "model.attention": "ring",
    "model.layout": "striped",
    "model.remat": "dots",
    "model.q_chunk": 8,
    "model.k_chunk": 4,
    "model.ffn_chunk": 8,
    "model.loss_chunk": 8,
    "model.kernel": "auto",
    "eval_every": 1,
    "eval_batches": 2,
    "checkpoint_every": 3,
    "checkpoint_minutes": 0.0,
    "keep_checkpoints": 5,
    "tensorboard": False,
    "data.chat_length": 99,
    "data.clean": "html,unprintable,duplicate",
    "data.template": "llama2",
    "data.max_document_bytes": 10**6,
    "preset": "tiny",
}
ON_ONE_DEVICE = {
    "mesh_dim": "1,1,1,1",
    "model.attention": "blockwise",
    "model.layout": "contiguous",
    "model.remat": "full",
    "model.remat_group": 2,
    "model.head_groups": 2,
    "cpu_devices": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "edits",
    [pytest.param(ON_A_MESH, marks=pytest.mark.slow, id="mesh"), pytest.param(ON_ONE_DEVICE, id="one device")],
)
def test_harmless_edits_go_on_to_the_same_losses(begun, tmp_path, edits, monkeypatch):
    """The run itself copied to another folder, each of the edits beside those of the mesh, and all of them at once."""
    if edits is ON_ONE_DEVICE:
        devices = jax.devices()[:1]
        monkeypatch.setattr(jax, "devices", lambda *_: devices)
    c = copy(begun, tmp_path)
    for key, value in edits.items():
        prepare(edited(c, {name: edits[name] for name in ("model.attention", "mesh_dim")} | {key: value}))
    c = edited(c, edits)
    train(prepare(c))
    found = [row["loss"] for row in rows(c.run_dir) if "loss" in row]
    np.testing.assert_allclose(found, begun.losses, rtol=1e-5)
    assert len(found) == 4 and not Path(c.run_dir, "changes.jsonl").exists()


def copy(begun, folder) -> Config:
    shutil.copytree(begun.config.run_dir, folder / "copy")
    return dataclasses.replace(begun.config, run_dir=str(folder / "copy"))


def record(config: Config) -> None:
    """Make the folder's run that of the config."""
    run = prepare(config, {"data.store", "init_from"})
    keep_record(run.run_dir, run.identity, None, {})


def test_more_steps_at_a_constant_rate_are_the_same_run(begun, tmp_path):
    c = edited(copy(begun, tmp_path), {"optimizer.schedule": "constant"})
    record_as(c)
    prepare(edited(c, {"steps": 400}))
    prepare(edited(c, {"optimizer.final_fraction": 0.5}))
    with pytest.raises(ValueError, match="is at step 2, beyond steps=1: choose another run_dir"):
        prepare(edited(c, {"optimizer.warmup_steps": 0, "steps": 1}), {"optimizer.warmup_steps"})


def record_as(config: Config) -> None:
    path = Path(config.run_dir, "identity.json")
    kept = read_object(config.run_dir, "identity.json")
    kept["identity"] |= {"optimizer.schedule": "constant", "steps": None, "optimizer.final_fraction": None}
    path.write_text(json.dumps(kept))


def test_a_changed_digit_of_a_record_is_noticed(begun, tmp_path):
    """By whoever reads it: no flipped bit is taken for another config."""
    c = copy(begun, tmp_path)
    for name, old, new in (
        ("config.json", '"rope_theta": 10000.0', '"rope_theta": 90000.0'),
        ("identity.json", '"seed": 0', '"seed": 8'),
    ):
        path = Path(c.run_dir, name)
        whole = path.read_text()
        path.write_text(whole.replace(old, new))
        assert path.read_text() != whole
        for reader in (lambda: prepare(c), lambda: prepare(edited(c, {"seed": 8}))):
            with pytest.raises(ValueError, match=rf"{name} is not what was written: its checksum differs"):
                reader()
        if name == "config.json":
            for reader in (model_of, load_model):
                with pytest.raises(ValueError, match=rf"{name} is not what was written: its checksum differs"):
                    reader(c.run_dir)
        path.write_text(whole)
    prepare(c)


def test_a_longer_cosine_names_the_rate_before_and_after(begun, tmp_path, capfd, no_training):
    """The rate of the step that comes next, as computed by hand."""
    c = copy(begun, tmp_path)
    longer = edited(c, {"steps": c.steps + 2})
    train(prepare(longer, ["steps"]))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("learning rate")]
    values = re.fullmatch(r"learning rate of step 3: (\S+) -> (\S+)", line)
    expected = [cosine(config, updates=2) for config in (c, longer)]
    assert [float(values[1]), float(values[2])] == pytest.approx(expected, rel=1e-2) and expected[0] < expected[1]
    train(prepare(longer))  # the control: from here on the run is this one
    assert "learning rate of step" not in capfd.readouterr().err


def cosine(config, updates):
    peak, warmup, last = (
        config.optimizer.learning_rate,
        config.optimizer.warmup(config.steps),
        config.optimizer.final_fraction,
    )
    if updates < warmup:
        return peak * updates / warmup
    done = (updates - warmup) / (config.steps - warmup)
    return peak * (last + (1 - last) * (1 + math.cos(math.pi * done)) / 2)


def test_an_allowed_change_is_recorded_with_its_step(begun, tmp_path, capfd, no_training):
    c = edited(copy(begun, tmp_path), {"optimizer.learning_rate": 1e-3})
    with pytest.raises(ValueError, match=r"--allow=optimizer\.learning_rat: .*did you mean optimizer\.learning_rate"):
        prepare(c, ["optimizer.learning_rat"])
    train(prepare(c, ["optimizer.learning_rate", "seed"]))
    (line,) = Path(c.run_dir, "changes.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 2, "changes": {"optimizer.learning_rate": [1e-2, 1e-3]}}
    said = capfd.readouterr().err
    assert "changed from step 2 on: optimizer.learning_rate 0.01 -> 0.001" in said
    assert re.search(r"^learning rate of step 3: (\S+) -> (\S+)$", said, re.MULTILINE)
    rates = [row["learning_rate"] for row in rows(c.run_dir) if "loss" in row]
    assert rates[1] == pytest.approx(1e-2) and 1e-4 <= rates[2] <= 1e-3
    prepare(c)  # this is the run now
    assert_listed(c.run_dir, edited(c, {"optimizer.learning_rate": 1e-2}), {"optimizer.learning_rate"})


def test_a_change_that_no_step_was_saved_with_is_not_recorded(begun, tmp_path, no_training, monkeypatch):
    """Stopped before: the run may still go on as it was."""
    c = copy(begun, tmp_path)
    changed = edited(c, {"optimizer.learning_rate": 1e-3})
    monkeypatch.setattr(loop, "check_state_finite", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train(prepare(changed, ["optimizer.learning_rate"]))
    assert not Path(c.run_dir, "changes.jsonl").exists()
    assert read_object(c.run_dir, "config.json")["optimizer"]["learning_rate"] == c.optimizer.learning_rate
    prepare(c)
    assert_listed(c.run_dir, changed, {"optimizer.learning_rate"})


def test_a_record_that_is_missing_or_torn(begun, tmp_path):
    """Of an older version, or lost: config.json says what the run was; without either nothing is assumed."""
    c = copy(begun, tmp_path)
    identity, config = (Path(c.run_dir, name) for name in ("identity.json", "config.json"))
    whole = identity.read_text()
    for text in ("", whole[:50], "[]", "{}", '{"identity": 3, "saved": 2}'):
        identity.write_text(text)
        with pytest.raises(ValueError, match=r"identity\.json .*; restore it, or delete it"):
            prepare(c)
    identity.unlink()
    prepare(c)
    assert_listed(c.run_dir, edited(c, {"seed": 9, "optimizer.b1": 0.5}), {"seed", "optimizer.b1"})
    assert_listed(c.run_dir, edited(c, mixture(begun.folder, 1, 1)), {"data.store"})
    config.write_text(config.read_text()[:300])
    with pytest.raises(ValueError, match=r"config\.json is not JSON: .*bring back a copy"):
        prepare(c)
    config.unlink()
    with pytest.raises(ValueError, match=r"has checkpoints, but neither identity\.json nor config\.json"):
        prepare(c)
    identity.write_text(whole)
    prepare(c)
    assert_listed(c.run_dir, edited(c, {"seed": 9}), {"seed"})


def test_metrics_of_a_run_without_checkpoints_are_not_wiped(begun, tmp_path):
    c = copy(begun, tmp_path)
    checkpoints, metrics = Path(c.run_dir, "checkpoints"), Path(c.run_dir, "metrics.jsonl")
    kept = metrics.read_bytes()
    shutil.rmtree(checkpoints)
    for empty in (False, True):  # the folder itself, or what is in it
        if empty:
            checkpoints.mkdir()
            recorded = Path(c.run_dir, "identity.json")
            recorded.write_text(json.dumps(read_object(c.run_dir, "identity.json") | {"saved": 2}))
        with pytest.raises(ValueError, match=r"metrics\.jsonl goes up to step 2, but there is no checkpoint"):
            train(prepare(c))
        assert metrics.read_bytes() == kept
    metrics.unlink()
    assert check_run(Path(c.run_dir), run_identity(c, "bytes"), c.steps) == (None, {})


def test_a_run_killed_before_its_first_save_begins_anew_as_what_its_config_says(begun, tmp_path):
    c = copy(begun, tmp_path)
    shutil.rmtree(Path(c.run_dir, "checkpoints"))
    Path(c.run_dir, "checkpoints").mkdir()
    recorded = Path(c.run_dir, "identity.json")
    recorded.write_text(json.dumps(read_object(c.run_dir, "identity.json") | {"saved": None}))
    prepare(edited(c, {"seed": 5}))
