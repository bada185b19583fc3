"""What gives the first NaN is found by its line, in loops, branches, recomputations and backward passes, on the device
that was first; healthy programs have none."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ringformer.ops.ring_attention import ring_attention
from ringformer.parallel.nan_search import find_bad_operations

X = np.arange(1.0, 17.0, dtype=np.float32)


def mesh():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "sp"))


def search(function, *arguments, spec=P(("dp", "sp"))):
    return find_bad_operations(function, arguments, tuple(spec for _ in arguments), mesh())


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    (at,) = [i for i, line in enumerate(lines) if text in line]
    return f"test_nan_search.py:{first + at}:"


def scanned(x):
    def layer(x, w):
        safe = jnp.where(w > 0, w, 1.0)
        return x + jnp.log(w) * safe, None

    return lax.scan(layer, x, jnp.asarray([1.0, 2.0, -3.0, -4.0]))[0].sum()


def test_the_turn_of_a_loop():
    (found,) = search(scanned, X)
    assert found.operation.name == "log" and line_of(scanned, "jnp.log") in found.operation.place
    assert (
        found.turns == (2,) and line_of(scanned, "lax.scan") in str(found) and "index 2 of 4 of the loop" in str(found)
    )


def backwards(x):
    @jax.checkpoint
    def layer(x, w):
        return jnp.sqrt(x * w)

    return lax.scan(lambda x, w: (layer(x, w), None), x, jnp.asarray([1.0, 0.0, 1.0]))[0].sum()


def test_a_backward_pass_counts_its_loop_as_the_forward_does():
    """The root of 0 is finite; its gradient is not, first in the last layer."""
    first = search(jax.grad(backwards), X)[0]
    assert "backward" in str(first) and line_of(backwards, "jnp.sqrt") in str(first)
    assert "index 2 of 3 of the loop" in str(first)


def branching(x):
    def bad(x):
        return x / (x - x)

    def turn(carried):
        i, x = carried
        return i + 1, lax.cond((x[0] > 8.0) & (i == 3), bad, lambda x: x + 0.0, x)

    return lax.while_loop(lambda carried: carried[0] < 5, turn, (lax.axis_index("sp") * 0, x))[1]


def test_a_branch_that_one_half_of_the_devices_takes():
    first = search(branching, X)[0]
    assert first.operation.name == "div" and line_of(branching, "x / (x - x)") in first.operation.place
    assert (first.device, first.turns) == (2, (3,)), "x[0] is 9 there"


def overflows(x):
    big = jnp.exp(x * 8.0)
    return jnp.sum(big - big)


def test_an_overflow_comes_before_its_nan():
    found = search(overflows, X)
    assert [f.operation.name for f in found] == ["exp", "sub"]
    assert [f.kind for f in found] == ["an infinity", "NaN"] and found[0].device == 2, "exp(89)"


def test_infinities_that_are_given_are_nobodys_fault():
    assert search(lambda x: jnp.max(jnp.where(x > 3, x, -jnp.inf)) + jnp.exp(jnp.full(3, -jnp.inf)).sum(), X) == []


@pytest.mark.slow
def test_healthy_ring_attention_has_none_and_a_bad_query_is_seen_where_it_is():
    """Forward and backward, with rows that see no key of a block."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 32, 2, 4)).astype(np.float32) for _ in range(3))
    attention = partial(ring_attention, axis_name="sp", layout="zigzag", q_chunk=8, k_chunk=8)
    gradient = jax.grad(lambda q, k, v: attention(q, k, v).sum(), argnums=(0, 1, 2))
    assert search(gradient, q, k, v, spec=P(None, "sp")) == []
    q[0, 20] = 3e38
    first = search(gradient, q, k, v, spec=P(None, "sp"))[0]
    assert "blockwise_attention.py" in first.operation.place and first.device % 2 == 1
