"""Bad numbers for tests: a loss that is not finite where a token's position is -1, its gradient alone where it is -2.

As a program, `python -m tests.train.poison STEP PROCESS ARGUMENT...`, it is `ringformer train` as one of several
processes, of which process 1 alone has a position of -1 in its part of the batch of STEP.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from ringformer import cli
from ringformer.data import Loader
from ringformer.models.decoder import Decoder

LOSS = Decoder.loss


def poisoned_loss(self, batch, **options):
    loss = LOSS(self, batch, **options)
    bad, worse = ((batch.positions == sign).any() for sign in (-1, -2))
    # What is not chosen must be sound, too: the gradient of a `where` goes into both.
    nan = jnp.log(jnp.where(bad, loss * 0 - 1, 1.0))
    steep = jnp.sqrt(jnp.where(worse, loss * 0, 1.0)) - jnp.where(worse, 0.0, 1.0)
    return loss + nan + steep


def poison(batch, sign: int, place=(0, 0)):
    """The batch with this position at one place."""
    positions = np.array(batch.positions)
    positions[place] = sign
    return batch._replace(positions=jax.device_put(positions, batch.positions.sharding))


class PoisonedData:
    """A loader whose batches of some steps are poisoned, {step: sign}."""

    def __init__(self, loader, at: dict[int, int]):
        self._loader, self._at = loader, at

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def iterate(self, start, sharding):
        for step, batch in enumerate(self._loader.iterate(start, sharding), start + 1):
            yield poison(batch, self._at[step]) if step in self._at else batch


def main(bad_step: int, process: int, arguments: list[str]) -> int:
    read = Loader.read

    def poisoned(self, step, *part):
        batch = read(self, step, *part)
        if step == bad_step - 1 and process == 1:
            batch.positions.flat[0] = -1
        return batch

    Loader.read, Decoder.loss = poisoned, poisoned_loss
    return cli.main(["train", *arguments, f"--process_id={process}"])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
