"""Retention: which checkpoints of a run stay on disk, and which are proven.

A checkpoint is proven by a sound step after it. A step is sound if each of the last `IN_A_ROW` steps that were not
skipped has a loss in bounds (`RATIO`, `NATS`). The newest proven checkpoint stays, whatever happens later.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

IN_A_ROW = 8
"""Number of consecutive losses that make a step sound: one lucky batch must not prove a diverged state."""
RATIO = 1.25
NATS = 0.25
"""A loss is in bounds if it is at most RATIO times the level plus NATS. The level is the lowest mean of `IN_A_ROW`
consecutive losses. If losses vary by a tenth between batches, nine of ten steps are sound. The losses of a model that
has forgotten what it learned are several nats above the bound. The level never rises, so a run that stays diverged
proves no checkpoint, however long it trains."""
OTHER_LOSSES = ("data.", "model.", "seq_len")
"""Prefixes of the config keys that change the level of losses."""


@dataclass
class Keep:
    """Policy that keeps the newest proven checkpoint and those that the fields select. While steps are skipped, it
    keeps all."""

    latest: int | None = None
    """Number of latest checkpoints to keep; None: all."""
    every: int = 0
    """Keep the checkpoints of steps that this number divides; 0: none."""
    best: int = 0
    """Number of evaluated checkpoints with the lowest losses to keep."""
    losses: dict[int, float] = field(default_factory=dict)
    """Held-out losses of the evaluations so far, by step; the run adds new ones."""
    sound: int = 0
    """Last sound step: checkpoints of earlier steps are proven."""
    skipping: bool = False
    """True if the last step was skipped."""
    _level: float | None = field(default=None, init=False)
    _last: list[float] = field(default_factory=list, init=False)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return True for each checkpoint that stays. Orbax calls this after each save."""
        steps = [info.step for info in checkpoints]
        if self.skipping or self.latest is None:
            return [True] * len(steps)
        stay = {*sorted(steps)[-self.latest :], self.proven(steps)}
        for step in steps:
            if self.every and step % self.every == 0:
                stay.add(step)
        evaluated = [step for step in steps if step in self.losses]
        stay |= {*sorted(evaluated, key=lambda step: (self.losses[step], -step))[: self.best]}
        return [step in stay for step in steps]

    def proven(self, steps: Iterable[int]) -> int | None:
        """Return the newest of these steps whose checkpoint is proven; None if there is none."""
        return max((step for step in steps if step < self.sound), default=None)

    def see(self, step: int, loss: float | None) -> None:
        """Record the training loss of a step, in nats per token; None if the step was skipped."""
        self.skipping = loss is None
        if loss is None:
            return
        self._last = [*self._last, loss][-IN_A_ROW:]
        if len(self._last) == IN_A_ROW:
            mean = sum(self._last) / IN_A_ROW
            self._level = mean if self._level is None else min(self._level, mean)
            if max(self._last) <= self._largest():
                self.sound = step

    def doubt(self) -> str:
        """Return the reason why the last step's state may have diverged; empty if the step was not skipped and its loss
        is in bounds."""
        if self.skipping:
            return "the last step was skipped"
        if self._level is None or self._last[-1] <= self._largest():
            return ""
        return (
            f"the last step's loss, {self._last[-1]:.4g}, is over {self._largest():.4g}: {RATIO} times the lowest mean "
            f"of {IN_A_ROW} steps in a row, {self._level:.4g}, and {NATS}"
        )

    def notes(self) -> dict[str, Any]:
        """Return JSON values from which `resume` restores the state of this policy."""
        return {"sound_step": self.sound, "loss_level": self._level, "last_losses": self._last}

    def resume(self, notes: Mapping[str, Any], changed: Collection[str]) -> None:
        """Continue from the `notes` of an earlier step. `changed`: keys of the config that have changed since."""
        if "sound_step" not in notes:  # an older checkpoint
            return
        self.sound = notes["sound_step"]
        if not any(key.startswith(OTHER_LOSSES) for key in changed):
            self._level = notes["loss_level"]
            self._last = notes["last_losses"]

    def _largest(self) -> float:
        """Return the largest loss that is in bounds."""
        assert self._level is not None
        return RATIO * self._level + NATS
