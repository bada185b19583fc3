"""TPU slices that a run's processes are on, and what messages call a process there."""

import os
from collections.abc import Mapping


def process_label(index: int, count: int, slices: int, *more: str) -> str:
    """Return what messages call a process, after the noun: its number; where there are several slices, its slice and
    host; and `more` about it, as in "5 (slice 1, host 1, node7)"."""
    about = list(more)
    if slices > 1:
        slice_index, host = divmod(index, count // slices)
        about = [f"slice {slice_index}", f"host {host}", *more]
    return f"{index} ({', '.join(about)})" if about else str(index)


def slices_of_run(count: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of TPU slices that `count` processes are on, one slice after the other, as JAX and the TPU's
    runtime read it: in the environment (Kubernetes), or in the metadata of a TPU host (queued resources).

    Elsewhere 1, and also if the number cannot be read or does not divide the processes: it only names them.
    """
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster

    try:
        if "MEGASCALE_NUM_SLICES" not in environment and not GceTpuCluster.is_env_present():
            return 1
        slices = GceTpuCluster._get_num_slices()
    except (OSError, RuntimeError, ValueError):  # the metadata server does not answer, or not with a number
        return 1
    return slices if slices > 1 and count % slices == 0 else 1
