"""Random tiny models of every family, saved by transformers, and what two of them have in common."""

from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT = 64
"""Tokens of the original context of all of them."""

LLAMA_3 = dict(num_key_value_heads=2, rms_norm_eps=1e-5, vocab_size=301)


def _rope(kind="default", theta=1e4, **more):
    if kind in ("llama3", "yarn"):
        more["original_max_position_embeddings"] = CONTEXT
    return dict(
        rope_parameters=dict(rope_type=kind, rope_theta=theta, **more),
        max_position_embeddings=int(CONTEXT * more.get("factor", 1)),
    )


_LLAMA_3_1 = dict(low_freq_factor=1.0, high_freq_factor=4.0)

FAMILIES = {
    "llama_1": _rope(),
    "llama_2": dict(rms_norm_eps=1e-5, num_key_value_heads=1, head_dim=16) | _rope(),
    "llama_3": LLAMA_3 | _rope(theta=5e5),
    "llama_3.1": LLAMA_3 | _rope("llama3", 5e5, factor=8.0, **_LLAMA_3_1),
    "llama_3.2": LLAMA_3 | dict(tie_word_embeddings=True) | _rope("llama3", 5e5, factor=32.0, **_LLAMA_3_1),
    "linear": _rope("linear", factor=4.0),
    "yarn": LLAMA_3 | _rope("yarn", factor=4.0),
    "yarn_changed": _rope(
        "yarn", 1e6, factor=8.0, beta_fast=16.0, beta_slow=2.0, mscale=0.7, mscale_all_dim=1.3, truncate=False
    ),
}


def save_model(folder: Path, family: str, *, dtype: str = "float32", max_shard_size: str = "5GB", **changes) -> Path:
    """A model with weights large enough for attention to matter; random norms, too."""
    settings = dict(
        vocab_size=257,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(len(family))
    model = LlamaForCausalLM(LlamaConfig(**settings | FAMILIES[family] | changes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight += 0.3 * torch.randn_like(weight)
            elif "embed" in name and not model.config.tie_word_embeddings:  # a tied one would repeat its input
                weight *= 4
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
    """The dtype and the bytes of every tensor."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118, not a dict
                found[name] = file.get_slice(name).get_dtype(), np.ascontiguousarray(file.get_tensor(name)).tobytes()
    return found


def load(folder: Path) -> LlamaForCausalLM:
    """By transformers, in float32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: LlamaForCausalLM, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.numpy()
