"""Seed-OSS: LLaMA with biases on q, k and v, and heads wider than the model (ByteDance Seed 2025)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.families.huggingface import HuggingFace, read_rope, usual, write_rope
from ringformer.models.families.shapes import shape
from ringformer.models.layer_kinds import Parts


@dataclass(frozen=True)
class SeedOssConfig(DecoderConfig):
    """Seed-OSS."""

    PARTS: ClassVar[Parts] = Parts(bias=True)


PRESETS: dict[str, dict[str, Any]] = {
    "seed_oss_36b": shape(5120, 64, 80, 8, 27648, 155136, 128, rope_theta=1e7),
}
"""Arguments of `SeedOssConfig`."""

REQUIRED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (True,),
    "attention_out_bias": (False,),
    "mlp_bias": (False,),
}
DEFAULTS = usual(524288, (0, 2, 1), num_key_value_heads=8, head_dim=128)
HUGGING_FACE = HuggingFace("SeedOssForCausalLM", "seed_oss", REQUIRED, read_rope, write_rope, DEFAULTS)
