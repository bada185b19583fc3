"""Another rope than a saved model's: a base or a scaling that extends its context, before training or without it."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ringformer.cli.dataclass_flags import add_flags
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.interface import ModelConfig
from ringformer.ops.tokenwise.rope import OPTIONS, RopeScaling

PREFIX = "rope_scaling."


@dataclass(frozen=True, kw_only=True)
class RopeChange:
    """Rope that replaces a saved model's."""

    rope_theta: float | None = None
    """Base of the rotary frequencies instead of the model's; a larger base supports longer contexts."""
    scaling: Mapping[str, Any] | None = None
    """Fields of `RopeScaling` instead of the model's; None: the model's scaling. `original_max_position` may be left
    out: it is the model's original context."""
    drop_rope: bool = False
    """Drop the rotary positions of all layers (DroPE, Gelberg et al. 2025, arXiv:2512.12167). The model needs a short
    training at its own context before it is of use; llama and smollm3 alone."""

    def __post_init__(self) -> None:
        if self.drop_rope and (self.rope_theta is not None or self.scaling):
            raise ValueError("--drop_rope leaves no rope to change: leave out --rope_theta and --rope_scaling")

    def apply(self, config: DecoderConfig, context: int | None) -> DecoderConfig:
        """Return the model with this rope.

        Args:
          context: context of the model in tokens; None if unknown.

        Raises ValueError if the model has no rope, if it contradicts the change, or for an invalid rope.
        """
        if self.drop_rope:
            raise ValueError("a model without a rope is another model: convert it with convert from-hf --drop_rope")
        if not any(config.ropes):
            raise ValueError("the model has no rotary positions, so that no rope can be changed")
        scaling = config.rope_scaling
        if self.scaling is not None:
            scaling = self._scaling(config.rope_scaling, context)
        elif scaling.kind != "none":
            raise ValueError(
                f"rope_theta={self.rope_theta:g} for a model whose rope has a scaling of kind {scaling.kind}: both "
                f"extend the context; set --{PREFIX}kind=none to drop the scaling, or name its kind and fields as well"
            )
        theta = config.rope_theta if self.rope_theta is None else self.rope_theta
        return replace(config, rope_theta=theta, rope_scaling=scaling)

    def context(self, config: DecoderConfig, context: int | None) -> int | None:
        """Return the context that a model has with this rope: `factor` times the one before any scaling if there is a
        new scaling, else the model's. A larger base reaches further, but nothing says how far.

        Args:
          config: the model as saved. context: its context in tokens; None if unknown.
        """
        scaling = self.scaling or {}
        factor = scaling.get("factor")
        if factor is None:
            return context
        own = config.rope_scaling
        original = own.original_max_position or scaling.get("original_max_position")
        if original is None and context is not None:
            original = context / (own.factor or 1)
        if original is None:
            return None
        return int(original * factor)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "RopeChange | None":
        """Return the change with these `settings`; None if there are none."""
        if not settings:
            return None
        scaling = {}
        for name, value in settings.items():
            if name.startswith(PREFIX):
                scaling[name.removeprefix(PREFIX)] = value
        dropped = settings.get("drop_rope", False)
        return cls(rope_theta=settings.get("rope_theta"), scaling=scaling or None, drop_rope=dropped)

    @property
    def settings(self) -> dict[str, Any]:
        """Values of the options that are set, for JSON, by their names."""
        settings: dict[str, Any] = {}
        if self.rope_theta is not None:
            settings["rope_theta"] = self.rope_theta
        if self.drop_rope:
            settings["drop_rope"] = True
        for name, value in (self.scaling or {}).items():
            settings[f"{PREFIX}{name}"] = value
        return settings

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.settings.items())

    def warning(self, config: ModelConfig) -> str | None:
        """Return a warning if the base is smaller than the model's, else None."""
        own = getattr(config, "rope_theta", None)
        if self.rope_theta is None or own is None or self.rope_theta >= own:
            return None
        return (
            f"warning: rope_theta={self.rope_theta:g} is below the model's {own:g}: a longer context needs a larger one"
        )

    def _scaling(self, own: RopeScaling, context: int | None) -> RopeScaling:
        """Return the new scaling, given the model's own."""
        given = dict(self.scaling or {})
        if "kind" not in given:
            raise ValueError(f"--{PREFIX}{min(given)} needs --{PREFIX}kind, one of {', '.join(OPTIONS)}")
        unscaled = context if own.kind == "none" else None
        original = own.original_max_position or unscaled
        if "original_max_position" in OPTIONS.get(given["kind"], ()) and original is not None:
            named = given.setdefault("original_max_position", original)
            if named != original:
                raise ValueError(
                    f"--{PREFIX}original_max_position={named}, but the model's original context has {original:,} "
                    "tokens: leave it out"
                )
        return RopeScaling(**given)


def add_rope_options(parser: argparse.ArgumentParser, *, converts: bool = False) -> None:
    """Add the options of another rope, for a conversion also that of none."""
    names = ["rope_theta"]
    if converts:
        names.append("drop_rope")
    add_flags(parser, RopeChange, names)
    add_flags(parser, RopeScaling, unset=True, prefix=PREFIX)


def rope_change(args: argparse.Namespace) -> RopeChange | None:
    """Return the change that a command asks for, None if it asks for none."""
    names = ["rope_theta"]
    for field in fields(RopeScaling):
        names.append(PREFIX + field.name)
    settings = {}
    for name in names:
        value = getattr(args, name)
        if value is not None:
            settings[name] = value
    if getattr(args, "drop_rope", False):
        settings["drop_rope"] = True
    return RopeChange.of(settings)
