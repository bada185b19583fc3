"""Workloads that a compiler is known to die of, or to compile wrongly, refused by name before it is asked."""

from ringformer.estimate.closed_forms import itemsize
from ringformer.estimate.workload import Workload

HOST_TRANSFER_LIMIT = 2**32
"""Bytes of one transfer to the host for which libtpu 0.0.52 counts granules in 32 bits: at exactly so many the count is
0, and it aborts (`llo_loop.cc`: index_space_.start <= index_space_.limit)."""


def known_failure(workload: Workload) -> str:
    """Which array the compiler fails on and what to do; empty if nothing is known against the workload."""
    model = workload.model
    if not workload.has_closed_forms or workload.target.chip.kind != "tpu" or not model.offload:
        return ""
    size = workload.local_tokens * model.hidden_size * itemsize(model)
    if size < HOST_TRANSFER_LIMIT:
        return ""
    dtype = "bf16" if model.compute_dtype == "bfloat16" else "f32"
    return (
        f"the input of a layer that is offloaded, {dtype}[{workload.local_tokens},{model.hidden_size}] on each device, "
        f"has {size / 2**30:.2f} GiB, and the TPU compiler dies of transfers to the host of 4 GiB and more: train "
        "without offload (more remat_group or head_groups instead), with more devices on sp, or with half the sequence"
    )
