"""What every process of a run says, heard by all of them."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def tell_all(said: bytes, room: int) -> list[bytes]:
    """What every process said, in their order; a collective, which all of them call.

    Args:
      said: UTF-8 text; of one of less than `room` bytes, spaces are added behind it.
      room: bytes that each may say, the same on all.

    Raises:
      ValueError: it is longer.
    """
    if len(said) > room:
        raise ValueError(f"{len(said)} bytes are to be told, and there is room for {room}")
    together = multihost_utils.process_allgather(np.frombuffer(said.ljust(room), np.uint8))
    return [bytes(np.asarray(row, np.uint8)) for row in np.asarray(together).reshape(jax.process_count(), -1)]
