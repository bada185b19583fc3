"""Closed forms of the rates at which devices exchange keys, heads and weights; no device is needed.

On TPUs, a rank of several devices (`ulysses`) is a box of chips (`parallel/device_order.py`), and its messages share
the links. On GPUs, NVLink joins the devices of a node, and each GPU has a share of the network between nodes.
"""

import math
from functools import lru_cache

from ringformer.estimate.workloads.targets import Target
from ringformer.estimate.workloads.training import Workload
from ringformer.hardware import GPUS_OF_A_NODE
from ringformer.parallel.device_order import Boxes, cut_into_boxes


@lru_cache
def _boxes(target: Target, sp: int, tp: int, ulysses: int) -> Boxes:
    """Return the boxes of ranks and rings in a TPU slice; the last dimension has the cores of a chip."""
    return cut_into_boxes((*target.sides, _cores(target)), sp, tp, ulysses)


def _cores(target: Target) -> int:
    """Return the devices of a TPU chip, which share its links."""
    return target.num_devices // math.prod(target.sides)


def _messages_of_a_hop(workload: Workload) -> float:
    """Return the messages on the busiest link of a hop, which is as many as the links that one crosses: the chips of a
    rank's side. Half of them go the other way around a torus if both ways are equally long."""
    target = workload.target
    _, _, tp, sp = workload.mesh_shape
    boxes = _boxes(target, sp, tp, workload.model.ulysses)
    if boxes.ring is None:
        return 2 * max(boxes.rank)  # to every second place of a path
    crossed: list[float] = []
    for n, ranks, side in zip(boxes.rank, boxes.ring, (*target.sides, 0), strict=True):
        if ranks > 1:
            crossed.append(n / 2 if target.wraps and 2 * n == side else n)
    return max(crossed, default=1)


def hop_rate(workload: Workload, window: int = 0) -> float:
    """Bytes per second of one device in a hop of the ring, in both directions together if half of the keys go each
    way, as those of layers with a window do in the layout zigzag."""
    target = workload.target
    _, _, tp, sp = workload.mesh_shape
    rate = target.ring_bandwidth(sp * tp)
    ways = 1
    if target.chip.kind == "tpu":
        rate = rate / _messages_of_a_hop(workload)
        ways = 2
    elif sp * tp > GPUS_OF_A_NODE > tp * workload.model.ulysses:
        ways = 2  # each way leaves a node over the network of another GPU
    both = workload.model.layout == "zigzag" if window else workload.model.ring == "both_ways"
    if both:
        rate *= ways
    return rate


def exchange_rate(workload: Workload) -> float:
    """Bytes of a device's operand per second in an exchange of heads; the part that it keeps counts too."""
    target = workload.target
    ulysses = workload.model.ulysses
    _, _, tp, sp = workload.mesh_shape
    chip = target.chip
    if chip.kind == "gpu":
        here = min(ulysses, max(1, GPUS_OF_A_NODE // tp))
        beyond = (ulysses - here) / (chip.node_bandwidth or chip.link_bandwidth)
        return ulysses / max((here - 1) / chip.link_bandwidth, beyond)
    # Over the middle of a side of s chips, s/2 chips send half of their bytes to s/2 others; around a torus, both ways.
    box = _boxes(target, sp, tp, ulysses).rank
    loads = []
    for n, side in zip(box, target.sides, strict=False):
        if n > 1:
            goes_around = target.wraps and n == side > 2
            loads.append(n / (8 if goes_around else 4))
    return chip.link_bandwidth / max(loads, default=0.25)


def keys_rate(workload: Workload) -> float:
    """Bytes per second of a gather or a sum of keys over a ring: on TPUs, over both directions of each dimension in
    which the ring extends, which the devices of a rank share."""
    target = workload.target
    _, _, tp, sp = workload.mesh_shape
    if target.chip.kind == "gpu":
        return _gpu_gather_rate(target, sp * tp, tp * workload.model.ulysses)
    boxes = _boxes(target, sp, tp, workload.model.ulysses)
    dims = len(target.sides)
    ring = boxes.ring or target.sides
    sides = [side for side, ranks in zip(boxes.rank[:dims], ring[:dims], strict=True) if ranks > 1]
    return target.chip.link_bandwidth * 2 * max(1, len(sides)) / max(sides, default=1) / _cores(target)


def weights_rate(workload: Workload) -> float:
    """Bytes per second of a gather of weights, or a sum of their gradients, over all devices of a slice or group: on
    TPUs, over both directions of each dimension of the slice."""
    target = workload.target
    if target.chip.kind == "gpu":
        return _gpu_gather_rate(target, target.num_devices // target.slices, workload.mesh_shape[2])
    return target.chip.link_bandwidth * 2 * max(1, sum(n > 1 for n in target.sides)) / _cores(target)


def _gpu_gather_rate(target: Target, devices: int, groups: int) -> float:
    """Return the rate of gathers over neighbouring GPUs that interleave as so many groups: between nodes, over the
    network of each member that a node has."""
    chip = target.chip
    members = max(1, GPUS_OF_A_NODE // groups)
    if devices <= GPUS_OF_A_NODE or not chip.node_bandwidth:
        return chip.link_bandwidth
    return min(chip.link_bandwidth, members * chip.node_bandwidth)
