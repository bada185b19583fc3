"""Parts and kinds of layers, and their order: periods of runs of equal layers, each run compiled once.

Gemma 3, 26 layers   WWWWWF WWWWWF WWWWWF WWWWWF WW   4 periods of a run of 5 and a run of 1; a run of 2
Qwen 2, 32 layers    F x 28, W x 4                     a run of 28; a run of 4
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ringformer.ops.tokenwise.rope import UNSCALED, RopeScaling


class Parts(NamedTuple):
    """Parts that the layers of a family are made of."""

    bias: bool = False
    """True if q, k and v have biases."""
    qk_norm: Literal["", "head", "width"] = ""
    """RMSNorm of queries and keys before rotation: of each head, or of all heads together."""
    norms: Literal["before", "after", "both"] = "before"
    """RMSNorm of the input of attention and feed-forward, of their output, or of both."""
    norm_offset: float = 0.0
    """Number added to the scale of each RMSNorm."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the gate of the feed-forward."""


class LayerKind(NamedTuple):
    """Properties of a kind of layers, besides the parts of their family."""

    window: int = 0
    """Keys that a query sees at most; 0: all."""
    theta: float | None = 1e4
    """Base of the rotary frequencies; None: queries and keys have no positions."""
    scaling: RopeScaling = UNSCALED

    @property
    def rope(self) -> tuple[float, RopeScaling] | None:
        """Rotary frequencies of the kind; None without."""
        return None if self.theta is None else (self.theta, self.scaling)


class Period(NamedTuple):
    """Layers that repeat: runs of equal layers, each a kind and a number of layers."""

    repeats: int
    runs: tuple[tuple[LayerKind, int], ...]

    @property
    def size(self) -> int:
        return sum(n for _, n in self.runs)


@lru_cache(maxsize=256)
def periods_of(kinds: tuple[LayerKind, ...]) -> tuple[Period, ...]:
    """Return the periods of a model's layers with the fewest runs to compile: repeated ones, then what remains."""
    best: tuple[Period, ...] = (Period(1, _runs(kinds)),)
    for size in range(1, len(kinds) // 2 + 1):
        count = 1
        while tuple(kinds[count * size : (count + 1) * size]) == tuple(kinds[:size]):
            count += 1
        cut = Period(count, _runs(kinds[:size])), Period(1, _runs(kinds[count * size :]))
        if sum(len(period.runs) for period in cut) < sum(len(period.runs) for period in best):
            best = cut
    return tuple(period for period in best if period.runs)


def _runs(kinds: Sequence[LayerKind]) -> tuple[tuple[LayerKind, int], ...]:
    return tuple((kind, len(list(equal))) for kind, equal in groupby(kinds))


def scan_periods(
    periods: Sequence[Period], run: Callable[..., Any], x: Any, layers: Any, scan: Callable[..., Any] = lax.scan
) -> tuple[Any, Any]:
    """Compute `x, kept = run(kind, x, rows, repeated)` for every run of layers in order; return the last x and all
    `kept`. `repeated` is True inside the scan over a period that repeats.

    Args:
      layers: arrays with a leading dimension for all layers; `rows` is a part of them, and so is what `run` returns.
      scan: the scan over the periods that repeat, with the signature of `lax.scan`.
    """
    if len(periods) == 1 and periods[0].repeats == 1 and len(periods[0].runs) == 1:
        return run(periods[0].runs[0][0], x, layers, False)

    def of_period(period: Period, x, rows):
        kept: list[Any] = []
        first = 0
        for kind, n in period.runs:
            part = jax.tree.map(lambda w, a=first, b=first + n: w[a:b], rows)
            x, here = run(kind, x, part, period.repeats > 1)
            first = first + n
            kept = [*kept, here]
        return x, _joined(kept)

    kept: list[Any] = []
    first = 0
    for period in periods:
        end = first + period.repeats * period.size
        rows = jax.tree.map(lambda w, a=first, b=end: w[a:b], layers)
        if period.repeats == 1:
            x, here = of_period(period, x, rows)
        else:
            rows = jax.tree.map(lambda w, p=period: w.reshape(p.repeats, p.size, *w.shape[1:]), rows)
            x, here = scan(lambda x, rows, p=period: of_period(p, x, rows), x, rows)
            here = jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:]), here)
        first = end
        kept = [*kept, here]
    return x, _joined(kept)


def _joined(kept: list[Any]) -> Any:
    return kept[0] if len(kept) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *kept)
