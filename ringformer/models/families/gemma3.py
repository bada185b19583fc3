"""Gemma 3 (text): four norms a layer, a norm of each query and key head, GeGLU, windows (Gemma team 2025)."""

import math
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
class Gemma3Config(LocalRopeConfig):
    """Gemma 3; layers F and W."""

    query_pre_attn_scalar: float = 256.0
    """Logits are divided by its root."""

    PARTS: ClassVar[Parts] = Parts(qk_norm="head", norms="both", norm_offset=1.0, activation="gelu_tanh")
    INHERITED: ClassVar[tuple[str, ...]] = (*LocalRopeConfig.INHERITED, "query_pre_attn_scalar")

    @property
    def embedding_scale(self) -> float:
        """Factor of embedded tokens."""
        return math.sqrt(self.hidden_size)

    @property
    def logit_scale(self) -> float:
        """Factor of attention's logits."""
        return self.query_pre_attn_scalar**-0.5


def _shape(D, L, H, K, F, *, window, V=262208, d=256, **more: Any) -> dict[str, Any]:
    kinds = {"window": window, "layer_types": "WWWWWF", "rope_theta": 1e6, "local_theta": 1e4}
    return shape(D, L, H, K, F, V, d, tie_embeddings=True, **kinds, **more)


SCALED: dict[str, Any] = {"rope_scaling": RopeScaling("linear", 8.0)}
PRESETS: dict[str, dict[str, Any]] = {
    "gemma3_1b": _shape(1152, 26, 4, 1, 6912, window=512, V=262144),
    "gemma3_4b": _shape(2560, 34, 8, 4, 10240, window=1024, **SCALED),
    "gemma3_12b": _shape(3840, 48, 16, 8, 15360, window=1024, **SCALED),
    "gemma3_27b": _shape(5376, 62, 32, 16, 21504, window=1024, d=128, query_pre_attn_scalar=168.0, **SCALED),
}
"""Arguments of `Gemma3Config`."""


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    every = hf.get("sliding_window_pattern") or hf["_sliding_window_pattern"]  # older files; newer ones
    if type(every) is not int or every < 1:
        raise ValueError(f"config.json has sliding_window_pattern={every!r}, must be a whole number of at least 1")
    count = hf["num_hidden_layers"]
    scalar = hf["query_pre_attn_scalar"]
    if not isinstance(scalar, int | float) or not 0 < scalar < math.inf:
        raise ValueError(f"config.json has query_pre_attn_scalar={scalar!r}, must be positive")
    letters = ("W" * (every - 1) + "F") * count
    return {
        **read_ropes(hf, 1e6, 1e4, "rope_local_base_freq"),
        **read_layer_types(hf, letters[:count], hf["sliding_window"]),
        "query_pre_attn_scalar": float(scalar),
    }


def _write(config: Gemma3Config) -> dict[str, Any]:
    scalar = config.query_pre_attn_scalar
    if not scalar.is_integer():
        raise ValueError(
            f"query_pre_attn_scalar={scalar} is not whole, as transformers' must be: it cannot be exported"
        )
    return write_ropes(config) | write_layer_types(config, 4096) | {"query_pre_attn_scalar": int(scalar)}


DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "_sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
"""Values that the files of released models leave out."""
HUGGING_FACE = HuggingFace(
    "Gemma3ForCausalLM",
    "gemma3_text",
    {
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    _read,
    _write,
    usual(131072, (2, 1, 0), **DEFAULTS),
    wrapper="Gemma3ForConditionalGeneration",
)
