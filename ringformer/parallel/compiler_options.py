"""What XLA must be told, by platform, for the ring to be hidden (docs/overlap.md)."""

import jax

COMPILER_OPTIONS = {
    # The limit on scheduled memory: at its default the scheduler gives up overlap in nearly full programs.
    "tpu": {
        "xla_tpu_scheduler_percent_shared_memory_limit": "150",
        # Pipelining a loop's copies to the host peels a turn off it, whose buffers then live as long as the loop.
        "xla_tpu_pipeline_memory_host_transfers": "false",
    },
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": "True",
        # One collective at a time is the default; the ring's keys and gradients travel together.
        "xla_gpu_experimental_parallel_collective_overlap_limit": "4",
        # As above: at its default the scheduler plans for 76% of the memory.
        "xla_gpu_memory_limit_slop_factor": "125",
    },
}


def compiler_options(mesh: jax.sharding.Mesh) -> dict[str, str]:
    """The options for programs on the devices of this mesh; none on CPUs."""
    return COMPILER_OPTIONS.get(mesh.devices.flat[0].platform, {})
