"""SmolLM3: LLaMA whose every fourth layer has no positions (Hugging Face 2025)."""

from dataclasses import dataclass
from typing import Any

from ringformer.models.families.huggingface import HuggingFace, read_rope, usual, write_rope
from ringformer.models.families.layer_patterns import PatternConfig, shortest_pattern
from ringformer.models.families.shapes import shape


@dataclass(frozen=True)
class SmolLM3Config(PatternConfig):
    """SmolLM3; layers F and N."""


PRESETS: dict[str, dict[str, Any]] = {
    "smollm3_3b": shape(2048, 36, 16, 4, 11008, 128256, rope_theta=5e6, tie_embeddings=True, layer_types="FFFN"),
}
"""Arguments of `SmolLM3Config`."""


def _read(hf: dict[str, Any]) -> dict[str, Any]:
    count = hf["num_hidden_layers"]
    interval = hf["no_rope_layer_interval"]
    if type(interval) is not int or interval < 1:
        raise ValueError(f"config.json has no_rope_layer_interval={interval!r}, must be a whole number of at least 1")
    rotated = hf.get("no_rope_layers")
    if rotated is None:
        rotated = [int((i + 1) % interval != 0) for i in range(count)]
    if type(rotated) is not list or len(rotated) != count or any(x not in (0, 1) for x in rotated):
        raise ValueError(
            f"config.json has no_rope_layers={rotated!r}, must be a list of 1 (rotated) or 0 for {count} layers"
        )
    letters = "".join("F" if x else "N" for x in rotated)
    return read_rope(hf, 2e6) | {"layer_types": shortest_pattern(letters), "window": 0}


def _write(config: SmolLM3Config) -> dict[str, Any]:
    return write_rope(config) | {
        "no_rope_layers": [int(letter != "N") for letter in config.letters],
        "layer_types": ["full_attention"] * config.num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
    }


HUGGING_FACE = HuggingFace(
    "SmolLM3ForCausalLM",
    "smollm3",
    {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
    },
    _read,
    _write,
    usual(32768, (128000, 128001, 128004), num_key_value_heads=4, tie_word_embeddings=True, no_rope_layer_interval=4),
)
