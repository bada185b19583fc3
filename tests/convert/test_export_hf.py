"""What a run is exported as: in the dtype of the model it came from, and finite, or not at all."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest

from ringformer.cli import main
from ringformer.convert import from_hf, import_hf, to_hf, verify
from ringformer.files.manifest import MANIFEST
from ringformer.files.run_layout import HF_CONFIG
from tests.convert.models import load, save_model, tensors


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """As a run is that began with a bfloat16 model: its float32 numbers are none of bfloat16's."""
    folder = tmp_path_factory.mktemp("trained")
    from_hf(save_model(folder / "theirs", "llama_3"), folder / "ours")
    return folder / "ours"


def run_of(trained, folder, **changes):
    """A copy whose original config.json said something else; None: it had no such key."""
    shutil.copytree(trained, folder)
    hf = json.loads((folder / HF_CONFIG).read_text()) | changes
    (folder / MANIFEST).unlink()  # it was changed on purpose
    (folder / HF_CONFIG).write_text(json.dumps({key: value for key, value in hf.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    ("original", "asked", "dtype", "why"),
    [
        (dict(dtype="bfloat16"), [], "bfloat16", "as the Hugging Face model that it came from"),
        (dict(dtype=None, torch_dtype="float16"), [], "float16", "as the Hugging Face model that it came from"),
        (dict(dtype="bfloat16"), ["--dtype=float32"], "float32", "as asked"),
        (dict(dtype=None), [], "float32", "as stored"),
        (dict(dtype="float64"), [], "float32", "as stored"),
        (dict(dtype={"vision": "float16"}), [], "float32", "as stored"),
    ],
    ids=str,
)
def test_the_dtype_is_the_original_s(trained, tmp_path, original, asked, dtype, why, capsys):
    run = run_of(trained, tmp_path / "run", **original)
    assert main(["convert", "to-hf", str(run), str(tmp_path / "back"), *asked]) == 0
    assert f"parameters in {dtype}, {why}" in capsys.readouterr().out
    found = tensors(tmp_path / "back")
    assert {kind for kind, _ in found.values()} == {{"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]}
    described = json.loads((tmp_path / "back" / "config.json").read_text())
    assert described["dtype"] == described["torch_dtype"] == dtype
    for name, (_, data) in tensors(trained.parent / "theirs").items():
        expected = np.frombuffer(data, np.float32).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        assert found[name][1] == expected.tobytes()


def test_a_model_without_an_original_is_exported_as_it_is_stored(trained, tmp_path):
    """Float32 for a run, and what `from_hf` was asked for."""
    theirs = trained.parent / "theirs"
    for dtype in ("bfloat16", "float32"):
        from_hf(theirs, tmp_path / dtype, dtype)
        (tmp_path / dtype / HF_CONFIG).unlink()
        (tmp_path / dtype / MANIFEST).unlink()  # it is changed on purpose
        shutil.copy(theirs / "config.json", tmp_path / dtype / HF_CONFIG)
        hf = json.loads((tmp_path / dtype / HF_CONFIG).read_text())
        (tmp_path / dtype / HF_CONFIG).write_text(json.dumps({k: v for k, v in hf.items() if k != "dtype"}))
        done = to_hf(tmp_path / dtype, tmp_path / f"{dtype}-back")
        assert (done.dtype, done.dtype_origin) == (dtype, "as stored")


@pytest.mark.slow
def test_an_export_in_half_precision_is_verified_as_what_it_is(trained, tmp_path, capsys):
    """The run's parameters are rounded as the export's: then the logits are the same to 1e-4, and a fault is one."""
    run = run_of(trained, tmp_path / "run", dtype="bfloat16")
    to_hf(run, tmp_path / "back")
    assert main(["convert", "verify", str(tmp_path / "back"), str(run), "--length=96"]) == 0
    out = capsys.readouterr().out
    assert "rounded to bfloat16, the dtype of" in out and "verdict: the same model" in out
    model = load(tmp_path / "back").bfloat16()
    model.model.layers[1].mlp.up_proj.weight.data *= 1.01
    model.save_pretrained(tmp_path / "wrong")
    assert not verify(tmp_path / "wrong", run, length=96).agrees
    # A model narrower than the original is not the same: only what the export lost is forgiven.
    from_hf(trained.parent / "theirs", tmp_path / "narrow", "bfloat16")
    assert not verify(trained.parent / "theirs", tmp_path / "narrow", length=96).agrees


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_state_that_is_not_finite_is_not_exported(trained, tmp_path, value, dtype, monkeypatch, capsys):
    """One number of one layer; nothing is left behind."""

    def broken(block, dtype, name):
        block = np.array(block)
        if name == "model.layers.2.mlp.down_proj.weight":
            block[..., -1, -1] = value
        return block

    monkeypatch.setattr(import_hf, "cast", broken)
    from_hf(trained.parent / "theirs", tmp_path / "ours")
    assert main(["convert", "to-hf", str(tmp_path / "ours"), str(tmp_path / "back"), f"--dtype={dtype}"]) == 2
    assert "model.layers.2.mlp.down_proj.weight has values that are not finite" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
