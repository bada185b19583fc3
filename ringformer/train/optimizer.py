"""AdamW, Lion, Adafactor and their schedule, and the global norm of a sharded gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from ringformer.ops.host_stand_in import is_in_host
from ringformer.ops.varying_axes import varying_axes
from ringformer.parallel.host_memory import fold_rows
from ringformer.parallel.parameters import by_name
from ringformer.runs.config import OptimizerConfig
from ringformer.train.adafactor import scale_by_adafactor, sharded_matrices
from ringformer.train.matrix_layout import is_matrix
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


def make_optimizer(
    config: OptimizerConfig, steps: int, letters: dict[str, Any], weights: dict[str, Any] | None = None
) -> optax.GradientTransformation:
    """Return AdamW or Lion, which work on shards because they are elementwise, or Adafactor, which sums over shards.

    The optimizer computes the same for parameters in a nested dict and in a flat one of their names (`by_name`).

    Args:
      letters: shape letters of the parameters (`abstract_model`); weight decay applies to matrices.
      weights: `WeightSharding`s of the parameters, which Adafactor needs.
    """
    matrices = {name: is_matrix(of) for name, of in by_name(letters).items()}

    if config.name == "adafactor":
        if weights is None:
            raise ValueError("Adafactor's statistics follow the shards of the parameters: give make_optimizer weights")
        scaling = scale_by_adafactor(sharded_matrices(letters, weights))
    else:
        scaling = ELEMENTWISE[config.name](config)

    def decayed(params):
        return jax.tree.unflatten(jax.tree.structure(params), [matrices[name] for name in by_name(params)])

    return optax.chain(
        scaling,
        optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale_by_learning_rate(schedule(config, steps)),
    )


FIRST_MOMENT, SECOND_MOMENT, WEIGHTS = 1, 2, 3
"""Purposes of a step's rounding."""


def scale_by_adam(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return Adam (Kingma & Ba 2015, algorithm 1), whose state is that of optax's `scale_by_adam`.

    Its numbers are those of optax but for the last bits. Compilers round a sum of two products in one of two ways, and
    divide by a scalar or multiply by its inverse, as it suits the rest of a program. Here a sum has one product, and
    nothing is divided by a scalar, so an update has the same bits for a whole array as for a few of its rows.
    """
    first, second = config.moment_dtypes

    def init(params):
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), _zeros(params, first), _zeros(params, second))

    def update(grads, state, params=None):
        count = optax.safe_increment(state.count)
        of_first = 1 / (1 - config.b1**count)
        of_second = 1 / (1 - config.b2**count)
        squares = jax.tree.map(jnp.square, grads)
        mu = _toward(state.mu, grads, config.b1)
        nu = _toward(state.nu, squares, config.b2)
        updates = jax.tree.map(lambda m, v: of_first * m / (jnp.sqrt(of_second * v) + config.eps), mu, nu)
        mu = _kept(mu, first, rounding_key(count, FIRST_MOMENT))
        nu = _kept(nu, second, rounding_key(count, SECOND_MOMENT))
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_lion(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return Lion (Chen et al. 2023, algorithm 2), whose state is that of optax's `scale_by_lion`: one moment. Its sums
    are written as those of `scale_by_adam`."""
    dtype = config.moment_dtypes[0]

    def init(params):
        return optax.ScaleByLionState(jnp.zeros((), jnp.int32), _zeros(params, dtype))

    def update(grads, state, params=None):
        count = optax.safe_increment(state.count)
        updates = jax.tree.map(jnp.sign, _toward(state.mu, grads, config.b1))
        mu = _kept(_toward(state.mu, grads, config.b2), dtype, rounding_key(count, FIRST_MOMENT))
        return updates, optax.ScaleByLionState(count, mu)

    return optax.GradientTransformation(init, update)


ELEMENTWISE = {"adamw": scale_by_adam, "lion": scale_by_lion}
"""Elementwise optimizers by name: how each scales a gradient, before weight decay and the learning rate."""


def _zeros(params: Any, dtype: str) -> Any:
    return jax.tree.map(lambda p: jnp.zeros_like(p, dtype), params)


def _toward(moments: Any, new: Any, decay: float) -> Any:
    """Return the float32 means of moments and new numbers, of which the moments weigh `decay`."""

    def mean(moment, number):
        moment = moment.astype(jnp.float32)
        return moment + (1 - decay) * (number - moment)

    return jax.tree.map(mean, moments, new)


def _kept(moments: Any, dtype: str, key: jax.Array) -> Any:
    """Return float32 moments in the dtype that the state has."""
    if dtype == "float32":
        return moments
    return jax.tree.map(lambda x: round_stochastically(x, key), moments)


def global_norm(tree: Any) -> jax.Array:
    """Return the norm of the whole gradient, on each device.

    A leaf varies only over the axes that shard it. So a sum over these axes counts every element once, even if it is
    replicated over other axes. (optax's `global_norm` would return the norm of the local shards.)
    """
    squares: dict[frozenset[Any], jax.Array] = {}
    for leaf in jax.tree.leaves(tree):
        axes = varying_axes(leaf)
        squares[axes] = squares.get(axes, 0.0) + _sum_of_squares(leaf)
    sums = []
    for axes, square in squares.items():
        sums.append(lax.psum(square, tuple(sorted(axes))) if axes else square)
    return jnp.sqrt(sum(sums))


def _sum_of_squares(x: jax.Array) -> jax.Array:
    if is_in_host(x):
        return fold_rows(lambda total, rows: total + jnp.sum(jnp.square(rows)), jnp.float32(0), x)
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def clip_scale(norm: jax.Array, limit: float) -> jax.Array:
    """Return the factor of the gradient that makes its norm at most `limit`."""
    return jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
