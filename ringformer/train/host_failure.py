"""Failures of the host between two steps: of its input, a report or an evaluation. The state of the devices is sound.

With a single process the state is saved before the run ends, with the exit code after which launchers start the same
command again. The same error at the same step ends it for good.
"""

import traceback
from pathlib import Path
from typing import Any

from ringformer.files.atomic import write_object
from ringformer.files.run_layout import HOST_FAILURE
from ringformer.files.untrusted import read_object
from ringformer.processes.stopping import FAILED, STOPPED, Stopped


def host_failure(run_dir: Path, step: int, error: Exception) -> Stopped:
    """Record that the host failed after `step`, which is saved; return the exception that ends the run."""
    described = "".join(traceback.format_exception_only(error)).strip()
    failure: dict[str, Any] = {"step": step, "error": described}
    path = run_dir / HOST_FAILURE
    before = _last_failure(run_dir)
    is_repeated = {name: before.get(name) for name in failure} == failure
    write_object(path, failure | {"traceback": traceback.format_exception(error)})
    first_line = described.splitlines()[0]
    place = f"after step {step}, which is saved in {run_dir}: {first_line}; {path} has the traceback"
    if is_repeated:
        return Stopped(f"the host failed again {place}. It is not started again: mend the cause first", FAILED)
    return Stopped(f"the host failed {place}. The same command resumes the run", STOPPED)


def _last_failure(run_dir: Path) -> dict[str, Any]:
    """Return the record of the last failure; an empty one if there is none, or if it is damaged."""
    if not (run_dir / HOST_FAILURE).is_file():
        return {}
    try:
        return read_object(run_dir, HOST_FAILURE)
    except ValueError:
        return {}
