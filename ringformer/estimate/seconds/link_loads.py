"""Links between the devices of a mesh, and the seconds that a collective occupies each of them.

TPU chips send a message along one dimension after the other, the shortest way; if both ways around a torus are equally
long, half of it goes each way. Messages between several pairs of devices share the links on their ways. So a hop
between ranks of several devices takes as long as its busiest link, and so does an exchange of heads. GPUs of a node
reach each other over all NVLinks of a GPU, and GPUs of other nodes over the network of the GPU that sends. What crosses
the network between slices, or between groups of GPUs, has a rate of its own (`transfers.py`).
"""

import math
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from ringformer.estimate.workloads.targets import Target
from ringformer.parallel.device_order import place

Groups = tuple[tuple[int, ...], ...]
"""Groups of devices, by their numbers in the mesh; of a permute, pairs (source, target). Empty: one group of all."""

QUEUED = ("collective-permute", "all-to-all")
"""Kinds of collectives whose messages queue on the links that they share. Others are spread over all links."""


class Network(NamedTuple):
    """Links between the devices of a mesh."""

    places: tuple[tuple[int, ...], ...]
    """Place of each device: (x, y, z, core) of a TPU, or (node, number) of a GPU. Several slices, or groups of
    GPUs, are alike and share no links: these are the places of the first one."""
    link_bandwidth: float
    """Bytes per second, one way: of one link between TPU chips, or of all NVLinks of a GPU."""
    node_bandwidth: float | None = None
    """Bytes per second of a GPU's share of the network between nodes; None for TPUs."""
    wraps: bool = False
    """True if links join the ends of each dimension of a TPU slice."""
    slices: int = 1
    """TPU slices that the network between their hosts joins, or groups of GPUs."""
    slice_bandwidth: float = math.inf
    """Bytes per second of a device's share of that network."""


def network(target: Target, mesh: Mesh) -> Network:
    """Return the links between a target's devices, in the order of the mesh."""
    chip = target.chip
    devices = list(mesh.devices.flat)[: mesh.size // target.slices]
    if chip.kind == "gpu":
        nodes = tuple((x.process_index, x.id) for x in devices)
        links = Network(nodes, chip.link_bandwidth, chip.node_bandwidth)
    else:
        links = Network(tuple(map(place, devices)), chip.link_bandwidth, wraps=target.wraps)
    if target.slices == 1:
        return links
    return links._replace(slices=target.slices, slice_bandwidth=target.slice_bandwidth)


def in_first_slice(links: Network, groups: Groups) -> Groups:
    """Return the groups of a collective that are in the first slice, which is all of them if there is only one."""
    if links.slices == 1:
        return groups
    return tuple(group for group in groups if max(group) < len(links.places))


@lru_cache
def link_seconds(links: Network, kind: str, groups: Groups) -> Float[np.ndarray, " links"]:
    """Return the seconds that a collective of a kind in `QUEUED` occupies each link, one way, per byte of a device. A
    device sends its bytes to the target of its pair, or equal parts of them to all devices of its group, itself
    included."""
    groups = in_first_slice(links, groups)
    pairs = list(groups)
    share = 1.0
    if kind == "all-to-all":
        whole = groups or (tuple(range(len(links.places))),)
        pairs = []
        for group in whole:
            pairs += permutations(group, 2)
        share = 1 / len(whole[0])
    places = np.array(links.places)
    source, target = np.array(pairs, int).reshape(-1, 2).T
    if not links.node_bandwidth:
        return share * _messages(places, places[source], places[target], links.wraps) / links.link_bandwidth
    outside = places[source, 0] != places[target, 0]
    seconds = np.zeros((2, len(places)))
    np.add.at(seconds[0], source[~outside], share / links.link_bandwidth)
    np.add.at(seconds[1], source[outside], share / links.node_bandwidth)
    return seconds.ravel()


def _messages(
    places: Int[np.ndarray, "devices 4"], source: Int[np.ndarray, "pairs 4"], target: Int[np.ndarray, "pairs 4"], wraps
) -> Float[np.ndarray, " links"]:
    """Count the messages on each link of a TPU slice if every source sends one to its target."""
    low = places.min(axis=0)
    sides = np.ptp(places, axis=0) + 1
    counts = np.zeros((2, len(sides), *sides))
    at = source - low
    core = len(sides) - 1
    for dim, side in enumerate(sides):
        ahead = target[:, dim] - low[dim] - at[:, dim]
        around = wraps and dim != core
        for way in (1, -1):
            distance = way * ahead
            share = np.ones(len(distance))
            if around:
                distance = distance % side
                share = (1 + np.sign(side - 2 * distance)) / 2
            for step in range(max(distance, default=0)):
                passing = (distance > step) & (share > 0)
                link = at[passing]
                link[:, dim] = (link[:, dim] + way * step) % side
                if dim != core:
                    link[:, core] = 0  # the cores of a chip share its links
                np.add.at(counts[(1 - way) // 2, dim], tuple(link.T), share[passing])
        at[:, dim] = target[:, dim] - low[dim]
    return counts.ravel()


@lru_cache
def gather_rate(links: Network, groups: Groups) -> float:
    """Return the bytes per second of a gather or a reduction in groups.

    On TPUs, it uses both directions of each dimension in which a group extends. These links are shared by the cores of
    a chip, and by as many groups as lie between neighbours in a group. On GPUs of several nodes, rings of the group
    leave a node through the network of each of its members there (NCCL).
    """
    places = np.array(links.places)
    of_groups = [places[list(group)] for group in in_first_slice(links, groups)] or [places]
    if links.node_bandwidth:
        rate = links.link_bandwidth
        for group in of_groups:
            _, members = np.unique(group[:, 0], return_counts=True)
            if len(members) > 1:
                rate = min(rate, links.node_bandwidth * float(members.min()))
        return rate
    chips = len(np.unique(places[:, :-1], axis=0)) / len(places)
    return links.link_bandwidth * chips * min(_links_of_gather(group[:, :-1]) for group in of_groups)


def _links_of_gather(group: Int[np.ndarray, "devices 3"]) -> float:
    steps = []
    for line in map(np.unique, group.T):
        if len(line) > 1:
            steps.append(np.ptp(line) / (len(line) - 1))
    return max(1, 2 * len(steps)) / float(max(steps, default=1))
