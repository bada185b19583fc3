"""Busiest links of exchanges, hops and gathers, on slices whose loads follow from counting."""

from itertools import product

import numpy as np
import pytest

from ringformer.estimate.seconds.link_loads import Network, gather_rate, link_seconds
from ringformer.estimate.workloads.targets import find_target


def slice_of(*sides, wraps=False, cores=1):
    """Chips in the order of their places, with links of a byte per second."""
    places = product(*map(range, sides), *[range(1)] * (3 - len(sides)), range(cores))
    return Network(tuple(places), 1.0, wraps=wraps)


def boxes(links, *sides):
    """Groups of devices that each fill a box."""
    sides = (*sides, *[1] * (4 - len(sides)))
    groups = {}
    for number, place in enumerate(links.places):
        groups.setdefault(tuple(np.array(place) // sides), []).append(number)
    return tuple(map(tuple, groups.values()))


def busiest(links, kind, groups):
    return link_seconds(links, kind, groups).max()


@pytest.mark.parametrize(
    ("grid", "wraps", "box", "load"),
    [
        ((8, 8), False, (1, 8), 2.0),  # half of eight devices send half of their bytes over the middle
        ((8, 8), False, (2, 8), 2.0),
        ((8, 8), False, (8, 8), 2.0),
        ((8, 8), False, (2, 2), 0.5),
        ((8, 8), False, (2, 4), 1.0),
        ((8, 8), False, (4, 4), 1.0),
        ((8, 8), False, (4, 8), 2.0),
        ((4, 4, 4), True, (4, 4, 4), 0.5),  # a mean distance of one, over links in two directions
        ((4, 4, 4), True, (1, 1, 4), 0.5),
        ((4, 4, 4), True, (2, 2, 4), 0.5),
        ((4, 4, 4), False, (4, 4, 4), 1.0),
        ((16, 16), True, (16, 16), 2.0),
    ],
    ids=str,
)
def test_the_busiest_link_of_an_exchange(grid, wraps, box, load):
    """By the bytes that a device exchanges with its whole group."""
    links = slice_of(*grid, wraps=wraps)
    assert busiest(links, "all-to-all", boxes(links, *box)) == pytest.approx(load)


@pytest.mark.parametrize(("box", "load"), [((1, 1), 1), ((2, 2), 2), ((4, 1), 4), ((1, 4), 1)])
def test_hops_between_ranks_of_several_devices_share_links(box, load):
    """Along the first dimension, from each box to the same place of the next."""
    links = slice_of(8, 8)
    number = {place: i for i, place in enumerate(links.places)}
    pairs = [(i, number.get((x + box[0], y, z, core))) for (x, y, z, core), i in number.items()]
    assert busiest(links, "collective-permute", tuple(p for p in pairs if p[1] is not None)) == load


def test_wrap_links_shorten_a_way():
    around = ((0, 6),)
    for wraps, crossed in ((False, 6), (True, 2)):
        assert link_seconds(slice_of(8, wraps=wraps), "collective-permute", around).sum() == crossed
    half = link_seconds(slice_of(8, wraps=True), "collective-permute", ((0, 4),))
    assert half.max() == 0.5 and half.sum() == 4, "both ways are as long"


def test_the_cores_of_a_chip_share_its_links():
    links = slice_of(2, cores=2)  # devices 0 and 1 are on a chip
    assert busiest(links, "collective-permute", ((0, 2), (1, 3))) == 2
    assert busiest(links, "collective-permute", ((0, 1), (2, 3))) == 1


def test_gathers_use_the_links_of_their_axis():
    links = slice_of(4, 4, 4)
    assert gather_rate(links, ()) == 6 and gather_rate(links, boxes(links, 4, 4, 4)) == 6
    assert gather_rate(links, boxes(links, 1, 4, 4)) == 4 and gather_rate(links, boxes(links, 1, 1, 4)) == 2
    apart = tuple((16 * x + y, 16 * x + y + 8) for x in range(4) for y in range(8))  # two links apart
    assert gather_rate(links, apart) == 1, "two groups share each link"


def test_gpus_send_over_nvlink_and_over_their_own_network():
    nodes = Network(tuple((i // 8, i) for i in range(32)), link_bandwidth=8.0, node_bandwidth=1.0)
    groups = tuple(tuple(range(8 * n, 8 * n + 8)) for n in range(4))
    assert busiest(nodes, "all-to-all", groups) == pytest.approx(7 / 8 / 8)
    flat, apart = (
        link_seconds(nodes, "collective-permute", tuple((i, (i + u) % 32) for i in range(32))) for u in (1, 8)
    )
    assert flat.max() == apart.max() == 1 and (flat == 1).sum() == 4 and (apart == 1).sum() == 32
    assert gather_rate(nodes, groups) == 8 and gather_rate(nodes, ()) == 8, "eight networks are as fast as NVLink here"
    across = tuple(tuple(range(first, 32, 8)) for first in range(8))
    assert gather_rate(nodes, across) == 1, "one member in a node"


@pytest.mark.parametrize(
    ("name", "wraps"),
    [
        ("v5p-128", True),
        ("v4:4x4x8", True),
        ("v5p:2x4x4", False),
        ("v5e-256", True),
        ("v5e:8x16", False),
        ("8xH100", False),
    ],
)
def test_slices_with_wrap_links(name, wraps):
    assert find_target(name).wraps == wraps
