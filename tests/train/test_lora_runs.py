"""Runs that train adapters: saved without their base, resumed, read by everything that reads a model."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from ringformer.checkpoints.saved_model import restore_params
from ringformer.parallel.lora import NO_ADAPTERS
from ringformer.parallel.mesh import make_mesh
from ringformer.parallel.parameters import weight_shardings
from ringformer.runs.config import base_config
from ringformer.runs.config_file import parse
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from tests.helpers import relative_error, unpadded
from tests.train.runs import MODEL, read_metrics, saved_arrays

LORA = {"rank": 4, "targets": "q_proj,v_proj,o_proj,down_proj"}


def config(folder: Path, name: str, mesh_dim="1,2,1,4", lora=LORA, **changes):
    values = base_config("tiny")
    values.update({"seq_len": 64, "batch_size": 8, "steps": 4, "checkpoint_every": 2, "mesh_dim": mesh_dim})
    values.update({"run_dir": str(folder / name), "eval_every": 2, "eval_batches": 1} | changes)
    model = {field.name: getattr(MODEL, field.name) for field in dataclasses.fields(MODEL)}
    model = {name: value for name, value in model.items() if name not in ("rope_scaling", "attention", "remat")}
    values.model.update(model)
    values.data.update({"store": str(folder / "store"), "source": f"jsonl:{folder}/rows.jsonl", "held_out": 0.2})
    values.optimizer.learning_rate = 1e-2
    values.lora.update(lora)
    return parse(values)


@pytest.fixture(scope="module")
def folder_of_base(tmp_path_factory):
    """A trained base."""
    folder = tmp_path_factory.mktemp("lora")
    rows = [{"text": f"{i} keys and values travel around the ring while queries stay"} for i in range(200)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train(prepare(config(folder, "base", lora={})))
    return folder


@pytest.fixture(scope="module")
def folder(folder_of_base):
    """A trained base, and a run with adapters of it."""
    folder = folder_of_base
    train(prepare(config(folder, "adapters", init_from=str(folder / "base"))))
    return folder


def parameters(run: Path, mesh_dim="1,1,1,1", devices=1):
    mesh = make_mesh(mesh_dim, jax.devices()[:devices])
    weights = weight_shardings(config(run.parent, run.name, lora={}).model, mesh)
    return unpadded(restore_params(run, weights, mesh), weights)


def saved_parameters(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints" / "4" / "default").glob("params.*")}


def test_a_run_without_adapters_saves_all_weights(folder_of_base):
    saved = saved_parameters(folder_of_base / "base")
    assert {"params.embed", "params.layers.attention.wk", "params.layers.feedforward.w_down"} <= saved
    assert not any(name.endswith((".a", ".b")) for name in saved)


def test_a_run_saves_its_adapters_alone(folder):
    saved = saved_parameters(folder / "adapters")
    targets = ("attention.wq", "attention.wv", "attention.wo", "feedforward.w_down")
    assert saved == {f"params.layers.{target}.{factor}" for target in targets for factor in "ab"}
    losses = [row["eval_loss"] for row in read_metrics(folder / "adapters") if "eval_loss" in row]
    before = [row["eval_loss"] for row in read_metrics(folder / "base") if "eval_loss" in row][-1]
    assert losses[0] == pytest.approx(before, rel=1e-6), "fresh adapters change nothing"
    assert losses[-1] < losses[0]


def test_a_reader_gets_the_merged_weights(folder):
    """On any mesh; only the targets differ from the base. The held-out loss is that of the run's end."""
    base, merged = parameters(folder / "base"), parameters(folder / "adapters")
    changed = jax.tree.map(lambda a, b: bool((np.asarray(a) != np.asarray(b)).any()), base, merged)
    attention, feedforward = changed["layers"]["attention"], changed["layers"]["feedforward"]
    assert {name for name in attention if attention[name]} == {"wq", "wv", "wo"}
    assert {name for name in feedforward if feedforward[name]} == {"w_down"} and not changed["embed"]
    on_mesh = parameters(folder / "adapters", "1,2,2,2", 8)
    assert max(jax.tree.leaves(jax.tree.map(relative_error, on_mesh, merged))) <= 1e-7
    train(prepare(config(folder, "continued", lora={}, init_from=str(folder / "adapters"), steps=1)))
    first = next(row["eval_loss"] for row in read_metrics(folder / "continued") if "eval_loss" in row)
    last = [row["eval_loss"] for row in read_metrics(folder / "adapters") if "eval_loss" in row][-1]
    assert first == pytest.approx(last, rel=1e-6)


