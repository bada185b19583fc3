"""Slices that the network between their hosts joins: their targets, what crosses that network, and what it takes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringformer.estimate.choices.candidates import meshes
from ringformer.estimate.closed_forms.communication import exposed_seconds
from ringformer.estimate.compiled.program_text import Program
from ringformer.estimate.reports.run_estimate import RunCompiler
from ringformer.estimate.search.plan import plan
from ringformer.estimate.seconds.link_loads import in_first_slice, network
from ringformer.estimate.seconds.transfers import ACROSS_SLICES, sums_across_slices
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import preset_workload
from ringformer.parallel.device_order import max_link_hops
from ringformer.parallel.mesh import make_mesh
from tests.hlo import on_tpu


def test_a_target_of_joined_slices_is_so_many_of_one():
    one, two = find_target("v5e-256"), find_target("2xv5e-256")
    assert (two.num_devices, two.slices, two.sides, two.topology) == (512, 2, one.sides, one.topology)
    assert find_target("4xv5p-128").num_devices == 4 * 64
    assert find_target("2xv5e:4x8").num_devices == 64


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("1xv5e-256", "is one slice: write v5e-256"),
        ("2xv4-512", "no rate of the network between TPU v4 hosts is published"),
        ("2xv5e-300", "unknown slice 'v5e-300'"),
        ("0xv5e-256", "size of 0"),
    ],
)
def test_other_joined_slices_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        find_target(name)


def test_a_mesh_must_have_whole_copies_in_each_slice():
    workload = preset_workload("llama_7b", find_target("2xv5e-256"), 2**17)
    assert workload.mesh_shape == (2, 1, 1, 256) and workload.batch_size == 2
    with pytest.raises(ValueError, match="dp=1 is not a multiple of the 2 slices"):
        replace(workload, mesh_dim="1,1,1,512").check()
    assert all(mesh.mesh_shape[0] == 2 for mesh in meshes(workload))


def test_a_plan_has_whole_sequences_in_each_slice():
    goal = replace(preset_workload("llama_7b", find_target("2xv5e-256"), 2**17), batch_size=3)
    with pytest.raises(ValueError, match="batch_size=3 is not a multiple of the 2 slices of 2xv5e-256"):
        plan(goal, RunCompiler(print, generate_code=False))


def test_shards_of_gradients_cross_once():
    """By closed form: two slices send a shard each, four almost twice as much, one nothing."""

    def seconds(target: str, dp: int) -> float:
        workload = preset_workload("llama3_8b", find_target(target), 2**16)
        return exposed_seconds(replace(workload, mesh_dim=f"{dp},1,1,64", batch_size=dp))["slices"]

    shard = 4 * preset_workload("llama3_8b", find_target("v5p-128"), 2**16).trained_params / 64
    assert seconds("v5p-128", 1) == 0
    assert seconds("2xv5p-128", 2) == pytest.approx(shard / 6.25e9)
    assert seconds("4xv5p-128", 4) == pytest.approx(1.5 * shard / 6.25e9)


@on_tpu
@pytest.mark.parametrize("slices", [2, 4])
def test_the_compilers_sums_across_slices_are_read(slices):
    """A ring in each slice, and a sum over dp: the ring's hops stay on links of one slice, the sum is not 0 bytes."""
    target = find_target(f"{slices}xv5e:2x2")
    mesh = make_mesh(f"{slices},1,1,4", target.devices())
    assert max_link_hops(mesh) == 1
    links = network(target, mesh)
    assert (links.slices, len(links.places), links.slice_bandwidth) == (slices, 4, 3.125e9)

    def step(x):
        hopped = lax.ppermute(x, "sp", [(i, (i + 1) % 4) for i in range(4)])
        return lax.psum(jnp.tanh(hopped), "dp")

    sharded = jax.shard_map(step, mesh=mesh, in_specs=P(("dp", "sp")), out_specs=P("sp"))
    x = jax.ShapeDtypeStruct((slices * 4 * 256, 512), jnp.float32, sharding=NamedSharding(mesh, P(("dp", "sp"))))
    program = Program.parse(jax.jit(sharded).lower(x).compile().as_text())
    sums = []
    instructions = []
    for here in program.computations.values():
        sums += sums_across_slices(here, slices)
        instructions += here.values()
    assert [span.kind for span in sums] == [ACROSS_SLICES]
    assert sums[0].bytes == pytest.approx(2 * (slices - 1) / slices * 256 * 512 * 4, rel=0.01)
    assert sums[0].end is not None, "it has an end that waits for it"
    hop = next(x for x in instructions if x.collective == "collective-permute")
    pairs = in_first_slice(links, hop.groups)
    assert sorted(pairs) == [(0, 1), (1, 2), (2, 3), (3, 0)]
