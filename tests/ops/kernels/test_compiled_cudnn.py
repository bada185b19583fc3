"""The ring with cuDNN's calls, compiled for GPUs that are not here: which calls, how often, and what is around them."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ringformer.estimate.compiled.program_text import Array, Program
from ringformer.estimate.seconds.memory_traffic import hbm_bytes
from ringformer.estimate.seconds.program_seconds import host_waits
from ringformer.estimate.workloads.programs import WITHOUT_DEVICES
from ringformer.estimate.workloads.targets import find_target
from ringformer.ops.ring_attention import ring_attention
from ringformer.parallel.compiler_options import COMPILER_OPTIONS
from tests.hlo import on_cuda

B, T, H, K, d = 1, 1024, 8, 2, 128

pytestmark = on_cuda


def compiled(target, layout, T=T, packed=False, window=None) -> Program:
    """Forward and backward of one ring over a target, T tokens a rank."""
    mesh = Mesh(np.array(find_target(target).devices()), ("sp",))
    spec = P(None, "sp")

    def both(q, k, v, do, ids):
        options = dict(segment_ids=ids, segments="ascending") if packed else {}
        attention = partial(ring_attention, axis_name="sp", layout=layout, kernel="cudnn", window=window, **options)
        o, pull = jax.vjp(attention, q, k, v)
        return o, *pull(do)

    def array(*of_token, dtype=jnp.bfloat16):
        shape = B, T * mesh.size, *of_token
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    sharded = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=(spec,) * 4))
    options = COMPILER_OPTIONS["gpu"] | WITHOUT_DEVICES["gpu"]
    lowered = sharded.lower(array(H, d), array(K, d), array(K, d), array(H, d), array(dtype=jnp.int32))
    return Program.parse(lowered.compile(compiler_options=options).as_text())


def executed(program):
    """`(computation, instruction, how often it runs)`"""
    return [(name, i, times) for name, times in program.executed.items() for i in program.computations[name].values()]


def calls(program) -> dict[tuple, float]:
    """How often each call runs, by kind, mask, and the lengths of its queries and keys."""
    counts: dict[tuple, float] = {}
    for name, call, times in executed(program):
        if "__cudnn$" not in call.text:
            continue
        q, k = (program.computations[name][x].arrays[0].shape for x in call.operands[:2])
        mask = re.search(r'"mask_type":\s*"(\w+)"', call.text)[1]
        causal = mask == "CAUSAL"
        assert len(call.operands) == (6 if "Backward" in call.text else 3) + 2 * (mask == "PADDING")
        kind = "backward" if "Backward" in call.text else "forward"
        assert {a.dtype for a in call.arrays} <= {"bf16", "f32", "u8"}
        counts[kind, causal, q[1], k[1]] = counts.get((kind, causal, q[1], k[1]), 0) + times
    return counts


@pytest.mark.parametrize("target", ["8xH100", "8xA100-80"])
def test_zigzag(target):
    """One causal call of the own block, two of halves for each of n - 1 visiting ones; no branch; float32 sums."""
    program, n = compiled(target, "zigzag"), 8
    each = {("forward", False, T // 2, T // 2): 2 * (n - 1), ("forward", True, T, T): 1}
    assert calls(program) == each | {("backward", *key[1:]): count for key, count in each.items()}
    pairs = n * T * n * T / 2 / n  # of a rank
    assert program.flops(program.entry) == pytest.approx((4 + 10) * B * H * d * pairs)
    assert host_waits(program) == {}
    rows, keys = Array("f32", (B, K, H // K, T, d)), Array("f32", (B, K, T, d))
    forward, backward = (i.arrays for _, i, _ in executed(program) if i.opcode == "while")
    assert rows in forward and rows in backward and backward.count(keys) == 2  # o; dq, dk and dv


def test_no_large_array_is_copied_to_another_layout():
    """Queries, keys and outputs lie in memory as the calls take them: of copies and transposes there are only those of
    keys before a permute."""
    program = compiled("1xH100", "zigzag")
    copied = [
        i
        for name, i, _ in executed(program)
        if i.opcode in ("copy", "transpose") and hbm_bytes(program, name, i) > B * T * H * d
    ]
    assert copied == []
    assert calls(program) == {("forward", True, T, T): 1, ("backward", True, T, T): 1}


def test_striped_without_a_branch():
    program = compiled("4xH100", "striped")
    assert calls(program) == {("forward", True, T, T): 4, ("backward", True, T, T): 4}
    assert host_waits(program) == {}


def test_contiguous_waits_for_its_branches_alone():
    """A block of a later rank is nothing: its call stands in a loop of at most one turn."""
    program = compiled("4xH100", "contiguous")
    each = {("forward", True, T, T): 1, ("forward", False, T, T): 3}
    assert calls(program) == each | {("backward", *key[1:]): count for key, count in each.items()}
    assert sum(host_waits(program).values()) == 2 * 2 * 3


@pytest.mark.parametrize("target", ["8xH100", "8xA100-80"])
def test_windows(target):
    """Each part within its window, and its first queries with the last keys of the part before: no loop, no branch, and
    the pairs of the window alone."""
    W = 257
    program = compiled(target, "zigzag", window=W)
    each = {("forward", True, T // 2, T // 2): 2, ("forward", True, 256, 256): 2}
    assert calls(program) == each | {("backward", *key[1:]): count for key, count in each.items()}
    assert host_waits(program) == {}
    pairs = T * W  # of a rank: of its two parts, the windows of the first queries lie partly in the part before
    assert program.flops(program.entry) == pytest.approx((4 + 10) * B * H * d * pairs, rel=1e-2)


@pytest.mark.parametrize("target", ["8xH100", "8xA100-80"])
def test_packed_documents(target):
    """A level of the own shard is one call, and nothing waits for the host. Counted as one document, the pairs are
    those of a causal sequence, and half of each chunk pair on the diagonal."""
    T, n = 8192, 8
    program = compiled(target, "zigzag", T, packed=True)
    each = {("forward", False, T // 2, T // 2): 2 * (n - 1) + 1}
    each |= {("forward", False, T >> level, T >> level): 1 for level in (2, 3)}
    assert calls(program) == each | {("backward", *key[1:]): count for key, count in each.items()}
    assert host_waits(program) == {}
    pairs = n * T * T / 2 + T * 512 / 2  # of a rank; chunks of 512 on the diagonal are computed whole
    assert program.flops(program.entry) == pytest.approx((4 + 10) * B * H * d * pairs, rel=1e-3)
