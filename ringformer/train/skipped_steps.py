"""Skipped steps, which change no parameters: their loss or gradient is not finite, or the gradient norm is a spike.

Checkpoints carry the skipped steps and recent norms to a resumed run; `metrics.jsonl` states the reason for each skip.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ringformer.data import Loader
from ringformer.parallel.compiler_options import compiler_options
from ringformer.parallel.mesh import BATCH
from ringformer.parallel.nan_search import find_bad_operations
from ringformer.parallel.parameters import specs
from ringformer.runs.config import Config
from ringformer.train.prepare import Run
from ringformer.train.state import is_finite
from ringformer.train.step import make_gradients

WINDOW = 128
"""Number of latest steps whose norms determine the limit above which a norm is a spike."""
FEWEST = 32
"""Number of norms required before any norm counts as a spike."""
LEAST_DEVIATION = 0.01
"""Lower bound of the deviation, as a fraction of the median: without it, norms that hardly differ would be spikes."""


class SkippedSteps:
    """Skipped steps of a run over all its starts, and the norm above which a step is skipped."""

    def __init__(self, config: Config, data: Loader, history: Iterable[dict[str, Any]], notes: Mapping[str, Any]):
        """
        Args:
          history: rows of metrics.jsonl up to the step that the run continues from.
          notes: the result of `notes` when that step was saved; it replaces rows of metrics.jsonl that were lost.
        """
        self.steps: list[int] = []
        self._factor = config.optimizer.skip_spikes
        self._most = config.max_skipped_in_a_row
        self._data = data
        self._seed = config.seed
        self._norms: dict[int, float] = {}
        for row in history:
            if "skipped" in row:
                self.steps.append(row["step"])
            if "grad_norm" in row:
                self._remember(row["step"], row["grad_norm"])
        self.steps = sorted({*self.steps, *notes.get("skipped_steps", ())})
        for step, norm in notes.get("gradient_norms", {}).items():
            self._norms[int(step)] = norm

    def notes(self) -> dict[str, Any]:
        """Return notes for a resumed run as JSON values. They are copies, because the notes are written while the run
        continues."""
        notes: dict[str, Any] = {"skipped_steps": list(self.steps)}
        if self._factor:
            notes["gradient_norms"] = dict(self._norms)
        return notes

    def updates_before(self, step: int) -> int:
        """Return the number of optimizer updates before this step: the schedule does not count skipped steps."""
        return step - 1 - sum(s < step for s in self.steps)

    def largest_norm(self, step: int) -> float:
        """Return the norm above which `step` counts as a spike, if `skip_spikes` is set.

        This limit depends only on the norms of steps up to `step` - 2, which are available while the previous step is
        running. The limit is therefore the same whenever it is computed, even after a resume.
        """
        norms = [norm for s, norm in self._norms.items() if step - 2 - WINDOW < s <= step - 2]
        if len(norms) < FEWEST:
            return math.inf
        median = float(np.median(norms))
        deviation = max(float(np.median(np.abs(np.array(norms) - median))), LEAST_DEVIATION * median)
        return median + self._factor * deviation

    def see(self, step: int, metrics: dict[str, float]) -> dict[str, Any]:
        """Record a step's numbers; if the step was skipped, return the additional values of its row."""
        self._remember(step, metrics["grad_norm"])
        if not metrics["skipped"]:
            return {}
        self.steps.append(step)
        why = []
        for name, noun in (("loss", "loss"), ("grad_norm", "gradient norm")):
            if not math.isfinite(metrics[name]):
                why.append(f"{noun} is {metrics[name]}")
        if not why:
            limit = self.largest_norm(step)
            why = [f"gradient norm {metrics['grad_norm']:.4g} exceeds the spike limit {limit:.4g}"]
        contents = self._data.contents(step - 1)
        batch = f"sequences {contents[0]['sequence']} to {contents[-1]['sequence']} of seed {self._seed}"
        return {"skipped": " and ".join(why), "skipped_steps": len(self.steps), "batch": batch, "contents": contents}

    def check(self, step: int) -> None:
        """Raise FloatingPointError if too many steps up to this one were skipped in a row."""
        skipped = set(self.steps)
        first = step
        while first in skipped:
            first -= 1
        if step - first > self._most:
            raise FloatingPointError(
                f"{step - first} steps in a row are skipped, {first + 1} to {step}, and max_skipped_in_a_row="
                f"{self._most}: nothing is trained after step {first}. metrics.jsonl has the reasons and the contents "
                "of their batches; examine these, lower the learning rate, or find the operation with "
                "--config.debug_nans=True"
            )

    def summary(self) -> list[str]:
        """Summarise the skipped steps."""
        if not self.steps:
            return []
        return [f"{len(self.steps)} steps of the run were skipped: {_ranges(self.steps)}"]

    def _remember(self, step: int, norm: float) -> None:
        if math.isfinite(norm):
            self._norms[step] = norm
            self._norms.pop(step - WINDOW - 2, None)


def _ranges(steps: list[int]) -> str:
    """List at most the first 20 steps, because thousands of steps would not fit in a line."""
    listed = list(map(str, steps[:20]))
    if len(steps) > 20:
        listed.append("...")
    return ", ".join(listed)


def check_operations(run: Run, step: int, arrays: tuple[Any, ...], metrics: dict[str, jax.Array]) -> None:
    """Raise FloatingPointError if the step's loss or gradient is not finite, naming the first such operation.

    Waits for the step.

    Args:
      arrays: the parameters after the step, the batch, and frozen weights if there are some. The step was skipped, so
        the parameters are unchanged.
    """
    loss = float(jax.device_get(metrics["loss"]))
    norm = float(jax.device_get(metrics["grad_norm"]))
    if math.isfinite(loss) and math.isfinite(norm):
        return
    program = run.program
    mesh = run.program.mesh
    weights = program.shardings.params
    rings = run.train_data.rings(step - 1)
    options: dict[str, Any] = {"accumulate": run.config.accumulate, "rings": rings, "lora": program.lora}
    optimizer = run.config.optimizer
    options |= {"gradients_in_host": optimizer.offloads("all"), "reduce_dtype": optimizer.reduce_dtype}
    in_specs: list[Any] = [specs(weights), BATCH]
    if program.lora:
        in_specs.append(specs(program.lora.frozen))
    findings = find_bad_operations(
        make_gradients(program.model, weights, mesh, **options),
        arrays,
        tuple(in_specs),
        mesh,
        compiler_options=compiler_options(mesh, training=True),
    )
    causes = [f"{finding} ({_coordinates(mesh, finding.device)})" for finding in findings]
    params, _, *frozen_weights = arrays
    weights = program.weights(params, frozen_weights)
    bad = []
    for path, x in jax.tree.leaves_with_path(weights):
        if not is_finite(x):
            bad.append(jax.tree_util.keystr(path))
    if bad:
        causes = [f"parameters are not finite before it: {', '.join(bad)}"]
    elif not causes:
        causes = [
            "in a second computation every operation is finite, so the fault is not reproducible: suspect the hardware"
        ]
    raise FloatingPointError(f"step {step}: loss {loss}, gradient norm {norm}. First: {'; then: '.join(causes)}")


def _coordinates(mesh: Mesh, device: int) -> str:
    places = np.unravel_index(device, mesh.devices.shape)
    return ", ".join(f"{axis} {place}" for axis, place in zip(mesh.axis_names, places, strict=True))
