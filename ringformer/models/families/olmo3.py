"""OLMo 3: norms after attention and feed-forward, a norm of all query and key heads, windows (Ai2 2025)."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ringformer.models.families.huggingface import (
    HuggingFace,
    read_layer_types,
    read_ropes,
    usual,
    write_layer_types,
    write_ropes,
)
from ringformer.models.families.layer_patterns import LocalRopeConfig
from ringformer.models.families.shapes import shape
from ringformer.models.layer_kinds import Parts
from ringformer.ops.tokenwise.rope import RopeScaling


@dataclass(frozen=True)
class Olmo3Config(LocalRopeConfig):
    """OLMo 3; layers F and W."""

    PARTS: ClassVar[Parts] = Parts(qk_norm="width", norms="after")


LONG: dict[str, Any] = dict(
    rope_theta=5e5,
    rope_scaling=RopeScaling("yarn", 8.0, original_max_position=8192, beta_fast=32.0, beta_slow=1.0),
    local_theta=5e5,
    window=4096,
    layer_types="WWWF",
)
PRESETS: dict[str, dict[str, Any]] = {
    "olmo3_7b": shape(4096, 32, 32, 32, 11008, 100278, **LONG),
    "olmo3_32b": shape(5120, 64, 40, 8, 27648, 100278, **LONG),
}
"""Arguments of `Olmo3Config`."""


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    letters = ("WWWF" * hf["num_hidden_layers"])[: hf["num_hidden_layers"]]
    return read_ropes(hf, 5e5, 5e5, "") | read_layer_types(hf, letters, hf["sliding_window"])


def _write(config: Olmo3Config) -> dict[str, Any]:
    return write_ropes(config) | write_layer_types(config, 4096)


HUGGING_FACE = HuggingFace(
    "Olmo3ForCausalLM",
    "olmo3",
    {"hidden_act": ("silu", "swish"), "attention_bias": (False,)},
    _read,
    _write,
    usual(2048, (None, 50279, 1), rms_norm_eps=1e-5, sliding_window=4096),
)
