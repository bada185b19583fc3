"""The kernels inside a ring, compiled for TPU under `check_vma`: what stands between the hops."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ringformer.estimate.compiled.program_text import Program, kernel_cost
from ringformer.estimate.seconds.kernel_keys import KernelKeys
from ringformer.estimate.seconds.machine_code import grid_of
from ringformer.estimate.workloads.targets import find_target, only_compilers
from ringformer.ops.ring_attention import ring_attention
from ringformer.parallel.compiler_options import compiler_options
from ringformer.parallel.mesh import make_mesh
from tests.hlo import on_tpu

B, T, G, d, N = 1, 1024, 2, 128, 8
ALL_HEADS, HALVES = 2, 4
"""Key heads: so few that the kernel computes all at once, and so many that half of them wait for their gradients."""


@pytest.fixture(scope="module", params=[(False, ALL_HEADS), (True, HALVES)], ids=["plain", "packed"])
def compiled(request):
    """Forward and backward of zigzag attention on eight chips, and its key heads."""
    packed, K = request.param
    return compiled_ring(packed, K), K


def compiled_ring(packed, K, ring="one_way"):
    only_compilers()
    mesh, rows = make_mesh(f"1,1,1,{N}", find_target("v5e-8").devices()), PartitionSpec(None, "sp")

    def both(q, k, v, ids, do):
        attend = partial(
            ring_attention, axis_name="sp", layout="zigzag", q_chunk=256, k_chunk=256, kernel="pallas", ring=ring
        )
        o, pull = jax.vjp(partial(attend, segment_ids=ids), q, k, v)
        return o, pull(do)

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, rows))

    q, k = array(jnp.bfloat16, B, N * T, G * K, d), array(jnp.bfloat16, B, N * T, K, d)
    ids = array(jnp.int32, B, N * T) if packed else None
    sharded = jax.shard_map(both, mesh=mesh, in_specs=(rows,) * 5, out_specs=(rows, (rows,) * 3))
    compiled = jax.jit(sharded).lower(q, k, k, ids, q).compile(compiler_options=dict(compiler_options(mesh)))
    return Program.parse(compiled.as_text())


@pytest.fixture(scope="module")
def program(compiled):
    return compiled[0]


def kernels(program):
    """Every kernel of ours: how often it is executed, and its instruction."""
    return [
        (times, i)
        for name, times in program.executed.items()
        for i in program.computations[name].values()
        if i.opcode == "custom-call" and grid_of(i.name)
    ]


@pytest.mark.usual("plain")
@on_tpu
def test_a_hop_is_a_kernel(compiled):
    """n forward and n backward, or two halves of each, which name their work: of a causal ring with four chunks a
    shard, 10 pairs of the own block (4 of them masked) and 8 of each visiting one, for each key head."""
    program, key_heads = compiled
    found = kernels(program)
    for kind in ("forward", "backward"):
        halves = 2 if (kind, key_heads) == ("backward", HALVES) else 1
        K, n = key_heads // halves, N * halves
        mine = [(times, grid_of(i.name)) for times, i in found if f"flash_{kind}" in i.name]
        assert sum(times for times, _ in mine) == n
        assert sum(times for times, grid in mine if grid[:2] == (K * 6, K * 4)) == halves
        assert sum(times for times, grid in mine if grid[:2] == (K * 8, 0)) == n - halves


@pytest.mark.slow
@on_tpu
def test_a_kernel_says_its_products(program):
    """4 d a pair of a query and a key forward, 10 d backward, of each query head."""
    for _, kernel in kernels(program):
        grid, products = grid_of(kernel.name), 4 if "forward" in kernel.name else 10
        cost = kernel_cost(kernel)
        assert cost.flops == (grid.whole + grid.masked) * products * G * 256 * 256 * d
        assert cost.hbm_bytes > 0


@pytest.mark.slow
@on_tpu
def test_equal_kernels_have_one_key_and_others_another(program):
    found = {}
    for name in program.executed:
        for i in program.computations[name].values():
            if i.opcode == "custom-call" and grid_of(i.name):
                found.setdefault((i.name.rpartition(".")[0].strip("_"), i.type.split("{")[0]), set()).add(
                    KernelKeys(program).key(name, i)
                )
    assert len(found) >= 4 and all(len(keys) == 1 for keys in found.values())
    assert len(set.union(*found.values())) >= 4


@on_tpu
def test_every_hop_travels_under_a_kernel(compiled):
    """In the loops over hops each permute begins before a kernel and is waited for after it."""
    (program, key_heads), loops = compiled, []
    for name in program.executed:
        order = [i for i in program.computations[name].values()]
        starts = {i.name: n for n, i in enumerate(order) if i.opcode == "collective-permute-start"}
        hops = [(starts[i.operands[0]], n) for n, i in enumerate(order) if i.opcode == "collective-permute-done"]
        calls = [n for n, i in enumerate(order) if i.opcode == "custom-call" and grid_of(i.name)]
        if name != program.entry and calls and starts:
            loops.append(len(calls))
            assert all(any(start < call < done for call in calls) for start, done in hops)
    assert sorted(loops) == ([2, 4] if key_heads == HALVES else [2, 2])  # two hops a turn


@pytest.mark.slow
@on_tpu
def test_both_directions_of_the_links_are_in_use_at_once():
    """In every turn of both loops, keys of both directions are open under one kernel; so are gradients backward."""
    program = compiled_ring(True, HALVES, "both_ways")
    forward, backward = set(), set()
    for name, times in program.executed.items():
        order, travelling = list(program.computations[name].values()), {}
        found = backward if any("backward" in i.name for i in order if grid_of(i.name)) else forward
        for i in order if times > 1 and name != program.entry else []:
            if i.opcode == "collective-permute-start":
                direction = "next" if "source_target_pairs={{0,1}" in i.text else "previous"
                travelling[i.name] = direction, i.arrays[0].dtype
            elif i.opcode == "collective-permute-done":
                travelling.pop(i.operands[0])
            elif i.opcode == "custom-call" and grid_of(i.name):
                found.add(frozenset(travelling.values()))
    keys = {("next", "bf16"), ("previous", "bf16")}
    assert len(forward) == 1 and keys <= min(forward)
    assert any(keys <= open_ for open_ in backward)
    assert {direction for open_ in backward for direction, dtype in open_ if dtype == "f32"} == {"next", "previous"}


@pytest.mark.slow
@on_tpu
def test_gathered_keys_of_half_of_the_heads_are_one_kernel():
    """The own block, and one kernel of all other ranks' keys; gradients are summed by a float32 reduce-scatter."""
    program = compiled_ring(True, HALVES, "gathered")
    found = sorted(grid_of(i.name)[:2] for _, i in kernels(program))
    assert found == [(HALVES * 3, HALVES * 2)] * 4 + [(HALVES * 4 * (N - 1), 0)] * 4
    text = [i.text for name in program.executed for i in program.computations[name].values()]
    assert not any("collective-permute" in line for line in text)
    assert any(f"f32[2,{B},{HALVES // 2},{T},{d}]" in line and "reduce-scatter" in line for line in text)


@on_tpu
def test_no_turn_of_a_loop_copies_keys_or_gradients(compiled):
    """Arrays that travel alternate between two buffers, and gradients are added in place."""
    program, key_heads = compiled
    for name, times in program.executed.items():
        if times > 1 and name != program.entry and key_heads == HALVES:
            moved = [i for i in program.computations[name].values() if i.opcode in ("copy", "broadcast", "fusion")]
            assert not [i.text for i in moved if i.type.startswith(("bf16[2,", "f32[2,", f"(f32[{B},"))]
