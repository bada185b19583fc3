"""Keys of Hugging Face's config.json, as families read and write them."""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ringformer.models.families.layer_patterns import shortest_pattern
from ringformer.ops.tokenwise.rope import OPTIONS, RopeScaling
from ringformer.settings import is_number

ROPE_TYPES: dict[str, Any] = {"default": "none", **{kind: kind for kind in OPTIONS if kind != "none"}}
"""Kind of a `RopeScaling` for each rope type of a config.json."""

FLAGS = ("truncate", "finetuned")
"""Parameters of a rope type that are true or false."""
NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Parameters of a rope type that transformers has no values for."""

LAYER_TYPES = {"full_attention": "F", "sliding_attention": "W"}


class HuggingFace(NamedTuple):
    """Translation of a family's config.json. Names of tensors follow from the parts of the family."""

    architecture: str
    """Class of transformers."""
    model_type: str
    required: Mapping[str, tuple[Any, ...]]
    """Values of keys that the family implements, the default first; any other value means a different model."""
    read: Callable[[dict[str, Any]], dict[str, Any]]
    """Returns the fields of the configuration that only this family has, and those of its rope and window."""
    write: Callable[[Any], dict[str, Any]]
    """Returns the keys for those fields."""
    defaults: Mapping[str, Any]
    """Values that keys have in transformers if config.json lacks them."""
    wrapper: str | None = None
    """Class of a vision model that contains this model as its text_config, with tensors named language_model.*. Several
    families may have the same."""

    @property
    def absent(self) -> dict[str, Any]:
        """Values of keys that a config.json of the family lacks: `defaults`, and the model's type."""
        return {"model_type": self.model_type, **self.defaults}


def usual(max_position: int, ids: tuple[int | None, ...], **more: Any) -> dict[str, Any]:
    """Return `HuggingFace.defaults`: the context, the ids of (bos, eos, pad), and others by key."""
    names = "bos_token_id", "eos_token_id", "pad_token_id"
    return {"max_position_embeddings": max_position, **dict(zip(names, ids, strict=True)), **more}


