"""Which checkpoints of a run stay on disk."""

from dataclasses import dataclass, field

from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    EveryNSteps,
    LatestN,
    PreservationContext,
    PreservationPolicy,
)


@dataclass
class Keep:
    """The latest `latest` checkpoints (None: all), those of every `every`-th step (0: none), and the `best` ones: of
    the steps that were evaluated, those with the lowest losses."""

    latest: int | None = None
    every: int = 0
    best: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    """Of the evaluations so far, by their steps; to be added to while the run goes on."""

    def policy(self) -> PreservationPolicy:
        """As Orbax asks for it, whenever a checkpoint was added."""
        every = [EveryNSteps(self.every)] if self.every else []
        return AnyPreservationPolicy([LatestN(self.latest), *every, _Best(self)])


class _Best:
    def __init__(self, keep: Keep):
        self._keep = keep

    def should_preserve(self, checkpoints, *, context: PreservationContext) -> list[bool]:
        losses = {info.step: loss for info in checkpoints if (loss := self._keep.losses.get(info.step)) is not None}
        best = sorted(losses, key=lambda step: (losses[step], -step))[: self._keep.best]
        return [info.step in best for info in checkpoints]
