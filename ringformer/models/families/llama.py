"""LLaMA, and its shapes by name (Touvron et al. 2023; OpenLLaMA for 3B; Meta's LLaMA 2 and 3 model cards)."""

from dataclasses import dataclass
from typing import Any

from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.families.huggingface import HuggingFace, read_rope, usual, write_rope
from ringformer.models.families.shapes import shape
from ringformer.ops.tokenwise.rope import RopeScaling


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """LLaMA: pre-norm, SwiGLU, rotary positions, grouped key heads."""


LLAMA_3 = dict(rope_theta=5e5, norm_eps=1e-5, vocab_size=128256)


def _llama_3_scaled(factor: float) -> dict[str, Any]:
    scaling = RopeScaling("llama3", factor, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    return LLAMA_3 | dict(rope_scaling=scaling)


PRESETS: dict[str, dict[str, Any]] = {
    # small, byte-level: 256 bytes and the end of a document
    "tiny": shape(128, 2, 2, 1, 256, V=257, d=32),
    "small": shape(256, 6, 8, 4, 704, V=257),
    # the sizes of the paper's agent of "350M" (section 5.4, Table 5); 1,024 tokens are our choice, as it reads no text
    "agentic_350m": shape(1024, 24, 16, 16, 2816, V=1024),
    # LLaMA 1
    "llama_3b": shape(3200, 26, 32, 32, 8640),
    "llama_7b": shape(4096, 32, 32, 32, 11008),
    "llama_13b": shape(5120, 40, 40, 40, 13824),
    "llama_30b": shape(6656, 60, 52, 52, 17920),
    "llama_65b": shape(8192, 80, 64, 64, 22016, norm_eps=1e-5),
    # LLaMA 2
    "llama2_7b": shape(4096, 32, 32, 32, 11008, norm_eps=1e-5),
    "llama2_13b": shape(5120, 40, 40, 40, 13824, norm_eps=1e-5),
    "llama2_70b": shape(8192, 80, 64, 8, 28672, norm_eps=1e-5),
    # LLaMA 3
    "llama3_8b": shape(4096, 32, 32, 8, 14336) | LLAMA_3,
    "llama3_70b": shape(8192, 80, 64, 8, 28672) | LLAMA_3,
    "llama3.1_8b": shape(4096, 32, 32, 8, 14336) | _llama_3_scaled(8.0),
    "llama3.1_70b": shape(8192, 80, 64, 8, 28672) | _llama_3_scaled(8.0),
    "llama3.1_405b": shape(16384, 126, 128, 8, 53248) | _llama_3_scaled(8.0),
    "llama3.2_1b": shape(2048, 16, 32, 8, 8192, tie_embeddings=True) | _llama_3_scaled(32.0),
    "llama3.2_3b": shape(3072, 28, 24, 8, 8192, tie_embeddings=True) | _llama_3_scaled(32.0),
}
"""Arguments of `LlamaConfig`."""


HUGGING_FACE = HuggingFace(
    "LlamaForCausalLM",
    "llama",
    {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "mlp_bias": (False,)},
    read_rope,
    write_rope,
    usual(2048, (1, 2, None)),
)


def preset(name: str) -> dict[str, Any]:
    """Return the arguments of `LlamaConfig` for a model of `PRESETS`."""
    if name not in PRESETS:
        raise ValueError(f"unknown model {name!r}; known models: {', '.join(PRESETS)}")
    return dict(PRESETS[name])
