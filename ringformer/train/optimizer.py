"""AdamW and its schedule (optax), and the global norm of a sharded gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ringformer.ops.varying_axes import varying_axes
from ringformer.runs.config import OptimizerConfig


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the learning rate by update, from 0: linear warm-up, then cosine or constant.

    The first of `warmup` updates has the rate peak / warmup, and the last one the peak: none has a rate of 0, which
    would compute a step and train nothing.
    """
    peak = config.learning_rate
    warmup = config.warmup(steps)
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:
        after = optax.cosine_decay_schedule(peak, steps - warmup, alpha=config.final_fraction)
    if not warmup:
        return after
    rise = peak / warmup
    return optax.join_schedules([optax.linear_schedule(rise, peak + rise, warmup), after], [warmup])


def make_optimizer(config: OptimizerConfig, steps: int, letters: dict[str, Any]) -> optax.GradientTransformation:
    """Return AdamW, which works on shards because it is elementwise.

    Args:
      letters: shape letters of the parameters (`abstract_model`); weight decay applies to all parameters except
      vectors: those of one letter, and those of heads and their features alone (biases, norms over all heads).
    """
    return optax.adamw(
        schedule(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=jax.tree.map(lambda of: len(of) > 1 and not set(of) <= set("HKd"), letters),
    )


def global_norm(tree: Any) -> jax.Array:
    """Return the norm of the whole gradient, on each device.

    A leaf varies only over the axes that shard it. So a sum over these axes counts every element once, even if it is
    replicated over other axes. (optax's `global_norm` would return the norm of the local shards.)
    """
    squares: dict[frozenset[Any], jax.Array] = {}
    for leaf in jax.tree.leaves(tree):
        axes = varying_axes(leaf)
        squares[axes] = squares.get(axes, 0.0) + jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    sums = []
    for axes, square in squares.items():
        sums.append(lax.psum(square, tuple(sorted(axes))) if axes else square)
    return jnp.sqrt(sum(sums))


def clip(tree: Any, norm: jax.Array, limit: float) -> Any:
    """Scale the gradient so that its norm is at most `limit`."""
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
    return jax.tree.map(lambda g: g * scale, tree)
