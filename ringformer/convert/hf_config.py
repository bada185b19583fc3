"""Translation of a Hugging Face config.json to a `LlamaConfig` and back."""

import math
from typing import Any

from ringformer.models.llama_config import LlamaConfig
from ringformer.ops.tokenwise.rope import OPTIONS, RopeScaling

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
}
"""Field of `LlamaConfig` for each key that a config.json must have."""

OPTIONAL_FIELDS = {
    "rms_norm_eps": ("norm_eps", 1e-6),
    "initializer_range": ("init_std", 0.02),
    "tie_word_embeddings": ("tie_embeddings", False),
}
"""Field of `LlamaConfig` and transformers' default for each key."""

REQUIRED_VALUES = {
    "model_type": ("llama",),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
}
"""Values of a config.json that `ringformer.models.llama` implements; any other value means a different model."""

NUMBERS = (
    "rms_norm_eps",
    "initializer_range",
    "rope_theta",
    "max_position_embeddings",
    "original_max_position_embeddings",
)

NULLABLE = (
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "original_max_position_embeddings",
    "rope_scaling",
    "rope_parameters",
)
"""Keys for which null means absent."""

ROPE_TYPES: dict[str, Any] = {"default": "none", **{kind: kind for kind in OPTIONS if kind != "none"}}
"""Kind of a `RopeScaling` for each rope type of a config.json."""


def from_hf_config(hf: dict[str, Any]) -> LlamaConfig:
    """Return the `LlamaConfig` of a config.json, as transformers 4 or 5 writes it.

    Raises ValueError that names the features that ringformer's LLaMA does not support.
    """
    architectures = hf.get("architectures") or ["LlamaForCausalLM"]
    if architectures != ["LlamaForCausalLM"]:
        named = ", ".join(map(str, architectures)) if type(architectures) is list else repr(architectures)
        raise ValueError(f"the model is a {named}: only LlamaForCausalLM can be converted")
    for key, supported in REQUIRED_VALUES.items():
        if hf.get(key, supported[0]) not in supported:
            raise ValueError(f"config.json has {key}={hf[key]!r}: only {supported[0]!r} can be converted")
    if missing := [key for key in SIZES if key not in hf]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    hf = {key: value for key, value in hf.items() if value is not None or key not in NULLABLE}
    for key in (*SIZES, "num_key_value_heads", "head_dim"):
        if key in hf and not (type(hf[key]) is int and hf[key] >= 1):
            raise ValueError(f"config.json has {key}={hf[key]!r}, must be a whole number of at least 1")
    _check_numbers({key: hf[key] for key in NUMBERS if key in hf})
    theta, scaling = _rope(hf)
    heads = hf["num_attention_heads"]
    return LlamaConfig(
        **{ours: hf[theirs] for theirs, ours in SIZES.items()},
        num_kv_heads=hf.get("num_key_value_heads", heads),
        head_dim=hf.get("head_dim", hf["hidden_size"] // heads),
        rope_theta=float(theta),
        rope_scaling=scaling,
        **{ours: hf.get(theirs, default) for theirs, (ours, default) in OPTIONAL_FIELDS.items()},
    )


def to_hf_config(config: LlamaConfig, *, max_position: int, dtype: str, token_ids: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of a model, for transformers 4 and 5.

    Version 5 reads `rope_parameters`. Version 4 reads `rope_theta` and `rope_scaling`, which version 5 also accepts.
    The result has all three.

    Args:
      max_position: context of the model in tokens.
      token_ids: bos_token_id, eos_token_id, pad_token_id.
    """
    if config.window:
        raise ValueError(f"window={config.window}: transformers' LLaMA has no sliding window, so it cannot be exported")
    if config.hidden_size % config.num_heads:
        raise ValueError(
            f"hidden_size={config.hidden_size} is not a multiple of num_heads={config.num_heads}: transformers refuses "
            "such a LLaMA"
        )
    scaling = _scaling_to_hf(config.rope_scaling)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{theirs: getattr(config, ours) for theirs, ours in SIZES.items()},
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **{theirs: getattr(config, ours) for theirs, (ours, _) in OPTIONAL_FIELDS.items()},
        "max_position_embeddings": max_position,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
        **token_ids,
    }


def _check_numbers(values: dict[str, Any]) -> None:
    for key, value in values.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"config.json has {key}={value!r}, must be a number")


def _rope(hf: dict[str, Any]) -> tuple[float, RopeScaling]:
    """Return theta and scaling with the precedence of transformers: `rope_scaling` over `rope_parameters`, and a theta
    inside either object over the theta at the top level."""
    for key in ("rope_scaling", "rope_parameters"):
        if hf.get(key) and type(hf[key]) is not dict:
            raise ValueError(f"config.json has {key}={hf[key]!r}, must be an object")
    named = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    parameters = {key: value for key, value in named.items() if value is not None}
    theta = parameters.pop("rope_theta", None) or hf.get("rope_theta") or 1e4
    legacy = parameters.pop("type", "default")
    kind = parameters.pop("rope_type", legacy)
    if kind not in tuple(ROPE_TYPES):
        raise ValueError(f"config.json has rope type {kind!r}: only {', '.join(ROPE_TYPES)} can be converted")
    kind = ROPE_TYPES[kind]
    _check_numbers({"rope_theta": theta} | parameters)
    parameters.pop("finetuned", None)  # informational, in YaRN's own checkpoints
    if parameters.pop("partial_rotary_factor", 1) != 1:
        raise ValueError("config.json has partial_rotary_factor other than 1: only whole heads can be rotated")
    original = parameters.pop("original_max_position_embeddings", None)
    if "original_max_position" in OPTIONS[kind]:
        default = hf.get("max_position_embeddings", 2048)
        original = hf.get("original_max_position_embeddings") or original or default
        parameters["original_max_position"] = original
        if kind == "yarn":
            parameters.setdefault("factor", default / original)
    if unknown := sorted(parameters.keys() - OPTIONS[kind]):
        raise ValueError(f"config.json has {', '.join(unknown)}, which rope type {kind!r} does not use")
    return theta, RopeScaling(kind, **parameters)


def _scaling_to_hf(scaling: RopeScaling) -> dict[str, Any] | None:
    if scaling.kind == "none":
        return None
    values = {name: getattr(scaling, name) for name in OPTIONS[scaling.kind]}
    if scaling.kind == "llama3":  # transformers has no defaults for these
        values |= {name: scaling.option(name) for name in ("low_freq_factor", "high_freq_factor")}
    values["original_max_position_embeddings"] = values.pop("original_max_position", None)
    return {"rope_type": scaling.kind, **{name: value for name, value in values.items() if value is not None}}
