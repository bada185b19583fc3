"""`--config.debug_nans`: a step that was skipped is computed once more, watched, to name what went wrong first."""

import math
from typing import Any

import jax
import numpy as np

from ringformer.parallel.compiler_options import compiler_options
from ringformer.parallel.mesh import BATCH
from ringformer.parallel.parameters import specs
from ringformer.train.checks import all_finite
from ringformer.train.nan_search import find_bad_operations
from ringformer.train.prepare import Run
from ringformer.train.step import make_gradients


def check_operations(run: Run, step: int, params: Any, batch: Any, metrics: dict[str, jax.Array]) -> None:
    """Raise FloatingPointError if the step's loss or gradient is not finite, naming the operation that was first.

    `params` are those after the step, which are those before it: it was skipped. Waits for the step.
    """
    loss, norm = (float(jax.device_get(metrics[name])) for name in ("loss", "grad_norm"))
    if math.isfinite(loss) and math.isfinite(norm):
        return
    weights = run.shardings.params
    gradients = make_gradients(run.model, weights, run.mesh, accumulate=run.config.accumulate)
    found = find_bad_operations(
        gradients, (params, batch), (specs(weights), BATCH), run.mesh, compiler_options=compiler_options(run.mesh)
    )
    causes = [f"{finding} ({_coordinates(run, finding.device)})" for finding in found]
    bad = [jax.tree_util.keystr(path) for path, x in jax.tree.leaves_with_path(params) if not bool(all_finite(x))]
    if bad:
        causes = [f"parameters are not finite before it: {', '.join(bad)}"]
    elif not causes:
        causes = [
            "computed once more every operation gives finite numbers, so the fault does not repeat itself: "
            "suspect the hardware"
        ]
    raise FloatingPointError(f"step {step}: loss {loss}, gradient's norm {norm}. First: {'; then: '.join(causes)}")


def _coordinates(run: Run, device: int) -> str:
    places = np.unravel_index(device, run.mesh.devices.shape)
    return ", ".join(f"{axis} {place}" for axis, place in zip(run.mesh.axis_names, places, strict=True))
