"""The variables that a run on GPUs needs, and what JAX makes of those that are set."""

import pytest

from ringformer.hardware import GiB
from ringformer.parallel.runtime_environment import (
    DEFAULT_HOST_POOL,
    GPU_FRACTION,
    HOST_POOL,
    MEMORY_FRACTION,
    host_pool,
    host_pool_needed,
    runtime_environment,
)


def test_a_gpu_s_share_of_memory_is_always_set():
    assert runtime_environment("gpu", 0) == {MEMORY_FRACTION: str(GPU_FRACTION)}
    assert runtime_environment("tpu", 0) == runtime_environment("tpu", 200 * GiB) == {}


@pytest.mark.parametrize(("host_gib", "pool"), [(80.3, "83"), (128, "130"), (62.5, "65")])
def test_the_pool_is_as_large_as_what_waits_in_it(host_gib, pool):
    """And no larger: XLA would pin up to its limit."""
    environment = runtime_environment("gpu", host_gib * GiB)
    assert environment[HOST_POOL] == pool
    assert host_pool(environment) * GiB > host_gib * GiB


@pytest.mark.parametrize("host_gib", [0, 1, 62])
def test_what_xla_s_own_pool_holds_needs_no_variable(host_gib):
    assert HOST_POOL not in runtime_environment("gpu", host_gib * GiB)
    assert host_pool_needed(host_gib * GiB) <= host_pool({}) == DEFAULT_HOST_POOL


@pytest.mark.parametrize("limit", ["", "64G", "-1", "much"])
def test_a_limit_that_is_no_number(limit):
    with pytest.raises(ValueError, match=f"{HOST_POOL}={limit} is not a whole number"):
        host_pool({HOST_POOL: limit})
