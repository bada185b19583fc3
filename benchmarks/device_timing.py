"""Seconds of a program on an accelerator."""

import statistics
import time
from collections.abc import Callable
from typing import Any


def median_seconds(run: Callable[[], Any], rounds: int = 7) -> float:
    """Return the median seconds of `run()`, which is called once before to compile it."""
    import jax

    jax.block_until_ready(run())
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
