"""Closed forms of link rates against messages that are routed one by one over the links of a slice."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from ringformer.estimate.seconds.link_loads import Network, gather_rate, link_seconds
from ringformer.estimate.workloads.link_rates import exchange_rate, hop_rate, keys_rate, weights_rate
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.parallel.device_order import order_devices

TPUS = ("v5p:4x4x4", "v5e:4x4", "v5e:4x8", "v6e:8x8")


def workload(target, ulysses=1, ring="one_way", tp=1):
    model = LlamaConfig(**preset("llama_7b"), ulysses=ulysses, ring=ring)
    return Workload(model, find_target(target), f"1,1,{tp},-1", 2**17)


def routed(w):
    """The links of a slice in the order of the mesh, and the groups of devices that are one rank of the ring."""
    sides = [int(side) for side in w.target.topology.split(":")[1].split("x")]
    places = product(*map(range, sides), *[range(1)] * (3 - len(sides)))
    chips = [SimpleNamespace(coords=p, core_on_chip=0, id=i) for i, p in enumerate(places)]
    ordered = order_devices(chips, w.mesh_shape, w.model.ulysses).ravel()
    links = Network(tuple((*x.coords, 0) for x in ordered), w.target.chip.link_bandwidth, wraps=w.target.wraps)
    return links, np.arange(len(ordered)).reshape(-1, w.model.ulysses)


CASES = [(target, ulysses) for target in TPUS for ulysses in (1, 2, 4, 8, 16)]


@pytest.mark.parametrize(("target", "ulysses"), [case for case in CASES if case[1] > 1])
def test_an_exchange_takes_as_long_as_its_busiest_link(target, ulysses):
    w = workload(target, ulysses)
    links, ranks = routed(w)
    busiest = link_seconds(links, "all-to-all", tuple(map(tuple, ranks.tolist()))).max()
    assert exchange_rate(w) * busiest == pytest.approx(1)


@pytest.mark.parametrize(("target", "ulysses"), [case for case in CASES if case != ("v5e:4x4", 16)])
def test_a_hop_takes_as_long_as_its_busiest_link(target, ulysses):
    w = workload(target, ulysses)
    links, ranks = routed(w)
    pairs = np.stack([ranks, np.roll(ranks, -1, axis=0)], axis=-1).reshape(-1, 2)
    busiest = link_seconds(links, "collective-permute", tuple(map(tuple, pairs.tolist()))).max()
    assert hop_rate(w) * busiest == pytest.approx(1)


@pytest.mark.parametrize("target", TPUS)
def test_gathers_of_weights_use_all_dimensions(target):
    w = workload(target)
    links, _ = routed(w)
    assert weights_rate(w) == pytest.approx(gather_rate(links, ()))
    assert keys_rate(w) == weights_rate(w)  # one ring has all devices


@pytest.mark.parametrize(("target", "ulysses"), [("v5p:4x4x4", 16), ("v5e:4x4", 4), ("v6e:8x8", 4)])
def test_gathers_of_keys_share_the_links_between_ranks(target, ulysses):
    """Devices at the same place of each rank are a group."""
    w = workload(target, ulysses)
    links, ranks = routed(w)
    assert keys_rate(w) == pytest.approx(gather_rate(links, tuple(map(tuple, ranks.T.tolist()))))


def test_half_of_the_keys_each_way():
    """Twice the rate on a torus; on GPUs only where each way leaves the node by its own network."""
    for target, ulysses, gain in (("v5p:4x4x4", 1, 2), ("8xH100", 1, 1), ("32xH100", 1, 2), ("32xH100", 8, 1)):
        one, both = (hop_rate(workload(target, ulysses, ring)) for ring in ("one_way", "both_ways"))
        assert both == gain * one


def test_gpus():
    """A device keeps an eighth of its heads, and sends the rest over NVLink; beyond a node, over the network."""
    chip = find_target("32xH100").chip
    assert exchange_rate(workload("32xH100", 8)) == pytest.approx(chip.link_bandwidth * 8 / 7)
    assert exchange_rate(workload("32xH100", 16)) == pytest.approx(chip.node_bandwidth * 2)
    assert hop_rate(workload("32xH100", 8)) == hop_rate(workload("32xH100")) == chip.node_bandwidth
    w = replace(workload("32xH100"), mesh_dim="1,4,1,8")
    assert hop_rate(w) == keys_rate(w) == chip.link_bandwidth


@pytest.mark.parametrize(("ulysses", "tp"), [(1, 1), (2, 1), (8, 1), (1, 8), (2, 4)])
def test_gathers_between_nodes_use_the_network_of_each_member(ulysses, tp):
    """tp ranks are neighbours, then the devices of a rank."""
    w = workload("32xA100-80", ulysses, "gathered", tp)
    links = Network(tuple((i // 8, i) for i in range(32)), w.target.chip.link_bandwidth, w.target.chip.node_bandwidth)
    keys = np.arange(32).reshape(-1, ulysses * tp).T
    weights = np.arange(32).reshape(-1, tp).T
    for rate, groups in ((keys_rate, keys), (weights_rate, weights)):
        assert rate(w) == gather_rate(links, tuple(map(tuple, groups.tolist())))
