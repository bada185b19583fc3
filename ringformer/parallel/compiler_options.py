"""XLA's options that let communication overlap with computation, by platform."""

from jax.sharding import Mesh

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


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """Return the options for programs on the devices of this mesh; none on CPUs."""
    return COMPILER_OPTIONS.get(mesh.devices.flat[0].platform, {})
