"""Tiny checkpoints of every family, made by transformers: three windows and four original contexts long."""

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
QWEN = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 20}),
    "qwen2": ("Qwen2", QWEN),
    "qwen3": ("Qwen3", QWEN | {"head_dim": 16}),
    "seed_oss": ("SeedOss", {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 20,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 24, "num_hidden_layers": 14}),
}
"""Class of transformers, and keys of its configuration, by family."""


def hf_config(family: str, **changes: Any) -> transformers.PretrainedConfig:
    """The configuration of a family's tiny model."""
    name, keys = FAMILIES[family]
    cls = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")
    return cls(**SIZES | keys | changes)


def save_tiny(family: str, folder: Path, seed: int = 0, **changes: Any) -> transformers.PreTrainedModel:
    """Save a random model with biases and scales that are not those of a fresh one."""
    torch.manual_seed(seed)
    cls = getattr(transformers, f"{FAMILIES[family][0]}ForCausalLM")
    model = cls(hf_config(family, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
            elif "embed" in name and model.config.tie_word_embeddings:
                parameter *= 0.05  # or every token would be followed by itself
    model.save_pretrained(folder)
    return model
