"""XLA's options that let communication overlap with computation."""

from jax.sharding import Mesh

from ringformer.hardware import chip_of

COMPILER_OPTIONS = {
    # The scheduler's memory limit: at its default, nearly full programs lose their overlap.
    "tpu": {
        "xla_tpu_scheduler_percent_shared_memory_limit": "150",
        # Pipelining a loop's copies to the host peels off an iteration, whose buffers then live as long as the loop.
        "xla_tpu_pipeline_memory_host_transfers": "false",
    },
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": "True",
        # The default is one collective at a time, but the ring's keys and gradients travel together.
        "xla_gpu_experimental_parallel_collective_overlap_limit": "4",
        # As above: by default the scheduler plans for 76% of the memory.
        "xla_gpu_memory_limit_slop_factor": "125",
    },
}
"""XLA options by platform that let the ring's communication overlap with computation (docs/overlap.md)."""

_NO_REMATERIALIZATION = {"gpu": {"xla_disable_hlo_passes": "rematerialization"}}
"""A cache that nearly fills the memory makes XLA compute logits twice, reading the cached keys again, to free what is
already little."""

_HEADS = {"xla_tpu_enable_async_all_to_all": "true"}
"""By default, exchanges of heads are synchronous."""

_WEIGHTS = {
    # By default, a gather over a three-dimensional slice is an all-reduce of twice the bytes.
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
    "xla_enable_async_all_gather": "ENABLED",
}

_ON_SPARSE_CORES = {
    f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "true"
    # By default, the sum of a gradient over a slice of several dimensions is an all-reduce; the last makes it a
    # reduce-scatter. It would do so on v4 and v5e too, but is not meant for chips without SparseCores.
    for kind in ("all_gather", "all_reduce", "reduce_scatter", "nd_reduce_scatter")
}


def compiler_options(mesh: Mesh, training: bool = False) -> dict[str, str]:
    """Return the options for programs on the devices of this mesh; none on CPUs.

    Args:
      training: True adds those for gathers of weights and sums of gradients (docs/overlap.md). On TPUs with
        SparseCores, both run there while the TensorCores compute; on other TPUs, gathers are asynchronous. False adds
        those for inference.
    """
    device = mesh.devices.flat[0]
    options = COMPILER_OPTIONS.get(device.platform, {})
    chip = chip_of(device.device_kind)
    if not training:
        options = options | _NO_REMATERIALIZATION.get(device.platform, {})
    if chip is None or (cores := chip.tensor_cores) is None:
        return options
    if training:
        options = options | _WEIGHTS
        if cores.sparse_cores:
            options = options | _ON_SPARSE_CORES
    if cores.async_all_to_all:
        options = options | _HEADS
    return options
