"""Models that are converted, loaded and evaluated with another rope, beside transformers with that rope."""

import argparse
import json

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from ringformer.checkpoints.rope_change import RopeChange, add_rope_options, rope_change
from ringformer.checkpoints.saved_model import context_of
from ringformer.cli import main
from ringformer.convert import from_hf, to_hf, verify
from ringformer.inference.generator import Generator
from ringformer.models.registry import preset_config
from ringformer.ops.tokenwise.rope import RopeScaling
from tests.convert.families import save_tiny
from tests.convert.models import CONTEXT, load, logits, save_model

LARGER = RopeChange(rope_theta=4e4)
YARN = RopeChange(scaling={"kind": "yarn", "factor": 4.0})
FURTHER = RopeChange(scaling={"kind": "yarn", "factor": 6.0})
TOKENS = np.random.default_rng(0).integers(0, 257, (1, 3 * CONTEXT))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "theirs", "llama_2")


@pytest.mark.parametrize("change", [YARN, pytest.param(LARGER, marks=pytest.mark.slow)], ids=str)
def test_a_converted_model_is_transformers_with_that_rope(theirs, tmp_path, change):
    """Also beyond the old context, and once it is exported again."""
    config = from_hf(theirs, tmp_path / "ours", rope=change)
    comparison = verify(theirs, tmp_path / "ours", length=3 * CONTEXT)
    assert comparison.agrees and str(change) in str(comparison), comparison
    to_hf(tmp_path / "ours", tmp_path / "exported")
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").config.rope_parameters
    assert there["rope_theta"] == config.rope_theta and there["rope_type"] == (change.scaling or {}).get(
        "kind", "default"
    )
    expected = logits(load(tmp_path / "exported"), TOKENS)
    generator = Generator.load(tmp_path / "ours", max_length=4 * CONTEXT, compute_dtype="float32")
    (losses,) = generator.token_losses([TOKENS[0].tolist()])
    shifted = expected[0, :-1].astype(np.float64)
    log_p = shifted - np.logaddexp.reduce(shifted, axis=-1, keepdims=True)
    np.testing.assert_allclose(losses, -log_p[np.arange(len(log_p)), TOKENS[0, 1:]], atol=1e-4)


def test_a_rope_that_nobody_recorded_is_another_model(theirs, tmp_path):
    """The control of the test above."""
    from_hf(theirs, tmp_path / "ours", rope=LARGER)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config.pop("rope") == {"rope_theta": 4e4}
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config))
    (tmp_path / "ours" / "manifest.json").unlink()
    assert not verify(theirs, tmp_path / "ours").agrees


def test_a_smaller_base_is_told(theirs, tmp_path, capsys):
    from_hf(theirs, tmp_path / "smaller", rope=RopeChange(rope_theta=5e3))
    assert "rope_theta=5000 is below the model's 10000" in capsys.readouterr().err


@pytest.mark.parametrize("change", [LARGER, pytest.param(YARN, marks=pytest.mark.slow)], ids=str)
def test_a_model_is_loaded_with_a_rope_as_it_would_be_converted(theirs, tmp_path, change):
    from_hf(theirs, tmp_path / "plain")
    from_hf(theirs, tmp_path / "changed", rope=change)
    row = TOKENS[0].tolist()

    def losses(folder, rope=None):
        return Generator.load(tmp_path / folder, max_length=4 * CONTEXT, rope=rope).token_losses([row])[0]

    np.testing.assert_array_equal(losses("plain", change), losses("changed"))
    assert np.abs(losses("plain") - losses("changed")).max() > 0.01
    assert context_of(tmp_path / "plain") == CONTEXT
    assert context_of(tmp_path / "changed") == (4 if change is YARN else 1) * CONTEXT


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "smollm3", "olmo3", "mistral", "ministral3", "seed_oss"])
@pytest.mark.parametrize("change", [RopeChange(rope_theta=3e6, scaling={"kind": "none"}), FURTHER], ids=str)
def test_every_family_takes_another_rope(tmp_path, family, change):
    save_tiny(family, tmp_path / "theirs")
    own = from_hf(tmp_path / "theirs", tmp_path / "plain")
    if family == "ministral3" and change is not FURTHER:
        with pytest.raises(ValueError, match="query_growth"):
            from_hf(tmp_path / "theirs", tmp_path / "ours", rope=change)
        return
    config = from_hf(tmp_path / "theirs", tmp_path / "ours", rope=change)
    assert (config.rope_theta, config.rope_scaling) != (own.rope_theta, own.rope_scaling)
    assert verify(tmp_path / "theirs", tmp_path / "ours", length=48).agrees


LLAMA = preset_config("tiny")
LINEAR = preset_config("tiny", rope_scaling=RopeScaling("linear", 4.0))
SCALED = preset_config("tiny", rope_scaling=RopeScaling("llama3", 8.0, original_max_position=8192))


