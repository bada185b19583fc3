"""TPU slices that the network between their hosts joins, and groups of GPUs that a slower network joins: their targets,
what crosses that network, and what it takes."""

import math
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringformer.estimate.choices.candidates import meshes
from ringformer.estimate.closed_forms.communication import exposed_seconds
from ringformer.estimate.commands import add_estimate
from ringformer.estimate.compiled.program_text import Program
from ringformer.estimate.compiler.collectives import purpose
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.reports.binding_term import twice_as_large
from ringformer.estimate.reports.run_estimate import RunCompiler
from ringformer.estimate.search.commands import add_plan
from ringformer.estimate.search.plan import plan
from ringformer.estimate.seconds.link_loads import Network, in_first_slice, network
from ringformer.estimate.seconds.overlap import read_schedule
from ringformer.estimate.seconds.program_seconds import Rates
from ringformer.estimate.seconds.transfers import ACROSS_GROUPS, ACROSS_SLICES, OTHER_ACROSS_GROUPS, sums_across_slices
from ringformer.estimate.workloads import targets
from ringformer.estimate.workloads.link_rates import weights_rate
from ringformer.estimate.workloads.targets import Target, find_target, with_group_network
from ringformer.estimate.workloads.training import estimate_command, preset_workload
from ringformer.parallel.device_order import max_link_hops
from ringformer.parallel.mesh import make_mesh
from tests.hlo import on_cuda, on_tpu
from tests.verbs import run_verb


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
        ("2x2xv5e-256", "has slices twice: write one number of them, as in 2xv5e-256"),
        ("0x32xH100", "size of 0"),
        ("2x0xH100", "size of 0"),
        ("1x32xH100", "is one group: write 32xH100"),
        ("2x12xH100", "more than eight GPUs must be whole nodes of eight, e.g. 16xH100"),
        ("2x2x8xH100", "has groups of GPUs twice: write one number of them, as in 2x8xH100"),
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


def gpus(name: str = "2x8xH100", rate: float = 1.6) -> Target:
    return with_group_network(find_target(name), rate)


def test_a_target_of_groups_is_so_many_of_one():
    one, two = find_target("32xH100"), gpus("2x32xH100")
    assert (two.num_devices, two.slices, two.sides, two.slice_bandwidth) == (64, 2, one.sides, 1.6e9)
    assert twice_as_large(two) is None


@pytest.mark.parametrize(
    ("name", "rate", "message"),
    [
        ("2x8xH100", None, "needs the rate of the network between its groups: .*e.g. --group_gb_per_s=1.6"),
        ("2x8xH100", 0.0, "--group_gb_per_s=0 must be positive"),
        ("2x8xH100", -1.0, "--group_gb_per_s=-1 must be positive"),
        ("2x8xH100", math.nan, "--group_gb_per_s=nan must be positive"),
        ("2x8xH100", 100.0, "more than the 50 GB/s of a GPU inside a group: .* write --target=16xH100"),
        ("16xH100", 1.6, "needs a target of groups of GPUs, such as 2x32xH100, and 16xH100 is none"),
        ("2xv5e-256", 1.6, "needs a target of groups of GPUs, such as 2x32xH100, and 2xv5e-256 is none"),
    ],
)
def test_the_rate_between_groups_is_asked_for_and_checked(name, rate, message):
    with pytest.raises(ValueError, match=message):
        with_group_network(find_target(name), rate)


def test_a_slice_needs_no_rate():
    for name in ("2xv5e-256", "8xH100"):
        assert with_group_network(find_target(name), None) == find_target(name)


def test_the_command_of_an_estimate_has_the_rate():
    workload = preset_workload("llama3_8b", gpus(), 8192)
    assert "--target=2x8xH100" in estimate_command(workload) and "--group_gb_per_s=1.6" in estimate_command(workload)


def test_weights_are_gathered_inside_a_group():
    """Groups of one node gather over NVLink, whatever joins them."""
    of_a_node = weights_rate(preset_workload("llama3_8b", find_target("8xH100"), 8192))
    assert weights_rate(preset_workload("llama3_8b", gpus(), 8192)) == of_a_node


