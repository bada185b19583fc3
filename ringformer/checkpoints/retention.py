"""Retention: the checkpoints of a run that stay on disk, and those that are proven.

A checkpoint is proven by a sound step after it: at a sound step, each of the last `IN_A_ROW` steps that were not
skipped has a loss in bounds (`RATIO`, `NATS`). The newest proven checkpoint stays, whatever comes later.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

IN_A_ROW = 8
"""Number of losses in a row that make a step sound: one lucky batch must not prove a diverged state."""
RATIO, NATS = 1.25, 0.25
"""A loss is in bounds up to so many times the level, the lowest mean of `IN_A_ROW` losses in a row, and so many nats.
Losses that differ by a tenth from batch to batch are in it nine times of ten, those of a model that has forgotten what
it learned are nats above. The level never rises: what stays diverged proves nothing, however long it is trained."""
OTHER_LOSSES = ("data.", "model.", "seq_len")
"""Keys of a config by which losses have another level."""


@dataclass
class Keep:
    """Keeps the latest `latest` checkpoints (None: all), the checkpoint of every `every`-th step (0: none), the `best`
    evaluated checkpoints with the lowest losses, the newest proven checkpoint, and, while steps are skipped, all."""

    latest: int | None = None
    every: int = 0
    best: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    """Held-out losses of the evaluations so far, by step; the run adds to them."""
    sound: int = 0
    """The last step that was sound: checkpoints of steps before it are proven."""
    skipping: bool = False
    """True if the last step was skipped."""
    _level: float | None = field(default=None, init=False)
    _last: list[float] = field(default_factory=list, init=False)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return which checkpoints stay, as Orbax asks its preservation policy whenever one was added."""
        steps = [info.step for info in checkpoints]
        if self.skipping or self.latest is None:
            return [True] * len(steps)
        stay = {*sorted(steps)[-self.latest :], self.proven(steps)}
        stay |= {step for step in steps if self.every and step % self.every == 0}
        evaluated = [step for step in steps if step in self.losses]
        stay |= {*sorted(evaluated, key=lambda step: (self.losses[step], -step))[: self.best]}
        return [step in stay for step in steps]

    def proven(self, steps: Iterable[int]) -> int | None:
        """The newest of these steps whose checkpoint is proven."""
        return max((step for step in steps if step < self.sound), default=None)

    def see(self, step: int, loss: float | None) -> None:
        """Remember the training loss of a step, in nats a token; None: it was skipped."""
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
        """Return the reason why the last step's state may have diverged; empty if it was not skipped and its loss is in
        bounds."""
        if self.skipping:
            return "the last step was skipped"
        if self._level is None or self._last[-1] <= self._largest():
            return ""
        return (
            f"the last step's loss, {self._last[-1]:.4g}, is over {self._largest():.4g}: {RATIO} times the lowest mean "
            f"of {IN_A_ROW} steps in a row, {self._level:.4g}, and {NATS}"
        )

    def notes(self) -> dict[str, Any]:
        """Return what another start needs of the steps so far, as JSON values."""
        return {"sound_step": self.sound, "loss_level": self._level, "last_losses": self._last}

    def resume(self, notes: Mapping[str, Any], changed: Collection[str]) -> None:
        """Go on from what `notes` returned at an earlier step; older checkpoints have none. `changed`: the keys of the
        config that have other values now."""
        if "sound_step" not in notes:
            return
        self.sound = notes["sound_step"]
        if not any(key.startswith(OTHER_LOSSES) for key in changed):
            self._level, self._last = notes["loss_level"], notes["last_losses"]

    def _largest(self) -> float:
        """The largest loss that is in bounds."""
        assert self._level is not None
        return RATIO * self._level + NATS
