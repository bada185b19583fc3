"""Mistral: LLaMA with one window for all layers, or none (Jiang et al. 2023; Mistral AI's model cards)."""

from dataclasses import dataclass
from typing import Any

from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.families.huggingface import HuggingFace, read_rope, usual, write_rope
from ringformer.models.families.shapes import shape


@dataclass(frozen=True)
class MistralConfig(DecoderConfig):
    """Mistral; `window` is that of all layers."""


PRESETS: dict[str, dict[str, Any]] = {
    "mistral_7b_v0.1": shape(4096, 32, 32, 8, 14336, norm_eps=1e-5, window=4096),
    "mistral_7b": shape(4096, 32, 32, 8, 14336, 32768, norm_eps=1e-5, rope_theta=1e6),
    "mistral_nemo_12b": shape(5120, 40, 32, 8, 14336, 131072, 128, norm_eps=1e-5, rope_theta=1e6),
}
"""Arguments of `MistralConfig`."""


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    window = hf["sliding_window"]
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"config.json has sliding_window={window!r}, must be at least 1, or null")
    return read_rope(hf) | {"window": window or 0}


def _write(config: MistralConfig) -> dict[str, Any]:
    return write_rope(config) | {"sliding_window": config.window or None}


HUGGING_FACE = HuggingFace(
    "MistralForCausalLM",
    "mistral",
    {"hidden_act": ("silu", "swish"), "layer_types": (None,)},
    _read,
    _write,
    usual(131072, (1, 2, None), num_key_value_heads=8, sliding_window=4096),
    wrapper="Mistral3ForConditionalGeneration",  # Mistral Small 3.1
)