def test_a_mesh_must_have_whole_copies_in_each_group():
    workload = preset_workload("llama3_8b", gpus(), 8192)
    assert workload.mesh_shape == (2, 1, 1, 8) and workload.batch_size == 2
    for mesh_dim in ("1,16,1,1", "1,1,1,16"):
        with pytest.raises(ValueError, match="dp=1 is not a multiple of the 2 groups of GPUs, each"):
            replace(workload, mesh_dim=mesh_dim).check()
    assert all(mesh.mesh_shape[0] == 2 for mesh in meshes(workload))
    with pytest.raises(ValueError, match="batch_size=3 is not a multiple of the 2 groups of GPUs of 2x8xH100"):
        plan(replace(workload, batch_size=3), RunCompiler(print, generate_code=False))


def test_shards_of_gradients_cross_between_groups_at_the_rate_that_is_given():
    """By closed form: two groups send a shard each, four half as much again."""
    shard = 4 * preset_workload("llama3_8b", find_target("8xH100"), 8192).trained_params / 8
    for name, rate, sent in (("2x8xH100", 1.6, 1.0), ("2x8xH100", 3.2, 1.0), ("4x8xH100", 1.6, 1.5)):
        workload = preset_workload("llama3_8b", gpus(name, rate), 8192)
        assert exposed_seconds(workload)["slices"] == pytest.approx(sent * shard / (rate * 1e9))


TWO_PAIRS = Network(
    places=((0, 0), (0, 1)), link_bandwidth=1e9, node_bandwidth=1e8, slices=2, slice_bandwidth=float(2**10)
)
"""Two groups of two GPUs, each group a node."""
ALL_REDUCE = "f32[256] all-reduce"


@pytest.mark.parametrize(
    ("instruction", "members", "kind", "crossing"),
    [
        pytest.param(ALL_REDUCE, "{{0,2},{1,3}}", ACROSS_GROUPS, 1024, id="sum-of-pairs"),
        pytest.param(ALL_REDUCE, "[2,2]<=[2,2]T(1,0)", ACROSS_GROUPS, 1024, id="sum-of-rows"),
        pytest.param(ALL_REDUCE, "{{0,1,2,3}}", ACROSS_GROUPS, 768, id="sum-of-all"),
        pytest.param(ALL_REDUCE, "{}", ACROSS_GROUPS, 768, id="sum-of-no-list"),
        pytest.param("f32[64] reduce-scatter", "{{0,1,2,3}}", ACROSS_GROUPS, 384, id="scatter"),
        pytest.param("f32[512] all-gather", "{{0,2},{1,3}}", OTHER_ACROSS_GROUPS, 2048, id="gather"),
        pytest.param("f32[256] all-to-all", "{{0,2},{1,3}}", OTHER_ACROSS_GROUPS, 1024, id="exchange"),
        pytest.param("f32[256] collective-permute", "{{0,1},{1,2}}", OTHER_ACROSS_GROUPS, 1024, id="hop"),
        pytest.param(ALL_REDUCE, "{{0,1},{2,3}}", "all-reduce", 0, id="sum-inside"),
        pytest.param("f32[512] all-gather", "{{0,1},{2,3}}", "all-gather", 0, id="gather-inside"),
    ],
)
def test_what_leaves_a_group_takes_its_bytes_at_the_rate_between_groups(instruction, members, kind, crossing):
    """Sums of 1,024 bytes: over two GPUs, half of them is sent to be added, and half when the sum is known. Over all
    four, three quarters twice, by two GPUs of a group together. All bytes of other collectives count."""
    name = "source_target_pairs" if "permute" in instruction else "replica_groups"
    text = f"""
ENTRY %main (x: f32[256]) -> f32[256] {{
  %x = f32[256] parameter(0)
  ROOT %s = {instruction}(%x), {name}={members}
}}
"""
    schedule = read_schedule(text, Rates(1e12, TWO_PAIRS, 1e12, 0.0))
    (transfer,) = schedule.transfers
    assert transfer.kind == kind
    assert schedule.exposed_slices_seconds == pytest.approx(crossing / 2**10)
    if crossing:
        assert transfer.bytes == crossing and schedule.exposed_seconds == schedule.exposed_slices_seconds
        assert purpose(transfer) == {ACROSS_GROUPS: "summed across groups"}.get(kind, "other across groups")


