"""Known failures of compilers: workloads that crash a compiler, or that it compiles wrongly, are refused before
compilation."""

from ringformer.estimate.closed_forms.training import itemsize
from ringformer.estimate.workloads.training import Workload

HOST_TRANSFER_LIMIT = 2**32
"""Size in bytes from which libtpu 0.0.52 fails on a single transfer to the host. It counts granules in 32 bits; at
exactly this size the count is 0, and it aborts (`llo_loop.cc`: index_space_.start <= index_space_.limit)."""


def known_failure(workload: Workload) -> str:
    """Describe the array on which the compiler fails, and what to do; empty if no failure is known."""
    model = workload.model
    if not workload.has_closed_forms or workload.target.chip.kind != "tpu" or not model.offload:
        return ""
    size = workload.local_tokens * model.hidden_size * itemsize(model)
    if size < HOST_TRANSFER_LIMIT:
        return ""
    dtype = "bf16" if model.compute_dtype == "bfloat16" else "f32"
    return (
        f"the offloaded input of a layer, {dtype}[{workload.local_tokens},{model.hidden_size}] on each device, "
        f"has {size / 2**30:.2f} GiB, and the TPU compiler crashes on transfers to the host of 4 GiB or more: train "
        "without offload (with a larger remat_group or head_groups), with more devices on sp, or with half the sequence"
    )
