"""The moments at which steps end on the devices.

Where a device's program has a loop whose length depends on data, a GPU's host is held while it hands the program over,
until the loop has ended. What the host sees of a step's metrics then comes a step later, and a step would seem to take
the time of another one. So a thread waits for each step.
"""

import threading
import time
from concurrent.futures import Future
from typing import Any

import jax

HELD_SECONDS = 1.0
"""Seconds of handing a step over from which on the host was held by it."""


SHORTEST = 0.0005
LONGEST = 0.02
"""Seconds between two looks at a step that is being computed: a hundredth of the time so far, within these bounds."""


def end_of(metrics: Any) -> Future[Any]:
    """Return the moment, as `time.perf_counter`, at which the metrics of a step, a tree of arrays, are computed; or the
    error that it ends with. Does not wait: a thread looks for it, and ends with the process.

    A thread that waits within the runtime when Python ends would abort the process.
    """
    moment: Future[Any] = Future()
    arrays = jax.tree.leaves(metrics)

    def look() -> None:
        began = time.perf_counter()
        try:
            while not all(array.is_ready() for array in arrays if hasattr(array, "is_ready")):
                time.sleep(min(max(SHORTEST, (time.perf_counter() - began) / 100), LONGEST))
            jax.block_until_ready(arrays)  # raises the error of a step that failed
        except Exception as error:
            moment.set_exception(error)
        else:
            moment.set_result(time.perf_counter())

    threading.Thread(target=look, name="end of a step", daemon=True).start()
    return moment