def test_a_sum_across_groups_hides_under_what_is_computed_meanwhile():
    product = "%m = f32[8,8] dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    text = f"""
ENTRY %main (x: f32[256], y: f32[8,8]) -> f32[256] {{
  %x = f32[256] parameter(0)
  %y = f32[8,8] parameter(1)
  %s = f32[256] all-reduce-start(%x), replica_groups={{{{0,2}},{{1,3}}}}
  {product}
  ROOT %d = f32[256] all-reduce-done(%s)
}}
"""
    for seconds, exposed in ((2.0, 0.0), (0.25, 0.75)):
        rates = Rates(1.0, TWO_PAIRS, 1e12, 0.0)
        peak = 2 * 8**3 / rates.efficiency.products / seconds
        assert read_schedule(text, rates._replace(flops=peak)).exposed_slices_seconds == pytest.approx(exposed)


@pytest.mark.slow
@on_cuda
@pytest.mark.parametrize("mesh_dim", ["2,8,1,1", "2,1,2,4", "4,4,1,1"])
def test_the_gpu_compilers_sums_across_groups_are_read(mesh_dim):
    """Gradients are scattered inside a group, and each shard is summed across; with dp of 4, over two copies of a group
    too. Nothing else leaves a group but gradients of norms, loss and counts."""
    workload = replace(preset_workload("small", gpus(), 1024), mesh_dim=mesh_dim, batch_size=16).with_kernel()[0]
    workload.check()
    schedule = compile_apart(workload).schedule
    assert schedule is not None
    across = [t for t in schedule.transfers if t.kind == ACROSS_GROUPS]
    kinds = Counter(t.kind for t in schedule.transfers)
    assert OTHER_ACROSS_GROUPS not in kinds and {"all-gather", "reduce-scatter"} <= set(kinds)
    copies = workload.mesh_shape[0]
    shard = 4 * workload.trained_params / workload.state_shards
    sent = 2 * (copies - 1) / copies * shard / (copies // 2)
    assert sum(t.all_bytes for t in across) == pytest.approx(sent, rel=0.02)
    assert schedule.exposed_slices_seconds == pytest.approx(sent / 1.6e9, rel=0.02)
    if copies == 2:
        assert exposed_seconds(workload)["slices"] == pytest.approx(schedule.exposed_slices_seconds, rel=0.02)


@pytest.mark.parametrize("add_verb", [add_estimate, add_plan], ids=["estimate", "plan"])
def test_commands_take_the_rate_between_groups(add_verb, monkeypatch, capsys):
    """Without a compiler: a plan's step waits as much longer as the rate is smaller, an estimate names the seconds."""
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    options = ["--model=llama3_8b", "--target=2x8xH100", "--seq_len=65536"]
    with pytest.raises(ValueError, match="needs the rate of the network between its groups"):
        run_verb(add_verb, *options)
    shard = 4 * preset_workload("llama3_8b", gpus(), 2**16).trained_params / 8
    steps = []
    for rate in (1.6, 0.4):
        assert run_verb(add_verb, *options, f"--group_gb_per_s={rate}") == 0
        said = capsys.readouterr().out
        steps.append(float(said.partition("; modelled ")[2].partition(" s per step")[0] or 0))
        seconds = f"{shard / (rate * 1e9):.3g} s a step for sums of gradients across groups of GPUs"
        assert (seconds in said) == (add_verb is add_estimate)
    if add_verb is add_plan:
        assert steps[1] - steps[0] == pytest.approx(shard / 0.4e9 - shard / 1.6e9, abs=0.02)
