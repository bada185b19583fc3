"""Rotary phases: against exact integer arithmetic, and against float32 where that is good."""

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.ops.tokenwise import rope
from tests.helpers import normal, relative_error

THETAS = [1e4, 5e5, 5e7, 1.06e9]


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("position", [0, 1, 2**20, 2**24, 2**27 + 12345, 2**31 - 2])
def test_phase_is_exact_at_any_position(theta, position):
    """Within two units of 2^-32 turns of the rational product, at 16M tokens and beyond."""
    frequencies = rope.frequencies(128, theta)
    positions = jnp.arange(position, position + 2, dtype=jnp.int32)
    phases = np.asarray(rope.phases(positions, frequencies)).astype(object)
    turns = [Fraction(float(f / (2 * np.pi))) for f in frequencies]
    for i in range(2):
        exact = [int((position + i) * t * 2**32) % 2**32 for t in turns]
        distance = [min((a - b) % 2**32, (b - a) % 2**32) for a, b in zip(phases[i], exact, strict=True)]
        assert max(distance) <= 2


@pytest.mark.parametrize("theta", THETAS[:3])
def test_neighbours_at_16m_tokens_are_distinct_and_evenly_apart(theta):
    """What float32 angles lose: every neighbour's phase differs, by the same step as at position 0."""
    start, n = 2**24, 4096
    frequencies = rope.frequencies(128, theta)
    far = np.asarray(rope.phases(jnp.arange(start, start + n, dtype=jnp.int32), frequencies)).astype(np.int64)
    near = np.asarray(rope.phases(jnp.arange(n, dtype=jnp.int32), frequencies)).astype(np.int64)
    steps_far, steps_near = np.diff(far, axis=0) % 2**32, np.diff(near, axis=0) % 2**32
    assert (steps_far > 0).all()
    assert np.abs(steps_far - steps_near).max() <= 1
    for column in range(far.shape[1]):
        assert len(np.unique(far[:, column])) == n
    float32_angles = (start + np.arange(n)).astype(np.float32) * frequencies[-1].astype(np.float32)
    assert len(np.unique(float32_angles)) < 0.6 * n  # the fault this is about


def test_rotations_agree_with_float32_where_that_is_good():
    frequencies = rope.frequencies(64, 1e4)
    positions = np.arange(512)
    cos, sin = rope.rotations(jnp.asarray(positions, jnp.int32), frequencies)
    angles = positions[:, None] * frequencies
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-6)


@pytest.mark.parametrize("offset", [0, 2**24])
def test_scores_depend_on_relative_position_alone(offset):
    q, k = jnp.asarray(normal(0, 1, 8, 2, 64)), jnp.asarray(normal(1, 1, 8, 2, 64))
    frequencies = rope.frequencies(64, 5e5)

    def scores(start):
        rotation = rope.rotations(start + jnp.arange(8, dtype=jnp.int32)[None], frequencies)
        return jnp.einsum("bthd,bshd->bhts", rope.rotate(q, rotation), rope.rotate(k, rotation))

    assert relative_error(scores(offset), scores(77)) < 2e-6


def test_rotation_pairs_are_half_a_head_apart():
    """Position 1, frequency 1 turns features 0 and d/2 by one radian."""
    x = jnp.zeros((1, 1, 1, 4)).at[..., 0].set(1.0)
    y = rope.rotate(x, rope.rotations(jnp.ones((1, 1), jnp.int32), rope.frequencies(4, 1e4)))
    np.testing.assert_allclose(y[0, 0, 0], [np.cos(1), 0, np.sin(1), 0], atol=1e-6)


def test_positions_that_are_no_integers_are_refused(as_for_users):
    """A float32 position is rounded above 16M, and its fraction would be cut off."""
    with pytest.raises(ValueError, match="must be int32; got float32"):
        rope.rotations(jnp.arange(4.0), rope.frequencies(8, 1e4))
