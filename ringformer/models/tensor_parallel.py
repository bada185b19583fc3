"""Tensor parallelism with a residual stream that is sharded along the sequence (Megatron's sequence parallelism,
Korthikanti et al., 2205.05198, section 4.2)."""

from typing import Any

from jax import lax

from ringformer.models.interface import Axes


def enter_tp(x: Any, axes: Axes) -> Any:
    """Gather the residual stream, sharded along the sequence over tp, to its full local length (Megatron's g-bar)."""
    return x if axes.tp is None else lax.all_gather(x, axes.tp, axis=1, tiled=True)


def leave_tp(x: Any, axes: Axes) -> Any:
    """Sum the tp ranks' partial results, and shard the sum along the sequence again."""
    return x if axes.tp is None else lax.psum_scatter(x, axes.tp, scatter_dimension=1, tiled=True)
