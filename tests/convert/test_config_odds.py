"""Keys of released config.json files that tiny models made by transformers do not have."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, MistralForCausalLM

from ringformer.cli import main
from ringformer.convert import from_hf, to_hf, verify
from ringformer.convert.hf_config import from_hf_config
from ringformer.data.tokenizers.special_tokens import context_of, text_keys
from ringformer.files.run_layout import HF_CONFIG
from ringformer.models.families.mistral import MistralConfig
from ringformer.models.registry import FAMILIES
from ringformer.ops.tokenwise.rope import RopeScaling
from tests.convert.families import hf_config, save_tiny


def described(family: str, **changes) -> dict:
    return hf_config(family).to_dict() | {"architectures": [FAMILIES[family].hugging_face.architecture]} | changes


MISTRAL_SMALL_31 = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "text_config": {
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e9,
        "sliding_window": None,
        "vocab_size": 131072,
    },
}


def test_the_wrapper_of_mistral_holds_two_families():
    """Chosen by the text model's own type; Mistral where it has none, as in transformers."""
    config = from_hf_config(MISTRAL_SMALL_31)
    assert type(config) is MistralConfig and (config.rope_theta, config.window, config.head_dim) == (1e9, 0, 128)
    text = {key: value for key, value in MISTRAL_SMALL_31["text_config"].items() if key != "model_type"}
    assert from_hf_config(MISTRAL_SMALL_31 | {"text_config": text}) == config
    ministral = described("ministral3")
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": ministral}
    assert from_hf_config(outer) == from_hf_config(ministral)
    other = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text | {"model_type": "llama"}}
    with pytest.raises(ValueError, match="has model_type='llama': only 'mistral' or 'ministral3' can be converted as"):
        from_hf_config(other)


def test_yarn_has_parameters_that_are_no_numbers():
    """truncate, as gpt-oss has it, and finetuned, as YaRN's own checkpoints have it; a number is none of them."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "finetuned": True}
    config = from_hf_config(described("llama", rope_parameters=yarn | {"truncate": False}))
    assert config.rope_scaling == RopeScaling("yarn", factor=8.0, original_max_position=64, truncate=False)
    with pytest.raises(ValueError, match=r"rope_scaling\.truncate=0\.5 must be true or false"):
        from_hf_config(described("llama", rope_parameters=yarn | {"truncate": 0.5}))
    with pytest.raises(ValueError, match=r"config\.json has factor=True, must be a number that a float can hold"):
        from_hf_config(described("llama", rope_parameters=yarn | {"factor": True}))


def test_a_wrapped_mistral_comes_and_goes_back(tmp_path):
    theirs = tmp_path / "theirs"
    save_tiny("mistral", theirs, num_hidden_layers=2, sliding_window=None)
    text = json.loads((theirs / "config.json").read_text())
    wrapped = tmp_path / "wrapped"
    wrapped.mkdir()
    tensors = {f"language_model.{name}": x for name, x in load_file(theirs / "model.safetensors").items()}
    save_file(tensors, wrapped / "model.safetensors")
    (wrapped / "config.json").write_text(json.dumps(MISTRAL_SMALL_31 | {"text_config": text}))
    from_hf(wrapped, tmp_path / "ours")
    assert verify(theirs, tmp_path / "ours", length=48).agrees
    to_hf(tmp_path / "ours", tmp_path / "back")
    before, after = (load_file(folder / "model.safetensors") for folder in (theirs, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert MistralForCausalLM.from_pretrained(tmp_path / "back").config.max_position_embeddings == 256
    kept = json.loads((tmp_path / "ours" / HF_CONFIG).read_text())
    assert kept["max_position_embeddings"] == 256, "the text model's, not hidden in a wrapper"


@pytest.mark.parametrize(
    ("hf", "context"),
    [
        (described("llama", max_position_embeddings=4096, rope_parameters=None), 4096),
        (MISTRAL_SMALL_31, 131072),
        ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"model_type": "gemma3_text"}}, 131072),
        (
            described(
                "qwen3",
                rope_parameters={
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 1e6,
                    "original_max_position_embeddings": 32768,
                },
                max_position_embeddings=40960,
            ),
            131072,
        ),
        (
            described(
                "llama",
                rope_parameters=None,
                max_position_embeddings=4096,
                rope_scaling={"type": "linear", "factor": 8.0},
            ),
            32768,
        ),
        (described("gemma3", max_position_embeddings=131072), 131072),
        ({}, None),
    ],
    ids=["plain", "wrapped", "default", "YaRN beyond the file's", "LongLoRA", "linear, counted already", "nothing"],
)
def test_contexts(hf, context):
    text = hf.get("text_config", hf)
    tables = [family.hugging_face for family in FAMILIES.values() if family.hugging_face]
    absent = next((table.absent for table in tables if table.model_type == text.get("model_type")), {})
    assert context_of({**absent, **text_keys(hf)}) == context


def test_yarn_without_a_factor_has_the_ratio_of_its_contexts():
    """As transformers derives it; a file without the key is refused there, too."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 64}
    theirs = described("llama", rope_parameters=rope, max_position_embeddings=256)
    found = from_hf_config(theirs).rope_scaling
    assert found == RopeScaling("yarn", 4.0, original_max_position=64)
    del rope["factor"]
    with pytest.raises(ValueError, match="has rope type 'yarn' without factor"):
        from_hf_config(described("llama", rope_parameters=rope, max_position_embeddings=256))


