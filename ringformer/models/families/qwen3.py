"""Qwen 3: LLaMA with RMSNorm of each query and key head, and windows after the first layers (Qwen team 2025)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ringformer.models.families.huggingface import HuggingFace
from ringformer.models.families.layer_patterns import PatternConfig
from ringformer.models.families.qwen2 import DEFAULTS, read_prefix, write_prefix
from ringformer.models.families.shapes import shape
from ringformer.models.layer_kinds import Parts


@dataclass(frozen=True)
class Qwen3Config(PatternConfig):
    """Qwen 3; layers F and W."""

    PARTS: ClassVar[Parts] = Parts(qk_norm="head")


def _shape(D, L, H, K, F, **more: Any) -> dict[str, Any]:
    return shape(D, L, H, K, F, 151936, 128, rope_theta=1e6, **more)


PRESETS: dict[str, dict[str, Any]] = {
    "qwen3_0.6b": _shape(1024, 28, 16, 8, 3072, tie_embeddings=True),
    "qwen3_1.7b": _shape(2048, 28, 16, 8, 6144, tie_embeddings=True),
    "qwen3_4b": _shape(2560, 36, 32, 8, 9728, tie_embeddings=True),
    "qwen3_8b": _shape(4096, 36, 32, 8, 12288),
    "qwen3_14b": _shape(5120, 40, 40, 8, 17408),
    "qwen3_32b": _shape(5120, 64, 64, 8, 25600),
}
"""Arguments of `Qwen3Config`."""

HUGGING_FACE = HuggingFace(
    "Qwen3ForCausalLM",
    "qwen3",
    {"hidden_act": ("silu", "swish"), "attention_bias": (False,)},
    read_prefix,
    write_prefix,
    DEFAULTS | {"head_dim": 128},
)
