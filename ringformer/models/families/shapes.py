"""Sizes of presets, in short."""

from typing import Any


def shape(D: int, L: int, H: int, K: int, F: int, V: int = 32000, d: int | None = None, **more: Any) -> dict[str, Any]:
    """Return the arguments of a configuration: D width, L layers, H and K heads, F feed-forward, V vocabulary, d head
    dim (D / H unless given), and others by name."""
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
