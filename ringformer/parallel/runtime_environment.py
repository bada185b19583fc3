"""Environment variables for runs on GPUs. JAX's runtime reads them only once, when it starts.

Each GPU has a pool of pinned host memory for arrays that a program keeps there. The pool grows to the next power of two
within its limit, so a limit far above what the program needs pins unused memory.
"""

import math
from collections.abc import Mapping

from ringformer.hardware import GiB

GPU_FRACTION = 0.92
"""Share of a GPU's memory for a run; the CUDA context, libraries and fragmentation take the rest."""

MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Variable for the share of a GPU's memory that JAX takes; by default three quarters."""

HOST_POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Variable for the limit of a GPU's pool of pinned host memory, in GiB."""

DEFAULT_HOST_POOL = 64
"""XLA's default limit, in GiB (`GetGpuHostAllocator` in xla/pjrt/gpu/gpu_helpers.cc)."""

_SMALLER_REGIONS = 2
"""GiB of the pool that smaller buffers may already have taken."""


def runtime_environment(kind: str, host_bytes: float) -> dict[str, str]:
    """Return the variables for programs that keep `host_bytes` of each device in host memory; empty except for GPUs."""
    if kind != "gpu":
        return {}
    variables = {MEMORY_FRACTION: str(GPU_FRACTION)}
    needed = host_pool_needed(host_bytes)
    if needed > DEFAULT_HOST_POOL:
        variables[HOST_POOL] = str(needed)
    return variables


def host_pool_needed(host_bytes: float) -> int:
    """Return the pool size, in GiB, that holds `host_bytes`; 0 for none."""
    return math.ceil(host_bytes / GiB) + _SMALLER_REGIONS if host_bytes else 0


def host_pool(environment: Mapping[str, str]) -> int:
    """Return the pool size, in GiB, that JAX allows in an environment; raises ValueError for an invalid limit."""
    limit = environment.get(HOST_POOL, str(DEFAULT_HOST_POOL))
    if not limit.isdecimal():
        raise ValueError(f"{HOST_POOL}={limit} is not a whole number of GiB")
    return int(limit)
