"""Registry of the families of models and their presets."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from ringformer.models.decoder import Decoder
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.families import gemma3, llama, ministral3, mistral, olmo3, qwen2, qwen3, seed_oss, smollm3
from ringformer.models.families.huggingface import HuggingFace
from ringformer.models.flops import model_flops_per_token
from ringformer.models.interface import Features, ModelConfig, check_features


class Family(NamedTuple):
    """A family of models; `interface.py` specifies its two classes."""

    config: Any
    model: Any
    presets: Mapping[str, Mapping[str, Any]]
    """Arguments of `config`, by model name."""
    flops_per_token: Callable[[Any, int], float] | None = None
    """Training FLOPs per token of a configuration at a sequence length, by PaLM's convention, for the MFU of a run."""
    tensor_parallel: bool = False
    """True if the model gathers tokens over the axis tp where it needs them. If False, meshes with tp > 1 are
    refused."""
    hugging_face: HuggingFace | None = None
    """Translation of Hugging Face's config.json; None: the family cannot be converted."""
    features: Features | None = None
    """Arrays of batches beside the tokens."""
    likelihood: bool = True
    """True if losses are -log p(target). If False, evaluations report no perplexity and no bits per byte."""


FAMILIES = {
    name: Family(config, Decoder, module.PRESETS, model_flops_per_token, True, module.HUGGING_FACE)
    for name, config, module in (
        ("llama", llama.LlamaConfig, llama),
        ("mistral", mistral.MistralConfig, mistral),
        ("qwen2", qwen2.Qwen2Config, qwen2),
        ("qwen3", qwen3.Qwen3Config, qwen3),
        ("seed_oss", seed_oss.SeedOssConfig, seed_oss),
        ("ministral3", ministral3.Ministral3Config, ministral3),
        ("smollm3", smollm3.SmolLM3Config, smollm3),
        ("olmo3", olmo3.Olmo3Config, olmo3),
        ("gemma3", gemma3.Gemma3Config, gemma3),
    )
}
ASKED: dict[str, tuple[str, ...]] = {
    "config": (
        "ARCHITECTURE",
        "CONTEXT",
        "INHERITED",
        "layout",
        "ulysses",
        "compute_dtype",
        "num_params",
        "check_mesh",
        "check_stage",
    ),
    "model": ("loss", "token_losses"),
}
"""Attributes of a family's two classes (`interface.py`) that the trainer uses."""


def register(name: str, family: Family) -> None:
    """Add a family. Raises ValueError if its name or a preset's is taken, or a class lacks an attribute of `ASKED`."""
    if family.features is not None:
        check_features(family.features)
    for kind, names in ASKED.items():
        cls = getattr(family, kind)
        attributes = {*dir(cls), *getattr(cls, "__dataclass_fields__", ())}
        if missing := [asked for asked in names if asked not in attributes]:
            raise ValueError(f"{cls.__name__} lacks {', '.join(missing)}: see ringformer/models/interface.py")
    taken = {name} & set(FAMILIES) | set(family.presets) & {p for other in FAMILIES.values() for p in other.presets}
    if taken:
        raise ValueError(f"{', '.join(sorted(taken))} is registered already: choose another name")
    FAMILIES[name] = family


def family_of(preset: str) -> Family:
    """Return the family that has this preset. Raises ValueError listing the presets."""
    for family in FAMILIES.values():
        if preset in family.presets:
            return family
    presets = [name for family in FAMILIES.values() for name in family.presets]
    raise ValueError(f"unknown model {preset!r}; known models: {', '.join(presets)}")


def hugging_face_of(config: type) -> HuggingFace | None:
    """Return the translation of a class of configurations, or of the one that it derives from without a change; None
    if there is none."""
    tables = {family.config: family.hugging_face for family in FAMILIES.values() if family.hugging_face}
    for cls in config.__mro__:
        if cls in tables:
            return tables[cls]
        if not dataclasses.is_dataclass(cls):
            return None
        fields = {field.name for field in dataclasses.fields(cls)}
        inherited = {name for base in cls.__mro__[1:] for name in vars(base)} - fields
        if any(name in inherited and not name.startswith("__") for name in vars(cls)):
            return None  # it computes something else
    return None


def as_decoder(config: ModelConfig, folder: Any) -> DecoderConfig:
    """Return the configuration of the model in a folder. Raises ValueError unless a `Decoder` computes the model from
    it alone: inference and exports read nothing else that a family may define."""
    family = family_with(type(config))
    if not isinstance(config, DecoderConfig) or family.model is not Decoder or family.features:
        own = "batches with features" if family.model is Decoder else f"the class {family.model.__name__}"
        raise ValueError(
            f"{folder} holds a {type(config).__name__} with {own}: inference and exports take the Decoder of a "
            "configuration alone (docs/how-to/another-model.md)"
        )
    return config


def preset(name: str) -> dict[str, Any]:
    """Return the arguments of a preset for the class of its family's configurations, e.g. `Qwen3Config`. Raises
    ValueError listing the presets."""
    return dict(family_of(name).presets[name])


def preset_config(name: str, **changes: Any) -> Any:
    """Return the configuration of a preset with some of its fields changed. Raises ValueError listing the presets."""
    return family_of(name).config(**{**preset(name), **changes})


def registered_by(config: ModelConfig) -> dict[str, str]:
    """Return the name of a configuration's family, and the file of its model unless it is one of ringformer's. Raises
    ValueError if no family has the configuration."""
    family = family_with(type(config))
    name = next(name for name, each in FAMILIES.items() if each is family)
    modules = [cls.__module__ for cls in (family.model, family.config)]
    module = next((name for name in modules if not name.startswith("ringformer.")), "")
    if not module:
        return {"family": name}
    return {"family": name, "family_file": str(Path(sys.modules[module].__file__ or "").resolve())}


def build(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Module:
    """Build the model of a configuration, with parameters drawn from `rngs`. Raises ValueError if no family has it."""
    return family_with(type(config)).model(config, rngs=rngs)


def check_mesh(config: ModelConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raise ValueError if the model cannot be computed on the mesh."""
    if mesh.shape["tp"] > 1 and not family_with(type(config)).tensor_parallel:
        raise ValueError(
            f"{type(config).__name__} does not support tensor parallelism: the mesh has tp={mesh.shape['tp']}, use 1"
        )
    config.check_mesh(mesh)


def flops_per_token(config: ModelConfig, seq_len: int, *, frozen: bool = False) -> float | None:
    """Training FLOPs per token at a sequence length; None if the family has no closed form.

    Args:
      frozen: True if adapters train instead of a decoder's weights, which then have no gradients.
    """
    if frozen and isinstance(config, DecoderConfig):
        return model_flops_per_token(config, seq_len, frozen=True)
    closed_form = family_with(type(config)).flops_per_token
    return closed_form(config, seq_len) if closed_form else None


def family_with(config: type) -> Family:
    """Return the family of a class of configurations."""
    for family in FAMILIES.values():
        if family.config is config:
            return family
    raise ValueError(f"no registered family has the configuration {config.__name__}: register one")
