"""What a compiled program executes: loops multiplied out, FLOPs counted as the mathematics has them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from ringformer.estimate.compiled.program_text import Program
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


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%sum", ((0, 1), (2, 3))),
        ("all-to-all(%x), replica_groups=[2,2]<=[4], dimensions={0}", ((0, 1), (2, 3))),
        ("all-to-all(%x), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", ((0, 2), (1, 3))),
        ("all-reduce(%x), replica_groups={}, to_apply=%sum", ()),
        ("collective-permute(%x), source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
    ],
)
def test_groups_of_a_collective(text, groups):
    program = Program.parse(
        f"ENTRY %main (x: f32[2]) -> f32[2] {{\n  %x = f32[2] parameter(0)\n  %c = f32[2] {text}\n}}\n"
    )
    assert program.computations["main"]["c"].groups == groups


def test_flops_of_matmuls_in_loops():
    """2 m n k for a product, times the batch, times the rounds of a loop."""
    assert flops(lambda a, b: a @ b, (64, 32), (32, 16)) == 2 * 64 * 32 * 16
    assert flops(lambda a, b: jnp.einsum("bmk,bkn->bmn", a, b), (5, 64, 32), (5, 32, 16)) == 5 * 2 * 64 * 32 * 16
    assert flops(lambda a, b: jax.lax.scan(lambda a, b: (a @ b, None), a, b)[0], (64, 64), (7, 64, 64)) == 7 * 2 * 64**3


CUDNN = """
ENTRY %main (q: bf16[2,64,8,16], k: bf16[2,96,2,16], l: f32[2,8,64]) -> bf16[2,8,64,16] {
  %q = bf16[2,64,8,16]{3,2,1,0} parameter(0)
  %k = bf16[2,96,2,16]{3,2,1,0} parameter(1)
  %l = f32[2,8,64]{2,1,0} parameter(2)
  ROOT %c = (bf16[2,8,64,16]{3,1,2,0}, u8[100]{0}) custom-call(OPERANDS), TARGET, CONFIG
}
"""


def test_flops_of_cudnn_s_attention():
    """2 B H T S d for each of two products forward and of five backward; of a causal call half."""
    all_ = 2 * 2 * 8 * 64 * 96 * 16

    def flops_of(kind, operands, mask):
        target, config = f'custom_call_target="__cudnn$fmhaSoftmax{kind}"', f'backend_config={{"mask_type":"{mask}"}}'
        text = CUDNN.replace("OPERANDS", operands).replace("TARGET", target).replace("CONFIG", config)
        program = Program.parse(text)
        return program.flops(program.entry)

    assert flops_of("", "%q, %k, %k", "NO_MASK") == 2 * all_
    assert flops_of("", "%q, %k, %k", "CAUSAL") == all_
    assert flops_of("Backward", "%q, %k, %k, %l, %q, /*index=5*/%q", "NO_MASK") == 5 * all_
    assert flops_of("Backward", "%q, %k, %k, %l, %q, /*index=5*/%q", "CAUSAL") == 2.5 * all_


def test_the_bound_of_a_loop_is_in_its_own_name():
    """Two loops whose trip counts depend on data, one inside the other: the matmul runs at most 3 x 5 times."""

    def run(x, a, b):
        def inner(_, x):
            return x @ x

        def outer(_, x):
            with jax.named_scope("at_most_5_trips"):
                return jax.lax.fori_loop(0, b, inner, x)

        with jax.named_scope("at_most_3_trips"):
            return jax.lax.fori_loop(0, a, outer, x)

    lowered = jax.jit(run).lower(
        *(jax.ShapeDtypeStruct(shape, t) for shape, t in (((64, 64), "f4"), ((), "i4"), ((), "i4")))
    )
    program = Program.parse(lowered.compile().as_text())
    assert program.flops(program.entry) == 3 * 5 * 2 * 64**3
