"""AdamW and its schedule (optax), and the global norm of a sharded gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ringformer.ops.varying_axes import varying_axes
from ringformer.parallel.parameters import by_name
from ringformer.runs.config import OptimizerConfig
from ringformer.train.stochastic_rounding import round_stochastically, rounding_key


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

    The optimizer computes the same for parameters in a nested dict and in a flat one of their names (`by_name`).

    Args:
      letters: shape letters of the parameters (`abstract_model`); weight decay applies to matrices.
    """
    matrices = {name: is_matrix(of) for name, of in by_name(letters).items()}

    def decayed(params):
        return jax.tree.unflatten(jax.tree.structure(params), [matrices[name] for name in by_name(params)])

    adamw = optax.adamw(
        schedule(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    if set(config.moment_dtypes) == {"float32"}:
        return adamw
    return _with_narrow_moments(adamw, *config.moment_dtypes)


FIRST_MOMENT, SECOND_MOMENT = 1, 2
"""Purposes of a step's rounding."""


def _with_narrow_moments(adamw: optax.GradientTransformation, first: str, second: str) -> optax.GradientTransformation:
    """Return AdamW whose state has its moments in these dtypes. An update computes with float32 numbers and rounds them
    stochastically."""

    def narrow(moments: Any, dtype: str, purpose: int, count: jax.Array) -> Any:
        if dtype == "float32":
            return moments
        key = rounding_key(count, purpose)
        return jax.tree.map(lambda x: round_stochastically(x, key), moments)

    def narrowed(state: Any) -> Any:
        adam, *others = state
        mu = narrow(adam.mu, first, FIRST_MOMENT, adam.count)
        nu = narrow(adam.nu, second, SECOND_MOMENT, adam.count)
        return (adam._replace(mu=mu, nu=nu), *others)

    def init(params):
        return narrowed(adamw.init(params))

    def update(grads, state, params=None):
        adam, *others = state
        mu, nu = jax.tree.map(lambda x: x.astype(jnp.float32), (adam.mu, adam.nu))
        updates, state = adamw.update(grads, (adam._replace(mu=mu, nu=nu), *others), params)
        return updates, narrowed(state)

    return optax.GradientTransformation(init, update)


def is_matrix(letters: str) -> bool:
    """Return True for the shape letters of a matrix, not of a vector: vectors have one letter, or those of heads and
    their features alone (biases, norms over all heads)."""
    return len(letters) > 1 and not set(letters) <= set("HKd")


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


def clip_scale(norm: jax.Array, limit: float) -> jax.Array:
    """Return the factor of the gradient that makes its norm at most `limit`."""
    return jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
