"""Qwen 2 and 2.5: LLaMA with biases on q, k and v, and windows after the first layers (Qwen team 2024)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ringformer.models.families.huggingface import (
    HuggingFace,
    read_layer_types,
    read_rope,
    usual,
    write_layer_types,
    write_rope,
)
from ringformer.models.families.layer_patterns import PatternConfig
from ringformer.models.families.shapes import shape
from ringformer.models.layer_kinds import Parts


@dataclass(frozen=True)
class Qwen2Config(PatternConfig):
    """Qwen 2 and 2.5; layers F and W."""

    PARTS: ClassVar[Parts] = Parts(bias=True)


def _shape(*sizes: int, **more: Any) -> dict[str, Any]:
    return shape(*sizes, rope_theta=1e6, **more)


PRESETS: dict[str, dict[str, Any]] = {
    "qwen2.5_0.5b": _shape(896, 24, 14, 2, 4864, 151936, tie_embeddings=True),
    "qwen2.5_1.5b": _shape(1536, 28, 12, 2, 8960, 151936, tie_embeddings=True),
    "qwen2.5_3b": _shape(2048, 36, 16, 2, 11008, 151936, tie_embeddings=True),
    "qwen2.5_7b": _shape(3584, 28, 28, 4, 18944, 152064),
    "qwen2.5_14b": _shape(5120, 48, 40, 8, 13824, 152064, norm_eps=1e-5),
    "qwen2.5_32b": _shape(5120, 64, 40, 8, 27648, 152064, norm_eps=1e-5),
    "qwen2.5_72b": _shape(8192, 80, 64, 8, 29568, 152064, norm_eps=1e-5),
}
"""Arguments of `Qwen2Config`."""


def read_prefix(hf: dict[str, Any]) -> dict[str, Any]:
    """Return the rope, and layers of which the first `max_window_layers` are full and the others have a window."""
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    full = hf["num_hidden_layers"] if window is None else hf["max_window_layers"]
    if type(full) is not int or full < 0:
        raise ValueError(f"config.json has max_window_layers={full!r}, must be a whole number of at least 0")
    count = hf["num_hidden_layers"]
    letters = "F" * min(full, count) + "W" * max(0, count - full)
    return read_rope(hf) | read_layer_types(hf, letters, window)


def write_prefix(config: PatternConfig) -> dict[str, Any]:
    """Return the keys that `read_prefix` reads."""
    windowed = config.window > 0
    first = (config.letters + "W").index("W") if windowed else config.num_layers
    return write_rope(config) | write_layer_types(config) | {"use_sliding_window": windowed, "max_window_layers": first}


PREFIX: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
DEFAULTS = usual(32768, (None, None, None), num_key_value_heads=32, **PREFIX)
HUGGING_FACE = HuggingFace(
    "Qwen2ForCausalLM", "qwen2", {"hidden_act": ("silu", "swish")}, read_prefix, write_prefix, DEFAULTS
)
