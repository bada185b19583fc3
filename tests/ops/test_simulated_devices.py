"""XLA:CPU may run a loop of permutes and another permute at once; `after` gives them an order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ringformer.ops.simulated_devices import after
from tests.helpers import ring_mesh
from tests.unordered_loops import unordered_loops

TURNS = 8
PRODUCTS = 8
"""Products in the body of the loop. XLA runs a body of few operations at once, and then nothing can overtake it."""


def _loop_beside_permutes(x, w, y, tied: bool):
    """Send x around the ring in a loop that also computes products, and y in permutes that need nothing of the loop.

    This is the smallest program that fails: without the tie, it hangs, aborts, or exchanges parts of x and y."""
    devices = lax.axis_size("sp")
    moves = [(rank, (rank + 1) % devices) for rank in range(devices)]

    def turn(_, carry):
        x, products = carry
        return lax.ppermute(x, "sp", moves), [product @ w for product in products]

    x, products = lax.fori_loop(0, TURNS, turn, (x, [x + i for i in range(PRODUCTS)]))
    y = after(y, x) if tied else y
    for _ in range(TURNS):
        y = lax.ppermute(y, "sp", moves)
    return x, sum(products), y


def _compiled(tied: bool):
    mesh = ring_mesh(4)
    sharded = jax.shard_map(
        lambda *arrays: _loop_beside_permutes(*arrays, tied),
        mesh=mesh,
        in_specs=(P("sp"), P(), P("sp")),
        out_specs=P("sp"),
    )
    x = jnp.arange(4 * 64 * 64, dtype=jnp.float32).reshape(4 * 64, 64)
    arrays = x, jnp.eye(64), x + 0.5
    return jax.jit(sharded).lower(*arrays).compile(), arrays


@pytest.mark.unordered
def test_a_loop_that_can_be_overtaken_is_found():
    compiled, _ = _compiled(tied=False)
    pairs = unordered_loops(compiled.as_text())
    assert pairs and pairs[0].loop.opcode == "while"
    assert pairs[0].collective.opcode == "collective-permute"


def test_tied_permutes_come_after_the_loop():
    compiled, (x, w, y) = _compiled(tied=True)
    assert unordered_loops(compiled.as_text()) == []
    ends = jax.device_put((x, w, y), compiled.input_shardings[0])
    for _ in range(5):
        moved_x, _, moved_y = compiled(*ends)
        np.testing.assert_array_equal(moved_x, x)  # eight hops on four devices
        np.testing.assert_array_equal(moved_y, y)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
@pytest.mark.parametrize("done", [0.0, -0.0, np.nan, np.inf, 1.1754944e-38])
def test_a_tie_changes_no_bit(dtype, done):
    x = jnp.array([0.0, -0.0, 1.5, np.nan, -np.inf]).astype(dtype)
    tied = jax.jit(after)(x, jnp.full((2, 3), done))
    assert tied.dtype == x.dtype
    assert np.asarray(tied).tobytes() == np.asarray(x).tobytes()