def read_rope(
    hf: dict[str, Any], default_theta: float = 1e4, kind: str | None = None, ignored: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return rope_theta and rope_scaling with the precedence of transformers: `rope_scaling` over `rope_parameters`,
    and a theta inside either object over the theta at the top level.

    Args:
      kind: the layer type whose parameters are read, if they are by layer type.
      ignored: parameters that do not concern the frequencies.
    """
    for key in ("rope_scaling", "rope_parameters"):
        if hf.get(key) and type(hf[key]) is not dict:
            raise ValueError(f"config.json has {key}={hf[key]!r}, must be an object")
    named = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    parameters = {key: value for key, value in named.items() if value is not None and key not in ignored}
    theta = next(x for x in (parameters.pop("rope_theta", None), hf.get("rope_theta"), default_theta) if x is not None)
    legacy = parameters.pop("type", "default")
    rope_type = parameters.pop("rope_type", legacy)
    where = f" for {kind}" if kind else ""
    if rope_type not in tuple(ROPE_TYPES):
        raise ValueError(
            f"config.json has rope type {rope_type!r}{where}: only {', '.join(ROPE_TYPES)} can be converted"
        )
    rope_type = ROPE_TYPES[rope_type]
    numbers = {name: value for name, value in parameters.items() if name not in FLAGS}
    check_numbers({"rope_theta": theta} | numbers)
    if theta <= 0:
        raise ValueError(f"config.json has rope_theta={theta!r}{where}, must be positive")
    if rope_type == "yarn" and "factor" in named and named["factor"] is None:
        parameters["factor"] = _ratio_of_contexts(hf, parameters)
    if missing := [name for name in NEEDED.get(rope_type, ()) if name not in parameters]:
        raise ValueError(f"config.json has rope type {rope_type!r}{where} without {', '.join(missing)}")
    parameters.pop("finetuned", None)  # informational, in YaRN's own checkpoints
    if parameters.pop("partial_rotary_factor", 1) != 1:
        raise ValueError("config.json has partial_rotary_factor other than 1: only whole heads can be rotated")
    original = _original_context(hf, parameters)
    parameters.pop("original_max_position_embeddings", None)
    if "original_max_position" in OPTIONS[rope_type]:
        parameters["original_max_position"] = original
    if unknown := sorted(parameters.keys() - OPTIONS[rope_type]):
        raise ValueError(f"config.json has {', '.join(unknown)}, which rope type {rope_type!r} does not use{where}")
    return {"rope_theta": float(theta), "rope_scaling": RopeScaling(rope_type, **parameters)}


def _original_context(hf: dict[str, Any], parameters: dict[str, Any]) -> Any:
    """Return the context before scaling, with the precedence of transformers."""
    inside = parameters.get("original_max_position_embeddings")
    at_top = hf.get("original_max_position_embeddings")
    return next(x for x in (at_top, inside, hf["max_position_embeddings"]) if x is not None)


def _ratio_of_contexts(hf: dict[str, Any], parameters: dict[str, Any]) -> float:
    """Return the factor of YaRN that transformers derives where a config.json has null."""
    original = _original_context(hf, parameters)
    if original < 1:
        raise ValueError(f"config.json has original_max_position_embeddings={original}, must be at least 1")
    return hf["max_position_embeddings"] / original


def write_rope(config: Any) -> dict[str, Any]:
    """Return the keys of one rope for all layers.

    transformers 5 reads `rope_parameters`. Version 4 reads `rope_theta` and `rope_scaling`, which version 5 also
    accepts. The result has all three.
    """
    scaling = scaling_to_hf(config.rope_scaling)
    parameters = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling, "rope_parameters": parameters}


def read_ropes(hf: dict[str, Any], default_theta: float, default_local: float, local_key: str) -> dict[str, Any]:
    """Return rope_theta and rope_scaling of full attention, and `local_theta` of windows, which take no scaling.

    transformers 5 has `rope_parameters` by layer type. Older files have `rope_theta` and `local_key`, and a
    `rope_scaling` of full attention alone.
    """
    by_type = hf.get("rope_parameters") or {}
    if type(by_type) is not dict or not all(type(x) is dict for x in by_type.values() if x is not None):
        raise ValueError(f"config.json has rope_parameters={by_type!r}, must be an object for each layer type")
    if unknown := sorted(by_type.keys() - LAYER_TYPES.keys()):
        raise ValueError(f"config.json has rope_parameters for {', '.join(unknown)}: only {', '.join(LAYER_TYPES)}")
    full = (by_type.get("full_attention") or {}) | (hf.get("rope_scaling") or {})
    local = by_type.get("sliding_attention") or {}
    same = {key: value for key, value in hf.items() if key not in ("rope_scaling", "rope_theta")}
    theta = {"rope_theta": hf.get("rope_theta")}
    of_windows = read_rope(
        same | {"rope_parameters": local, "rope_theta": hf.get(local_key)}, default_local, "sliding_attention"
    )
    if of_windows["rope_scaling"].kind != "none":
        raise ValueError("config.json scales the rope of sliding_attention: only that of full_attention can be scaled")
    rope = read_rope(same | {"rope_parameters": full} | theta, default_theta, "full_attention")
    return rope | {"local_theta": of_windows["rope_theta"]}


def write_ropes(config: Any) -> dict[str, Any]:
    """Return the key that `read_ropes` reads."""
    scaling = scaling_to_hf(config.rope_scaling) or {"rope_type": "default"}
    full = {"rope_theta": config.rope_theta, **scaling}
    local = {"rope_theta": config.local_theta, "rope_type": "default"}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def read_layer_types(hf: dict[str, Any], default: str, window: int | None) -> dict[str, Any]:
    """Return layer_types and window; raise ValueError if they contradict each other or the number of layers.

    Args:
      default: letters of all layers if config.json does not name them.
      window: the window that layers of type sliding_attention have; None: there is none.
    """
    count = hf["num_hidden_layers"]
    types = hf.get("layer_types")
    if types is None:
        letters = default
    else:
        if type(types) is not list or (unknown := [x for x in types if x not in tuple(LAYER_TYPES)]):
            strange = ", ".join(map(repr, dict.fromkeys(unknown))) if type(types) is list else repr(types)
            raise ValueError(
                f"config.json has layer_types of {strange}: only {', '.join(LAYER_TYPES)} can be converted"
            )
        letters = "".join(LAYER_TYPES[x] for x in types)
    if len(letters) != count:
        raise ValueError(f"config.json has {len(letters)} layer_types and num_hidden_layers={count}: which is right?")
    if "W" not in letters:
        return {"layer_types": shortest_pattern(letters), "window": 0}
    if type(window) is not int or window < 1:
        raise ValueError(
            f"config.json has sliding_attention in its layer_types and sliding_window={window!r}: it must be at least 1"
        )
    return {"layer_types": shortest_pattern(letters), "window": window}


def write_layer_types(config: Any, unused: int | None = None) -> dict[str, Any]:
    """Return the keys of layers that are full or in a window. `unused`: window of a model that has no such layer."""
    names = {letter: name for name, letter in LAYER_TYPES.items()}
    if foreign := sorted(set(config.letters) - names.keys()):
        raise ValueError(
            f"layer_types={config.layer_types!r} has layers {', '.join(foreign)}, which transformers' model has not: "
            "it cannot be exported"
        )
    return {"layer_types": [names[letter] for letter in config.letters], "sliding_window": config.window or unused}


def check_numbers(values: dict[str, Any]) -> None:
    """Raise ValueError for a value of config.json that is not a finite number."""
    for key, value in values.items():
        if not is_number(value):
            raise ValueError(f"config.json has {key}={reprlib.repr(value)}, must be a number that a float can hold")


def scaling_to_hf(scaling: RopeScaling) -> dict[str, Any] | None:
    """Return the rope type and parameters of a scaling; None if there is none."""
    if scaling.kind == "none":
        return None
    values = {name: getattr(scaling, name) for name in OPTIONS[scaling.kind]}
    if scaling.kind == "llama3":  # transformers has no defaults for these
        values |= {name: scaling.option(name) for name in ("low_freq_factor", "high_freq_factor")}
    values["original_max_position_embeddings"] = values.pop("original_max_position", None)
    return {"rope_type": scaling.kind, **{name: value for name, value in values.items() if value is not None}}
