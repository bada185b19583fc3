"""Failures of the host between two steps: of its input, a report or an evaluation. The state of the devices is sound.

The run ends with an exit code after which launchers start the same command again, and its state is saved first if that
is still possible. The same error at the same step ends it for good.
"""

import traceback
from pathlib import Path
from typing import Any

import jax

from ringformer.files.atomic import write_object
from ringformer.files.run_layout import HOST_FAILURE
from ringformer.files.untrusted import read_object
from ringformer.parallel.device_order import tpu_slices
from ringformer.processes.slices import process_label
from ringformer.processes.stopping import FAILED, STOPPED, StopReason


def host_failure(run_dir: Path, step: int, error: Exception) -> StopReason:
    """Record that the host of this process failed after `step`; return the reason to stop."""
    described = "".join(traceback.format_exception_only(error)).strip()
    failure: dict[str, Any] = {"step": step, "error": described}
    path = run_dir / HOST_FAILURE
    before = _last_failure(run_dir)
    is_repeated = {name: before.get(name) for name in failure} == failure
    try:
        write_object(path, failure | {"traceback": traceback.format_exception(error)})
        record = f"{path} has the traceback"
    except OSError as refused:
        record = f"{path} could not be written: {refused}"
    first_line = described.splitlines()[0]
    who = "the host"
    if jax.process_count() > 1:
        slices = len(tpu_slices(jax.devices()))
        who += f" of process {process_label(jax.process_index(), jax.process_count(), slices)}"
    why = f"{who} failed after step {step} ({first_line}; {record}): stopped"
    if is_repeated:
        return StopReason(why, FAILED, "it failed so before, and is not started again: mend the cause first")
    return StopReason(why, STOPPED)


def _last_failure(run_dir: Path) -> dict[str, Any]:
    """Return the record of the last failure; an empty one if there is none, or if it is damaged."""
    if not (run_dir / HOST_FAILURE).is_file():
        return {}
    try:
        return read_object(run_dir, HOST_FAILURE)
    except ValueError:
        return {}
