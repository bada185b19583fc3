"""Parameters for sampling the next token of each row. This module does not import JAX."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

HOTTEST = float(np.finfo(np.float32).max)


class Kind(NamedTuple):
    """Part of a `Sampling` that determines which program is compiled; its numbers are inputs of the program."""

    greedy: bool = True
    has_top_k: bool = False
    has_top_p: bool = False


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. The draws of a row depend only on the seed, the row's number and its length.

    Raises ValueError for invalid or contradictory values.
    """

    temperature: float = 0.0
    """Sampling temperature; 0, the default, is greedy: it takes the likeliest token."""
    top_k: int | None = None
    """Number of likeliest tokens to sample from (more if logits are equal)."""
    top_p: float | None = None
    """Probability mass to sample from: the fewest likeliest tokens that reach it."""
    seed: int = 0
    """Seed of the sampling, 0 (the default) to 2^31 - 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= HOTTEST:  # nor NaN
            raise ValueError(
                f"temperature={self.temperature} must be 0, for the likeliest token, or positive and at most "
                f"{HOTTEST:.1e}, the maximum of float32"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or unset")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1, or unset")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed} must lie in [0, 2^31)")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("temperature=0 takes the likeliest token and ignores top_k and top_p: set a temperature")

    @property
    def kind(self) -> Kind:
        """Kind of program that this sampling needs."""
        return Kind(self.temperature == 0, self.top_k is not None, self.top_p is not None)
