"""LLaMA shapes by name (Touvron et al. 2023; OpenLLaMA for 3B; Meta's LLaMA 2 and 3 model cards)."""

from typing import Any

from ringformer.ops.tokenwise.rope import RopeScaling

LLAMA_3 = dict(rope_theta=5e5, norm_eps=1e-5, vocab_size=128256)


def _llama_3_scaled(factor: float) -> dict[str, Any]:
    scaling = RopeScaling("llama3", factor, original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    return LLAMA_3 | dict(rope_scaling=scaling)


def _shape(D, L, H, K, F, V=32000, d=None, **more) -> dict[str, Any]:
    return (
        dict(
            hidden_size=D,
            num_layers=L,
            num_heads=H,
            num_kv_heads=K,
            intermediate_size=F,
            vocab_size=V,
            head_dim=d or D // H,
        )
        | more
    )


PRESETS: dict[str, dict[str, Any]] = {
    # small, byte-level: 256 bytes and the end of a document
    "tiny": _shape(128, 2, 2, 1, 256, V=257, d=32),
    "small": _shape(256, 6, 8, 4, 704, V=257),
    # LLaMA 1
    "llama_3b": _shape(3200, 26, 32, 32, 8640),
    "llama_7b": _shape(4096, 32, 32, 32, 11008),
    "llama_13b": _shape(5120, 40, 40, 40, 13824),
    "llama_30b": _shape(6656, 60, 52, 52, 17920),
    "llama_65b": _shape(8192, 80, 64, 64, 22016, norm_eps=1e-5),
    # LLaMA 2
    "llama2_7b": _shape(4096, 32, 32, 32, 11008, norm_eps=1e-5),
    "llama2_13b": _shape(5120, 40, 40, 40, 13824, norm_eps=1e-5),
    "llama2_70b": _shape(8192, 80, 64, 8, 28672, norm_eps=1e-5),
    # LLaMA 3
    "llama3_8b": _shape(4096, 32, 32, 8, 14336) | LLAMA_3,
    "llama3_70b": _shape(8192, 80, 64, 8, 28672) | LLAMA_3,
    "llama3.1_8b": _shape(4096, 32, 32, 8, 14336) | _llama_3_scaled(8.0),
    "llama3.1_70b": _shape(8192, 80, 64, 8, 28672) | _llama_3_scaled(8.0),
    "llama3.1_405b": _shape(16384, 126, 128, 8, 53248) | _llama_3_scaled(8.0),
    "llama3.2_1b": _shape(2048, 16, 32, 8, 8192, tie_embeddings=True) | _llama_3_scaled(32.0),
    "llama3.2_3b": _shape(3072, 28, 24, 8, 8192, tie_embeddings=True) | _llama_3_scaled(32.0),
}
"""Arguments of `LlamaConfig`."""


def preset(name: str) -> dict[str, Any]:
    """Return the arguments of `LlamaConfig` for a model of `PRESETS`."""
    if name not in PRESETS:
        raise ValueError(f"unknown model {name!r}; known models: {', '.join(PRESETS)}")
    return dict(PRESETS[name])
