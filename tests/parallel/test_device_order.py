"""Hamiltonian cycles of boxes, and whole meshes on the grids of real slices."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from jax.experimental import topologies

from ringformer.parallel.device_order import hamiltonian_cycle, link_hops, max_link_hops, order_devices
from ringformer.parallel.mesh import AXIS_NAMES, make_mesh
from tests.hlo import on_tpu


def slice_of(*grid, cores=1):
    """TPU devices of a grid, shuffled."""
    places = itertools.product(*map(range, grid), *[range(1)] * (3 - len(grid)), range(cores))
    chips = [SimpleNamespace(coords=p[:3], core_on_chip=p[3], id=i) for i, p in enumerate(places)]
    return list(np.random.default_rng(0).permutation(chips))


@pytest.mark.parametrize("box", list(itertools.product(range(1, 7), range(1, 6), range(1, 5))), ids=str)
def test_a_cycle_visits_every_place_and_steps_to_neighbours(box):
    cycle = hamiltonian_cycle(box)
    size, lines = math.prod(box), sum(n > 1 for n in box)
    # A grid's places are two-coloured and neighbours differ: a closed path has as many of each.
    assert (cycle is not None) == (size <= 2 or (size % 2 == 0 and lines > 1))
    if cycle is not None:
        assert sorted(cycle) == list(itertools.product(*map(range, box)))
        steps = [sum(abs(a - b) for a, b in zip(x, y, strict=True)) for x, y in itertools.pairwise([*cycle, cycle[0]])]
        assert set(steps) <= {1} or size == 1


@pytest.mark.parametrize(
    ("grid", "cores", "shape"),
    [
        ((16, 16), 1, (1, 1, 1, 256)),
        ((16, 16), 1, (1, 4, 1, 64)),
        ((16, 16), 1, (2, 2, 4, 16)),
        ((16, 16), 1, (1, 64, 1, 4)),
        ((16, 16), 1, (1, 128, 1, 2)),
        ((16, 16), 2, (1, 1, 1, 512)),
        ((8, 8, 8), 1, (1, 1, 1, 512)),
        ((8, 8, 8), 1, (1, 2, 4, 64)),
        ((8, 8, 8), 1, (1, 8, 16, 4)),
        ((4, 2), 1, (1, 1, 1, 8)),
    ],
    ids=str,
)
def test_every_hop_of_every_ring_is_one_link(grid, cores, shape):
    devices = slice_of(*grid, cores=cores)
    mesh = order_devices(devices, shape)
    assert mesh.shape == shape
    assert {x.id for x in mesh.flat} == {x.id for x in devices}
    for ring in mesh.reshape(-1, shape[-1]):
        assert max(link_hops(list(ring))) == 1


def joined(slices: int, *grid: int):
    """The devices of several slices of one shape, mixed."""
    devices = []
    for index in range(slices):
        for device in slice_of(*grid):
            device.slice_index = index
            device.id += 1000 * index
            devices.append(device)
    return list(np.random.default_rng(1).permutation(devices))


@pytest.mark.parametrize("shape", [(2, 1, 1, 16), (2, 2, 2, 4), (4, 1, 1, 8)])
def test_nothing_but_dp_crosses_from_slice_to_slice(shape):
    """Each slice is ordered as it is alone."""
    ordered = order_devices(joined(2, 4, 4), shape)
    assert ordered.shape == shape and len({x.id for x in ordered.flat}) == 32
    alone = order_devices(slice_of(4, 4), (shape[0] // 2, *shape[1:]))
    for index, of_slice in enumerate(np.split(ordered, 2)):
        assert {x.slice_index for x in of_slice.flat} == {index}
        assert [x.coords for x in of_slice.flat] == [x.coords for x in alone.flat]


@pytest.mark.parametrize("shape", [(1, 1, 1, 32), (3, 1, 1, 8), (1, 2, 1, 16)])
def test_slices_that_do_not_divide_dp_are_refused(shape):
    with pytest.raises(ValueError, match=rf"dp={shape[0]} is not a multiple of the 2 slices, .* a multiple of 2"):
        order_devices(joined(2, 4, 4), shape)


def test_tp_ranks_are_neighbours_where_the_slice_allows_it():
    mesh = order_devices(slice_of(8, 8, 8), (1, 2, 4, 64))
    for group in np.moveaxis(mesh, 2, 3).reshape(-1, 4):
        assert link_hops(list(group))[:-1] == [1] * 3  # rings of 8x8x1, one above the other
    mesh = order_devices(slice_of(4, 4), (1, 1, 2, 8))
    for pair in np.moveaxis(mesh, 2, 3).reshape(-1, 2):
        assert link_hops(list(pair)) == [2, 2]  # two dimensions: rings of 4x2, side by side


def test_a_slice_without_such_rings_warns_with_the_sizes_that_work():
    with pytest.warns(
        UserWarning,
        match=r"3x3x1x1 slice makes all consecutive ranks.*for sp=9 and ulysses=1.*without longer hops: none",
    ):
        mesh = order_devices(slice_of(3, 3), (1, 1, 1, 9))
    assert sorted(x.id for x in mesh.flat) == list(range(9))
    assert max(link_hops(list(mesh.flat))) == 2
    with pytest.warns(UserWarning, match="without longer hops: 2, 4, 6, 8, 12, 24$"):
        order_devices(slice_of(4, 2, 3), (1, 8, 1, 3))


@pytest.mark.parametrize(
    ("grid", "shape", "ulysses", "sides", "hop"),
    [
        ((8, 8), (1, 1, 1, 64), 4, (2, 2, 1), 2),
        ((8, 8), (1, 1, 1, 64), 8, (2, 4, 1), 4),
        ((8, 8), (1, 2, 1, 32), 4, (2, 2, 1), 2),
        ((4, 2), (1, 1, 1, 8), 4, (2, 2, 1), 2),
        ((4, 4), (1, 1, 1, 16), 16, (4, 4, 1), 0),
        ((4, 4, 4), (1, 1, 1, 64), 4, (1, 1, 4), 1),  # the ring runs across these lines
        ((4, 4, 4), (1, 1, 1, 64), 16, (2, 2, 4), 2),
        ((8, 8, 8), (2, 2, 4, 32), 8, (2, 2, 2), 2),
    ],
    ids=str,
)
def test_ranks_of_several_devices_are_boxes_and_neighbours(grid, shape, ulysses, sides, hop):
    mesh = order_devices(slice_of(*grid), shape, ulysses)
    assert len({x.id for x in mesh.flat}) == math.prod(grid)
    places = np.array([x.coords for x in mesh.flat]).reshape(-1, shape[-1] // ulysses, ulysses, 3)
    assert (np.ptp(places, axis=2) + 1 == sides).all(), "each rank fills a box"
    inside = places - places.min(axis=2, keepdims=True)
    assert (inside == inside[:1, :1]).all(), "a device's keys travel to the same place of the next box"
    assert max_link_hops(SimpleNamespace(devices=mesh, axis_names=AXIS_NAMES), ulysses) == hop


def test_ranks_that_no_cycle_joins_are_named():
    with pytest.warns(UserWarning, match=r"for sp=12 and ulysses=4.*without longer hops: 8, 16, 24, 48$"):
        mesh = order_devices(slice_of(4, 12), (1, 4, 1, 12), 4)
    assert max_link_hops(SimpleNamespace(devices=mesh, axis_names=AXIS_NAMES), 4) == 4, "two boxes of 2x2"
    with pytest.raises(ValueError, match="ulysses=3 does not divide sp=8"):
        order_devices(slice_of(4, 2), (1, 1, 1, 8), 3)


@pytest.mark.parametrize(("shape", "ulysses"), [((1, 1, 1, 32), 8), ((1, 2, 1, 16), 8), ((1, 1, 2, 16), 4)])
def test_gpus_of_a_rank_share_a_node_and_each_sends_to_another(shape, ulysses):
    """So a ring between nodes uses the network of all eight GPUs."""
    gpus = [SimpleNamespace(process_index=i // 8, id=i) for i in np.random.default_rng(0).permutation(32)]
    node = np.vectorize(lambda x: x.process_index)(order_devices(gpus, shape, ulysses))
    assert (node == node[:, :, :1]).all(), "a tp group stays in its node"
    ranks = node.reshape(-1, shape[-1] // ulysses, ulysses)
    assert (ranks == ranks[:, :, :1]).all(), "so does a rank"
    assert (ranks != np.roll(ranks, 1, axis=1)).all()


def test_gpu_rings_leave_a_node_as_rarely_as_possible():
    gpus = [SimpleNamespace(process_index=i // 8, id=i) for i in np.random.default_rng(0).permutation(32)]
    mesh = order_devices(gpus, (1, 2, 4, 4))
    node = np.vectorize(lambda x: x.process_index)(mesh)
    assert (node == node[:, :, :1]).all()  # a tp group stays in its node
    for ring in node.reshape(-1, 4):
        assert (ring != np.roll(ring, 1)).sum() == 2  # two nodes: out and back
    assert max_link_hops(make_mesh("1,1,1,8")) is None


@on_tpu
@pytest.mark.parametrize("topology, mesh_dim", [("v5e:16x16", "1,1,1,256"), ("v5e:4x2", "1,1,2,4")])
def test_the_devices_of_a_real_topology(topology, mesh_dim):
    assert max_link_hops(make_mesh(mesh_dim, topologies.get_topology_desc(topology, "tpu").devices)) == 1
