"""Configuration of decoders whose layers are of several kinds, named by letters."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.layer_kinds import LayerKind

LETTERS = {"F": "full attention", "W": "attention in a window", "N": "full attention without positions"}


@dataclass(frozen=True)
class PatternConfig(DecoderConfig):
    """A decoder with layers of the kinds `LETTERS`; `window` is that of the layers W."""

    layer_types: str = "F"
    """Kind of each layer, a letter each, repeated for all layers: F full attention, W attention in a window, N full
    attention without positions; e.g. WWWWWF."""

    INHERITED: ClassVar[tuple[str, ...]] = (*DecoderConfig.INHERITED, "layer_types")

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = sorted(set(self.layer_types) - set(LETTERS))
        if unknown or not self.layer_types:
            raise ValueError(
                f"layer_types={self.layer_types!r} has {', '.join(unknown) or 'no letter'}; known: "
                + ", ".join(f"{letter} ({meaning})" for letter, meaning in LETTERS.items())
            )
        windowed = "W" in self.letters
        if windowed != (self.window > 0):
            why = "layers W need a window" if windowed else "no layer W has it; set window=0"
            raise ValueError(f"window={self.window} with layer_types={self.layer_types!r}: {why}")

    @property
    def letters(self) -> str:
        """Letter of each layer."""
        return (self.layer_types * self.num_layers)[: self.num_layers]

    def kind_of(self, letter: str) -> LayerKind:
        """Return what a letter stands for."""
        window = self.window if letter == "W" else 0
        theta = None if letter == "N" else self.rope_theta
        return LayerKind(window, theta, self.rope_scaling)

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer, in order."""
        return tuple(map(self.kind_of, self.letters))


@dataclass(frozen=True)
class LocalRopeConfig(PatternConfig):
    """Layers W have frequencies of their own, without a scaling; `rope_theta` and `rope_scaling` are those of F."""

    local_theta: float = 1e4
    """Base of the rotary frequencies of the layers W."""

    INHERITED: ClassVar[tuple[str, ...]] = (*PatternConfig.INHERITED, "local_theta")

    def kind_of(self, letter: str) -> LayerKind:
        """Return what a letter stands for."""
        if letter == "W":
            return LayerKind(self.window, self.local_theta)
        return super().kind_of(letter)


def shortest_pattern(letters: str) -> str:
    """Return the shortest pattern that, repeated, gives the letters of all layers."""
    return next(
        letters[:n] for n in range(1, len(letters) + 1) if (letters[:n] * len(letters))[: len(letters)] == letters
    )
