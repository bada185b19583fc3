"""Ten released models by the keys of their config.json, with small sizes and random weights: from-hf, verify, to-hf.

The keys are written after the released files, which no registry has; what only concerns images is left out.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ringformer.cli import main
from ringformer.convert import to_hf, verify
from ringformer.data.tokenizers.special_tokens import MODEL_IDS, model_tokens
from ringformer.files.run_layout import HF_CONFIG
from ringformer.models.registry import FAMILIES

SMALL = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama(**keys):
    usual = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "pretraining_tp": 1,
        "attention_bias": False,
        "use_cache": True,
    }
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **usual, **keys}


def qwen(version, **keys):
    usual = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "use_sliding_window": False, "max_window_layers": 28}
    return {"architectures": [f"Qwen{version}ForCausalLM"], "model_type": f"qwen{version}", **usual, **keys}


def mistral3(**text):
    usual = {"hidden_act": "silu", "head_dim": 16, "rms_norm_eps": 1e-5, "sliding_window": None}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "spatial_merge_size": 2}
    return outer | {"text_config": usual | text, "vision_config": {"model_type": "pixtral"}}


LLAMA_31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MINISTRAL = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
DUAL_CHUNK = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
GEMMA = {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}

RELEASED = {
    "Llama 3.1": (
        llama(
            max_position_embeddings=131072,
            rope_theta=5e5,
            rope_scaling=LLAMA_31,
            mlp_bias=False,
            bos_token_id=128000,
            eos_token_id=[128001, 128008, 128009],
        ),
        131072,
    ),
    "CodeLlama": (llama(max_position_embeddings=16384, rope_theta=1e6, rope_scaling=None), 16384),
    "Yi 200K": (llama(max_position_embeddings=200000, rope_theta=1e7, pad_token_id=0), 200000),
    "Falcon3": (
        llama(max_position_embeddings=32768, rope_theta=1000042, head_dim=32, rms_norm_eps=1e-6, eos_token_id=11),
        32768,
    ),
    "R1 Distill Qwen": (
        qwen(2, max_position_embeddings=131072, rope_theta=10000, sliding_window=4096, use_mrope=False),
        131072,
    ),
    "Qwen2.5 1M": (
        qwen(
            2,
            max_position_embeddings=1010000,
            rope_theta=1e7,
            sliding_window=32768,
            rms_norm_eps=1e-5,
            dual_chunk_attention_config=DUAL_CHUNK,
        ),
        1010000,
    ),
    "Qwen3 with YaRN": (
        qwen(3, max_position_embeddings=40960, rope_theta=1e6, head_dim=32, rope_scaling=YARN, sliding_window=None),
        131072,
    ),
    "Gemma 3 4B": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "mm_tokens_per_image": 256,
            "text_config": GEMMA,
            "vision_config": {"model_type": "siglip_vision_model"},
        },
        131072,
    ),
    "Ministral 3": (
        mistral3(model_type="ministral3", max_position_embeddings=262144, rope_parameters=MINISTRAL),
        262144,
    ),
    "Mistral Small 3.1": (mistral3(model_type="mistral", max_position_embeddings=131072, rope_theta=1e9), 131072),
}
"""Keys of config.json, and the context that they mean."""


def made(hf, out):
    """Write a small model with these keys. Return the folder of its text model alone, that as released, and tensors."""
    text = (hf.get("text_config") or hf) | SMALL
    for key in MODEL_IDS:  # into the small vocabulary
        if text.get(key) is not None:
            ids = text[key] if isinstance(text[key], list) else [text[key]]
            small = [number % SMALL["vocab_size"] for number in ids]
            text[key] = small if isinstance(text[key], list) else small[0]
    plain, released = out / "plain", out / "released"
    for folder in (plain, released):
        folder.mkdir(parents=True)
    alone = {key: value for key, value in text.items() if key != "architectures"}
    (plain / "config.json").write_text(json.dumps(alone))
    config = AutoConfig.from_pretrained(plain)
    torch.manual_seed(0)
    config.initializer_range = 0.15
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(plain)
    tensors = load_file(plain / "model.safetensors")
    wrapped = "text_config" in hf
    (released / "config.json").write_text(json.dumps(hf | {"text_config": text} if wrapped else text))
    prefix = "language_model." if wrapped else ""
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, released / "model.safetensors")
    return plain, released, tensors


@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config(name, tmp_path, capsys):
    """The same next tokens as transformers'. Back, the same tensors and, to transformers, the same config."""
    hf, context = RELEASED[name]
    plain, released, tensors = made(hf, tmp_path)
    ours = tmp_path / "ours"
    assert main(["convert", "from-hf", str(released), str(ours)]) == 0
    assert verify(plain, ours).agrees
    if "text_config" not in hf:
        assert main(["convert", "verify", str(released), str(ours), "--length=64"]) == 0
    to_hf(ours, tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert verify(tmp_path / "back", ours).agrees
    before, after = (AutoConfig.from_pretrained(folder) for folder in (plain, tmp_path / "back"))
    assert after.max_position_embeddings == max(before.max_position_embeddings, context)
    before.rope_parameters.pop("type", None)  # the name that transformers 4 had for rope_type
    assert after.rope_parameters == before.rope_parameters
    kept = json.loads((ours / HF_CONFIG).read_text())
    tables = [family.hugging_face for family in FAMILIES.values() if family.hugging_face]
    (table,) = (table for table in tables if table.model_type == kept["model_type"])
    assert model_tokens(ours, HF_CONFIG, kept["vocab_size"], table.absent).context == context
    assert getattr(after, "dual_chunk_attention_config", None) == hf.get("dual_chunk_attention_config")
