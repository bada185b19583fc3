"""What cannot be converted is named: other models, other rotary embeddings, tensors that do not fit."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ringformer.cli import main
from ringformer.convert import from_hf
from ringformer.convert.hf_config import from_hf_config, to_hf_config
from ringformer.inference.generator import load_model
from ringformer.models.families.llama import PRESETS, LlamaConfig, preset
from ringformer.ops.tokenwise.rope import RopeScaling
from tests.convert.models import save_model

HF = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
)


@pytest.mark.parametrize("name", PRESETS)
def test_configs_of_all_presets_come_back(name):
    config = LlamaConfig(**preset(name))
    described = to_hf_config(config, max_position=131072, dtype="bfloat16", token_ids={})
    assert from_hf_config(json.loads(json.dumps(described))) == config


def test_a_config_of_transformers_4():
    old = HF | dict(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    assert from_hf_config(old) == LlamaConfig(
        **preset("llama_7b"), rope_theta=5e5, rope_scaling=RopeScaling("linear", 2.0)
    )
    yarn = from_hf_config(HF | dict(max_position_embeddings=4096, rope_scaling={"rope_type": "yarn", "factor": 4.0}))
    assert yarn.rope_scaling == RopeScaling("yarn", 4.0, original_max_position=4096)
    assert from_hf_config(HF) == LlamaConfig(**preset("llama_7b"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(architectures=["MixtralForCausalLM"]),
            "the model is a MixtralForCausalLM: ringformer has no such family",
        ),
        (dict(model_type="mistral"), "model_type='mistral'"),
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(mlp_bias=True), "mlp_bias=True"),
        (dict(hidden_act="gelu"), "hidden_act='gelu': only 'silu'"),
        (dict(quantization_config={"bits": 4}), "quantization_config"),
        (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope type 'dynamic': only default, linear, yarn"),
        (dict(rope_parameters={"rope_type": "longrope"}), "rope type 'longrope'"),
        (dict(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (
            dict(rope_parameters={"rope_type": "linear", "factor": 2.0, "mscale": 1.0}),
            "mscale, which rope type",
        ),
        (dict(rope_scaling={"type": "linear"}), "rope type 'linear' without factor"),
    ],
    ids=str,
)
def test_other_models_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config(HF | change)


def test_a_config_without_sizes_is_refused():
    with pytest.raises(ValueError, match=r"config\.json lacks vocab_size, num_hidden_layers"):
        from_hf_config({k: v for k, v in HF.items() if k not in ("vocab_size", "num_hidden_layers")})


@pytest.fixture
def theirs(tmp_path):
    return save_model(tmp_path / "theirs", "llama_3.2")


def _change(folder, change):
    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors")


def test_tensors_that_do_not_fit_are_all_named(theirs, tmp_path):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(48, np.float32)
        tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((48, 48), np.float32)
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((80, 48), np.int8)

    _change(theirs, change)
    with pytest.raises(ValueError, match="the tensors do not fit") as found:
        from_hf(theirs, tmp_path / "ours")
    text = str(found.value)
    assert "model.norm.weight [48] is missing" in text
    assert "model.layers.0.self_attn.q_proj.bias [48] is left over" in text
    assert "model.layers.1.self_attn.k_proj.weight is [48, 48], must be [24, 48]" in text
    assert "model.layers.2.mlp.up_proj.weight is I8, must be one of F32, F16, BF16" in text
    assert not list(tmp_path.glob("ours*"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_not_finite_is_refused(theirs, tmp_path, value, dtype, capsys):
    """One number of one layer, far into the model."""

    def change(tensors):
        tensors["model.layers.2.mlp.up_proj.weight"][79, 47] = value

    _change(theirs, change)
    assert main(["convert", "from-hf", str(theirs), str(tmp_path / "ours"), f"--dtype={dtype}"]) == 2
    assert "model.layers.2.mlp.up_proj.weight has values that are not finite" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_redundant_tensors_are_left_out_and_a_wrong_tied_head_is_not(theirs, tmp_path):
    def redundant(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(6, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    _change(theirs, redundant)
    assert from_hf(theirs, tmp_path / "ours").tie_embeddings
    _change(theirs, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"] + 1}))
    with pytest.raises(ValueError, match=r"ties the embeddings, but lm_head\.weight differs"):
        from_hf(theirs, tmp_path / "again")


def test_missing_files_are_named(theirs, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        from_hf(tmp_path, tmp_path / "ours")
    sharded = save_model(tmp_path / "sharded", "llama_1", max_shard_size="40KB")
    (sharded / "model-00002-of-00010.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks model-00002-of-00010\.safetensors, which model\."):
        from_hf(sharded, tmp_path / "ours")
    (theirs / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="safe_serialization=True"):
        from_hf(theirs, tmp_path / "ours")


def test_broken_files_are_named(theirs, tmp_path):
    """A download cut short, a pointer that Git LFS left, a config.json that is none."""
    whole = (theirs / "model.safetensors").read_bytes()
    for content in (whole[: len(whole) // 2], b"version https://git-lfs.github.com/spec/v1\n", b""):
        (theirs / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safetensors file .*git lfs pull"):
            from_hf(theirs, tmp_path / "ours")
    (theirs / "config.json").write_text("<html>")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        from_hf(theirs, tmp_path / "ours")


def test_a_full_folder_is_left_alone(theirs, tmp_path):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not an empty folder"):
        from_hf(theirs, tmp_path / "ours")


def test_a_stored_dtype_and_what_it_cannot_hold(theirs, tmp_path):
    from_hf(theirs, tmp_path / "half", "bfloat16")
    assert load_model(tmp_path / "half").embed[...].dtype == np.float32
    _change(theirs, lambda tensors: tensors.update({"model.norm.weight": np.full(48, 7e4, np.float32)}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has values beyond float16"):
        from_hf(theirs, tmp_path / "ours", "float16")
    largest = np.full(48, np.finfo(np.float32).max)
    _change(theirs, lambda tensors: tensors.update({"model.norm.weight": largest}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has values beyond bfloat16's .*--dtype=float32"):
        from_hf(theirs, tmp_path / "ours", "bfloat16")
    assert not list(tmp_path.glob("ours*"))
    with pytest.raises(ValueError, match="unknown dtype 'int8'; known: float32, float16, bfloat16"):
        from_hf(theirs, tmp_path / "ours", "int8")
