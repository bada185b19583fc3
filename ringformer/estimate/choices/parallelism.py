"""Ways of a mesh to compute attention: heads exchanged among neighbours, and the form of the ring."""

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from ringformer.estimate.closed_forms.training import held_key_heads
from ringformer.estimate.workloads.link_rates import hop_rate
from ringformer.estimate.workloads.training import Workload
from ringformer.ops.ring import RingForm


def parallelisms(workload: Workload) -> Iterator[Workload]:
    """Yield the workload with every number of devices that can exchange heads and every form of the ring, the plain
    ring first. Chunks and kernel are chosen anew for each."""
    ulysses = 1
    while ulysses <= workload.mesh_shape[3]:
        for ring in get_args(RingForm):
            other = with_parallelism(workload, ulysses, ring)
            if is_possible(other):
                yield other
        ulysses *= 2


def with_parallelism(workload: Workload, ulysses: int, ring: RingForm) -> Workload:
    """Return the workload with this exchange of heads and form of the ring. Tokens of a rank change, so the kernel and
    its chunks are chosen anew, unless the workload has XLA's blocks."""
    kernel = "xla" if workload.model.kernel == "xla" else "auto"
    model = replace(workload.model, ulysses=ulysses, ring=ring, kernel=kernel, q_chunk=None, k_chunk=None)
    return replace(workload, model=model).with_kernel()[0]


def is_possible(workload: Workload) -> bool:
    """Return True if the exchange divides the ring and the heads that a device computes at once, and the form of the
    ring can be worth it."""
    model = workload.model
    _, _, tp, sp = workload.mesh_shape
    if sp % model.ulysses or model.num_heads // tp // model.head_groups % model.ulysses:
        return False
    if 0 not in workload.windows:
        return model.ring == "one_way"  # a window takes its own way
    if model.ring == "both_ways":
        one_way = replace(workload, model=replace(model, ring="one_way"))
        return workload.ring_size > 2 and hop_rate(workload) > hop_rate(one_way) and _has_halves(workload)
    return model.ring == "one_way" or workload.ring_size > 1


def _has_halves(workload: Workload) -> bool:
    """Return True if a device's keys can go both ways: half of the heads each way or, except with cuDNN, half of the
    tokens."""
    return workload.model.kernel != "cudnn" or held_key_heads(workload) % 2 == 0
