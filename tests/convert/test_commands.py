"""`ringformer convert`: exit codes and verdicts."""

import json

import pytest
from safetensors.numpy import load_file, save_file

from ringformer.cli import main
from tests.convert.models import save_model


def test_the_verbs_and_a_verdict_each_way(tmp_path, capsys):
    theirs, ours, back = (str(tmp_path / name) for name in ("theirs", "ours", "back"))
    save_model(tmp_path / "theirs", "yarn")
    assert main(["convert", "from-hf", theirs, ours]) == 0
    assert "scaling yarn" in capsys.readouterr().out
    assert main(["convert", "verify", theirs, ours, "--length=96"]) == 0
    out = capsys.readouterr().out
    assert "verdict: the same model" in out and "rounded" not in out
    assert len([x for x in out.splitlines() if x[:4].strip().isdigit()]) == 10
    assert main(["convert", "to-hf", ours, back, "--shard_size=50KB", "--dtype=bfloat16"]) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"

    weights = load_file(tmp_path / "theirs" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(weights, tmp_path / "theirs" / "model.safetensors")
    assert main(["convert", "verify", theirs, ours, "--length=96"]) == 1
    assert "verdict: NOT the same model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["to-hf", "nowhere", "out"], "nowhere has no config.json: name the folder of a run"),
        (["from-hf", "nowhere", "out"], "nowhere has no config.json"),
        (["verify", "nowhere", "nowhere"], "nowhere has no config.json"),
        (["form-hf"], "did you mean 'convert from-hf'"),
        (["to-hf", "nowhere", "out", "--dtype=int8"], "unknown dtype 'int8'"),
        (["to-hf", "nowhere", "out", "--shard_size=0GB"], "'0GB' is 0 bytes: give a size like 5GB"),
    ],
)
def test_mistakes_are_told(arguments, message, capsys):
    assert main(["convert", *arguments]) == 2
    assert message in capsys.readouterr().err
