"""Ministral 3: LLaMA whose queries grow with their position (Mistral AI 2025)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.families.huggingface import HuggingFace, check_numbers, read_rope, usual, write_rope
from ringformer.models.families.shapes import shape
from ringformer.ops.argument_checks import AnyArray
from ringformer.ops.tokenwise.rope import RopeScaling


@dataclass(frozen=True)
class Ministral3Config(DecoderConfig):
    """Ministral 3."""

    query_growth: float = 0.1
    """Queries at position p are multiplied by 1 + query_growth ln(1 + floor(p / original context of the rope))."""

    INHERITED: ClassVar[tuple[str, ...]] = (*DecoderConfig.INHERITED, "query_growth")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.query_growth and not self.rope_scaling.original_max_position:
            raise ValueError(
                f"query_growth={self.query_growth} counts the original contexts before a token: it needs "
                "rope_scaling.original_max_position, or set query_growth=0"
            )

    def query_scale(self, positions: Int[AnyArray, "#B T"]) -> Float32[Array, "#B T"] | None:
        """Return the factor of rotated queries by position."""
        if not self.query_growth:
            return None
        contexts = positions // (self.rope_scaling.original_max_position or 1)
        return 1 + self.query_growth * jnp.log1p(jnp.asarray(contexts, jnp.float32))


YARN = RopeScaling(
    "yarn", 16.0, original_max_position=16384, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
)
PRESETS: dict[str, dict[str, Any]] = {
    "ministral3_8b": shape(
        4096, 34, 32, 8, 14336, 131072, 128, norm_eps=1e-5, rope_theta=1e6, rope_scaling=YARN, query_growth=0.1
    ),
}
"""Arguments of `Ministral3Config`."""

GROWTH = "llama_4_scaling_beta"


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    parameters = hf.get("rope_parameters") or {}
    growth = parameters.get(GROWTH) if type(parameters) is dict else None
    if growth is None:
        raise ValueError(
            f"config.json has no {GROWTH} in its rope_parameters, which a Ministral 3 has: write it, e.g. 0.1"
        )
    check_numbers({GROWTH: growth})
    rope = read_rope(hf, 1e6, ignored=(GROWTH, "max_position_embeddings"))
    return rope | {"query_growth": float(growth)}


def _write(config: Ministral3Config) -> dict[str, Any]:
    keys = write_rope(config)
    keys["rope_parameters"] |= {GROWTH: config.query_growth}
    return {"rope_parameters": keys["rope_parameters"], "rope_theta": config.rope_theta, "sliding_window": None}


HUGGING_FACE = HuggingFace(
    "Ministral3ForCausalLM",
    "ministral3",
    {"hidden_act": ("silu", "swish"), "sliding_window": (None,), "layer_types": (None,)},
    _read,
    _write,
    usual(262144, (1, 2, 11), rms_norm_eps=1e-5, num_key_value_heads=8, head_dim=128),
    wrapper="Mistral3ForConditionalGeneration",
)
