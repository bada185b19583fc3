"""Environment variables that a run on GPUs needs: JAX's runtime reads them once, when it starts.

Each GPU has a pool of pinned host memory for what a program keeps there. It grows to the next power of two that the
limit lets it, so that a limit far above the need pins memory that nobody uses.
"""

import math
from collections.abc import Mapping

from ringformer.hardware import GiB

GPU_FRACTION = 0.92
"""The share of a GPU's memory that a run may take; the CUDA context, the libraries and fragmentation take the rest."""

MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""The share of a GPU's memory that JAX takes; three quarters where it is not set."""

HOST_POOL = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The limit of a GPU's pool of pinned host memory, in GiB."""

DEFAULT_HOST_POOL = 64
"""XLA's, in GiB (`GetGpuHostAllocator` in xla/pjrt/gpu/gpu_helpers.cc)."""

_SMALLER_REGIONS = 2
"""GiB of the pool that smaller buffers may have taken before."""


def runtime_environment(kind: str, host_bytes: float) -> dict[str, str]:
    """What to set for programs that keep `host_bytes` of each device in host memory; nothing off the GPU."""
    if kind != "gpu":
        return {}
    needed = host_pool_needed(host_bytes)
    pool = {HOST_POOL: str(needed)} if needed > DEFAULT_HOST_POOL else {}
    return {MEMORY_FRACTION: str(GPU_FRACTION)} | pool


def host_pool_needed(host_bytes: float) -> int:
    """The pool, in GiB, that holds so many bytes; 0 for none."""
    return math.ceil(host_bytes / GiB) + _SMALLER_REGIONS if host_bytes else 0


def host_pool(environment: Mapping[str, str]) -> int:
    """The pool, in GiB, that JAX makes in such an environment; raises ValueError if the limit is no number."""
    limit = environment.get(HOST_POOL, str(DEFAULT_HOST_POOL))
    if not limit.isdecimal():
        raise ValueError(f"{HOST_POOL}={limit} is no whole number of GiB")
    return int(limit)
