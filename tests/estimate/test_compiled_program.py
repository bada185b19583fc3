"""What a compiled program executes: loops multiplied out, FLOPs counted as the mathematics has them."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ringformer.estimate.compiled_program import Program
from tests.helpers import ring_mesh
from tests.hlo import executed_collectives


def test_the_reader_multiplies_by_trip_counts():
    """A permute before a loop of five, and one of two inside each of its rounds: 1 + 5 x 2."""

    def run(x):
        hop = lambda _, x: jax.lax.ppermute(jnp.sin(x), "sp", [(0, 1), (1, 0)])  # noqa: E731
        return jax.lax.fori_loop(0, 5, lambda _, x: jax.lax.fori_loop(0, 2, hop, x), hop(0, x))

    program = jax.jit(jax.shard_map(run, mesh=ring_mesh(2), in_specs=P("sp"), out_specs=P("sp")))
    (found,) = executed_collectives(program.lower(jnp.zeros((2, 64))).compile().as_text()).items()
    assert (found[0].kind, found[0].dtype, found[1]) == ("collective-permute", "f32", 11)


def flops(function, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = Program.parse(jax.jit(function).lower(*arrays).compile().as_text())
    return program.flops(program.entry)


def test_flops_of_matmuls_in_loops():
    """2 m n k for a product, times the batch, times the rounds of a loop."""
    assert flops(lambda a, b: a @ b, (64, 32), (32, 16)) == 2 * 64 * 32 * 16
    assert flops(lambda a, b: jnp.einsum("bmk,bkn->bmn", a, b), (5, 64, 32), (5, 32, 16)) == 5 * 2 * 64 * 32 * 16
    assert flops(lambda a, b: jax.lax.scan(lambda a, b: (a @ b, None), a, b)[0], (64, 64), (7, 64, 64)) == 7 * 2 * 64**3