@pytest.mark.slow
def test_a_run_resumes(folder):
    """To the same bits on the same mesh, to 1e-6 on another."""
    for name, mesh_dim in (("same", "1,2,1,4"), ("other", "1,1,1,8")):
        shutil.copytree(folder / "adapters", folder / name)
        shutil.rmtree(folder / name / "checkpoints" / "4")
        train(prepare(config(folder, name, mesh_dim=mesh_dim, init_from=str(folder / "base"))))
    assert saved_arrays(folder / "same", 4) == saved_arrays(folder / "adapters", 4)
    expected = parameters(folder / "adapters")
    assert max(jax.tree.leaves(jax.tree.map(relative_error, parameters(folder / "other"), expected))) <= 1e-6


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 2}, r"lora\.rank 4 -> 2"),
        ({"rank": 0, "targets": NO_ADAPTERS.targets}, r"lora\.rank 4 -> 0"),
        ({"targets": "q_proj"}, r"lora\.targets"),
        ({"alpha": 4.0}, r"lora\.alpha"),
    ],
    ids=["another rank", "no adapters", "targets", "alpha"],
)
def test_other_adapters_are_another_run(folder, lora, message):
    other = config(folder, "adapters", lora=LORA | lora, init_from=str(folder / "base"))
    with pytest.raises(ValueError, match=message) as error:
        prepare(other)
    if "alpha" in lora:
        assert "continue the run with --allow=lora.alpha" in str(error.value)
    else:  # the checkpoint has other arrays
        assert "--allow" not in str(error.value)
        with pytest.raises(ValueError, match=message):
            prepare(other, allow=["lora.rank", "lora.targets", "steps"])


def test_adapters_need_their_base(folder):
    with pytest.raises(ValueError, match=r"lora\.rank=4 trains adapters of a model: name it with init_from"):
        config(folder, "nothing")
    shutil.copytree(folder / "adapters", folder / "apart")
    (folder / "base").rename(folder / "away")
    try:
        with pytest.raises(FileNotFoundError, match=r"has adapters of the model in .*base, which is not there"):
            parameters(folder / "apart")
        shutil.copytree(folder / "away", folder / "base")
        shutil.rmtree(folder / "base" / "checkpoints" / "4")  # step 2 is the latest one
        with pytest.raises(ValueError, match=r"has adapters of the model in .*base, which has other weights now"):
            parameters(folder / "apart")
    finally:
        shutil.rmtree(folder / "base", ignore_errors=True)
        (folder / "away").rename(folder / "base")


@pytest.mark.slow
def test_frozen_weights_in_bfloat16(folder):
    """The base rounded to bfloat16, and not the adapters."""
    lora = LORA | {"base_dtype": "bfloat16"}
    run = prepare(config(folder, "half", lora=lora, init_from=str(folder / "base")))
    (frozen,) = run.frozen()
    assert {str(x.dtype) for x in jax.tree.leaves(frozen)} == {"bfloat16"}
    train(run)
    half, whole = (
        [row["loss"] for row in read_metrics(folder / name) if "loss" in row] for name in ("half", "adapters")
    )
    assert 0 < relative_error(half, whole) < 1e-2
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(run.program.state.params))


@pytest.mark.slow
def test_a_second_stage_starts_from_merged_weights(folder):
    train(prepare(config(folder, "second", init_from=str(folder / "adapters"), steps=2)))
    losses = [row["eval_loss"] for row in read_metrics(folder / "second") if "eval_loss" in row]
    last = [row["eval_loss"] for row in read_metrics(folder / "adapters") if "eval_loss" in row][-1]
    assert losses[0] == pytest.approx(last, rel=1e-6)
    first, merged = parameters(folder / "adapters"), parameters(folder / "second")
    assert (np.asarray(first["embed"]) == np.asarray(merged["embed"])).all()
    assert (np.asarray(first["layers"]["attention"]["wq"]) != np.asarray(merged["layers"]["attention"]["wq"])).any()
