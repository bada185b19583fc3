"""Messages that all processes of a run hear: of every process, or of process 0."""

import itertools

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

ANSWER_SECONDS = 600.0
"""Longest wait for process 0, which may wait for the lock of another run itself."""

_SENT = "sent"
_numbers = itertools.count()
"""Numbers of the messages that this process has asked for: each has a key of its own."""


def tell_all(message: bytes, size: int) -> list[bytes]:
    """Return the messages of all processes, in their order; a collective, which all of them call.

    Args:
      message: UTF-8 text; a shorter one is padded with spaces.
      size: bytes of a message at most, the same on all processes.

    Raises:
      ValueError: the message is longer.
    """
    if len(message) > size:
        raise ValueError(f"a message of {len(message)} bytes does not fit {size}")
    together = multihost_utils.process_allgather(np.frombuffer(message.ljust(size), np.uint8))
    return [bytes(np.asarray(row, np.uint8)) for row in np.asarray(together).reshape(jax.process_count(), -1)]


def from_process_0(text: str) -> str:
    """Return the text of process 0, on all processes; not over the devices, whose programs wait less long."""
    if jax.process_count() == 1:
        return text
    client, key = ocp.multihost.get_jax_distributed_client(), f"ringformer/process_0/{next(_numbers)}"
    if jax.process_index() == 0:
        client.key_value_set(key, _SENT + text)
    return client.blocking_key_value_get(key, int(1000 * ANSWER_SECONDS)).removeprefix(_SENT)