@pytest.mark.parametrize(
    ("change", "model", "theta", "scaling", "context"),
    [
        (LARGER, LLAMA, 4e4, RopeScaling(), 8192),
        (YARN, LLAMA, LLAMA.rope_theta, RopeScaling("yarn", 4.0, original_max_position=8192), 32768),
        (
            RopeChange(scaling={"kind": "linear", "factor": 2.5}),
            LLAMA,
            LLAMA.rope_theta,
            RopeScaling("linear", 2.5),
            20480,
        ),
        (
            RopeChange(scaling={"kind": "linear", "factor": 8.0}),
            LINEAR,
            LLAMA.rope_theta,
            RopeScaling("linear", 8.0),
            65536,
        ),
        (YARN, SCALED, LLAMA.rope_theta, RopeScaling("yarn", 4.0, original_max_position=8192), 32768),
        (RopeChange(rope_theta=1e6, scaling={"kind": "none"}), SCALED, 1e6, RopeScaling(), 65536),
    ],
)
def test_a_change_sets_what_it_names_and_the_context_that_it_reaches(change, model, theta, scaling, context):
    known = {id(SCALED): 65536, id(LINEAR): 32768}.get(id(model), 8192)
    changed = change.apply(model, known)
    assert (changed.rope_theta, changed.rope_scaling) == (theta, scaling)
    assert change.context(model, known) == context
    assert RopeChange.of(json.loads(json.dumps(change.settings))) == change


@pytest.mark.parametrize(
    ("change", "model", "message"),
    [
        (RopeChange(scaling={"factor": 4.0}), LLAMA, "--rope_scaling.factor needs --rope_scaling.kind"),
        (
            RopeChange(scaling={"kind": "yarn", "factor": 4.0, "original_max_position": 4096}),
            LLAMA,
            "has 8,192 tokens: leave",
        ),
        (RopeChange(scaling={"kind": "yarn"}), LLAMA, "needs factor"),
        (RopeChange(scaling={"kind": "linear", "factor": 2.0, "beta_fast": 4.0}), LLAMA, "does not use beta_fast"),
        (LARGER, SCALED, "--rope_scaling.kind=none"),
        (RopeChange(rope_theta=0.5), LLAMA, "rope_theta=0.5"),
        (LARGER, preset_config("smollm3_3b", layer_types="N"), "no rotary positions"),
    ],
)
def test_a_rope_that_the_model_contradicts_is_refused(change, model, message):
    with pytest.raises(ValueError, match=message):
        change.apply(model, 8192)


def test_options_are_those_of_the_scaling():
    parser = argparse.ArgumentParser()
    add_rope_options(parser)
    assert rope_change(parser.parse_args([])) is None
    asked = parser.parse_args(["--rope_scaling.kind=yarn", "--rope_scaling.factor=4", "--no_rope_scaling.truncate"])
    assert rope_change(asked) == RopeChange(scaling={"kind": "yarn", "factor": 4.0, "truncate": False})
    assert LARGER.warning(LLAMA) is None
    assert "is below the model's" in RopeChange(rope_theta=LLAMA.rope_theta / 2).warning(LLAMA)


def test_a_llama_without_a_rope_is_a_smollm3(theirs, tmp_path, capsys):
    """As transformers computes it, also after an export; a model of another family is refused."""
    assert main(["convert", "from-hf", str(theirs), str(tmp_path / "dropped"), "--drop_rope"]) == 0
    assert "without rotary positions" in capsys.readouterr().out
    assert verify(theirs, tmp_path / "dropped", length=2 * CONTEXT).agrees
    to_hf(tmp_path / "dropped", tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert type(exported).__name__ == "SmolLM3ForCausalLM" and not any(exported.config.no_rope_layers)
    assert verify(tmp_path / "exported", tmp_path / "dropped").agrees
    with pytest.raises(ValueError, match="no rotary positions"):
        Generator.load(tmp_path / "dropped", max_length=CONTEXT, rope=LARGER)


def test_absent_keys_are_those_of_a_llama(tmp_path):
    """As in the files of the first LLaMA, whose context and key heads SmolLM3's defaults would change."""
    theirs = save_model(tmp_path / "theirs", "llama_1", num_attention_heads=8, num_key_value_heads=8)
    path = theirs / "config.json"
    keys = json.loads(path.read_text())
    for key in ("num_key_value_heads", "tie_word_embeddings", "head_dim", "max_position_embeddings"):
        keys.pop(key, None)
    path.write_text(json.dumps(keys))
    config = from_hf(theirs, tmp_path / "dropped", rope=RopeChange(drop_rope=True))
    assert (config.num_kv_heads, config.tie_embeddings) == (8, False)
    assert context_of(tmp_path / "dropped") == 2048
    assert verify(theirs, tmp_path / "dropped").agrees


@pytest.mark.parametrize(
    ("change", "family", "message"),
    [
        ({"drop_rope": True, "rope_theta": 1e6}, "llama_2", "leaves no rope to change"),
        ({"drop_rope": True}, "qwen3", "only llama and smollm3 have a form without positions"),
    ],
)
def test_a_rope_that_cannot_be_dropped(change, family, message, tmp_path, theirs):
    folder = theirs if family == "llama_2" else tmp_path / family
    if family != "llama_2":
        save_tiny(family, folder)
    with pytest.raises(ValueError, match=message):
        from_hf(folder, tmp_path / "out", rope=RopeChange.of(change))
