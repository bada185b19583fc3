"""Rounding to bfloat16 by chance: its mean is the number, it depends on number and step alone, and small changes add
up that rounding to nearest loses."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.runs.config import OptimizerConfig
from ringformer.train.optimizer import make_optimizer
from ringformer.train.stochastic_rounding import round_stochastically, rounding_key

STEPS = 4096


def of_steps(x: np.ndarray, steps: int = STEPS, purpose: int = 1) -> np.ndarray:
    """The roundings of x in so many steps, float64 [steps, ...]."""

    def rounded(step):
        return round_stochastically(jnp.asarray(x, jnp.float32), rounding_key(step, purpose)).astype(jnp.float32)

    return np.asarray(jax.jit(jax.vmap(rounded))(jnp.arange(steps)), np.float64)


def last_digit(x: np.ndarray) -> np.ndarray:
    """The distance of two neighbours in bfloat16."""
    return 2.0 ** (np.floor(np.log2(np.abs(x))) - 7)


def test_the_mean_of_many_steps_is_the_number():
    """To five standard errors, for numbers of all sizes and signs, and one number at many places."""
    x = np.random.default_rng(0).standard_normal(256).astype(np.float32) * np.float32(10.0) ** np.arange(-16, 16, 0.125)
    x = np.append(x, np.full(16, 1.003)).astype(np.float32)
    digit = last_digit(x)
    found = of_steps(x)
    assert np.all(np.abs(found - x) < digit), "one of two neighbours"
    share_up = (x / digit) % 1
    error = (found.mean(0) - x) / digit
    assert np.all(np.abs(error) <= 5 * np.sqrt(share_up * (1 - share_up) / STEPS) + 1e-6)


def test_numbers_of_a_step_are_rounded_independently():
    """Their mean error is that of independent roundings, not of one chance for all."""
    x = np.random.default_rng(1).uniform(1, 2, 4096).astype(np.float32)
    errors = of_steps(x, 256) - x
    together = errors.mean(1).std() * np.sqrt(x.size) / errors.std()
    assert 0.8 < together < 1.2
    first, second = of_steps(x, 64, purpose=1), of_steps(x, 64, purpose=2)
    assert abs(np.corrcoef((first - x).ravel(), (second - x).ravel())[0, 1]) < 0.01


def test_what_bfloat16_has_and_what_is_not_finite_stays():
    kept = np.array([0.0, -0.0, 1.0, -2.5, 3e38, 1e-40, np.inf, -np.inf, np.nan], np.float32)
    kept = np.asarray(jnp.asarray(kept, jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(of_steps(kept, 8).astype(np.float32), np.tile(kept, (8, 1)))


def test_small_changes_add_up():
    """A second moment that decays by a thousandth a step: rounded to nearest, it stands still."""

    runs = 512

    def decayed(rounded):
        def of_run(run):
            first = 3000 * run

            def step(i, v):
                return rounded(0.999 * v.astype(jnp.float32), first + i)

            return jax.lax.fori_loop(0, 3000, step, jnp.bfloat16(1))

        return jax.jit(jax.vmap(of_run))(jnp.arange(runs))

    nearest = decayed(lambda v, i: v.astype(jnp.bfloat16))
    by_chance = decayed(lambda v, i: round_stochastically(v, rounding_key(i, 1)))
    assert np.all(np.asarray(nearest, np.float32) > 0.9)
    assert np.mean(np.asarray(by_chance, np.float32)) == pytest.approx(0.999**3000, rel=0.03)


@pytest.mark.parametrize("dtypes", ["bfloat16", "bfloat16,float32", "float32,bfloat16"])
def test_the_state_has_the_dtypes_that_were_chosen(dtypes):
    config = OptimizerConfig(moment_dtype=dtypes, warmup_steps=0)
    optimizer = make_optimizer(config, 100, {"w": "DF", "norm": "D"})
    params = {"w": jnp.ones((8, 4)), "norm": jnp.ones(8)}
    state = optimizer.init(params)
    for step in range(3):
        grads = jax.tree.map(lambda x, step=step: 0.1 * x + step, params)
        updates, state = optimizer.update(grads, state, params)
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(updates))
    first, second = config.moment_dtypes
    assert {str(x.dtype) for x in jax.tree.leaves(state[0].mu)} == {first}
    assert {str(x.dtype) for x in jax.tree.leaves(state[0].nu)} == {second}


def test_float32_moments_are_those_of_optax():
    plain = make_optimizer(OptimizerConfig(), 100, {"w": "DF"})
    same = make_optimizer(replace(OptimizerConfig(), moment_dtype="float32,float32"), 100, {"w": "DF"})
    params = {"w": jnp.ones((8, 4))}
    assert jax.tree.structure(plain.init(params)) == jax.tree.structure(same.init(params))


@pytest.mark.parametrize("dtype", ["", "float16", "bfloat16,", "float32,bfloat16,float32", "int8,float32"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=r"optimizer.moment_dtype=.* must be float32 or bfloat16"):
        OptimizerConfig(moment_dtype=dtype)