DUAL_CHUNK = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}


def test_dual_chunk_attention_comes_along(tmp_path, capsys):
    """Key of Qwen2.5-1M, which transformers keeps but does not compute; other keys are named where they end."""
    save_tiny("qwen2", tmp_path / "theirs", num_hidden_layers=1)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    config |= {"dual_chunk_attention_config": DUAL_CHUNK, "auto_map": {"AutoModel": "code.Model"}, "unused": 0}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    assert main(["convert", "from-hf", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert (
        "dual_chunk_attention_config: other programs use it; ringformer and transformers do not"
        in capsys.readouterr().out
    )
    assert main(["convert", "to-hf", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    output = capsys.readouterr().out
    assert AutoConfig.from_pretrained(tmp_path / "back").dual_chunk_attention_config == DUAL_CHUNK
    assert "left out of config.json: auto_map\n" in output and "unused" not in output


@pytest.mark.parametrize(
    ("keys", "mechanisms"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8}, "128 experts, 8 a token"),
        ({"num_local_experts": 32, "experts_per_token": 4}, "32 experts, 4 a token"),
        (
            {"n_routed_experts": 256, "num_experts_per_tok": 8, "kv_lora_rank": 512, "index_topk": 2048},
            "256 experts, 8 a token; latent attention (kv_lora_rank=512); sparse attention (index_topk=2048)",
        ),
        (
            {"num_experts": 512, "num_experts_per_tok": 10, "layer_types": ["linear_attention", "full_attention"]},
            "512 experts, 10 a token; linear layers",
        ),
        ({"linear_num_value_heads": 32}, "linear layers"),
        ({"mamba_d_state": 128}, "state-space layers"),
        ({"layer_types": ["conv", "full_attention"]}, "convolution layers"),
        ({"layer_types": ["chunked_attention"]}, "chunked attention"),
        ({"attn_logit_softcapping": 5.0}, "capped logits (attn_logit_softcapping=5.0)"),
        (
            {"partial_rotary_factor": 0.5, "layer_norm_eps": 0.1},
            "layer norms with a mean (layer_norm_eps=0.1); rotation of a part of each head (partial_rotary_factor=0.5)",
        ),
        ({"residual_multiplier": 0.22}, "scaled residuals (residual_multiplier=0.22)"),
        ({"is_encoder_decoder": True}, "an encoder"),
    ],
)
def test_a_refused_model_names_its_mechanism(keys, mechanisms):
    """And the page; not the family that is spelled most alike."""
    for hf in (keys, {"text_config": keys}):
        with pytest.raises(ValueError) as error:
            from_hf_config({"architectures": ["DeepseekV4ForCausalLM"], "model_type": "x"} | hf)
        assert str(error.value).startswith(f"the model is a DeepseekV4ForCausalLM, with {mechanisms}: ")
        assert "docs/models.md" in str(error.value) and "nearest" not in str(error.value)


def test_a_refused_model_without_a_known_mechanism_names_the_page():
    with pytest.raises(ValueError, match=r"^the model is a XForCausalLM: ringformer .*docs/models\.md"):
        from_hf_config({"architectures": ["XForCausalLM"], "num_experts": None, "layer_types": ["full_attention"]})
