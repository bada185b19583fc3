"""Messages that all processes of a run receive: from every process, or from process 0."""

import itertools

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

ANSWER_SECONDS = 600.0
"""Longest wait for process 0, which may itself be waiting for the lock of another run."""

_SENT = "sent"
_numbers = itertools.count()
"""Numbers the messages from process 0, so that each has its own key."""


def tell_all(message: bytes, size: int) -> list[bytes]:
    """Return the messages of all processes, in order of process index. A collective: every process must call it.

    Args:
      message: UTF-8 text, padded with spaces to `size`.
      size: largest number of bytes in a message, the same on all processes.

    Raises:
      ValueError: the message is longer than `size`.
    """
    if len(message) > size:
        raise ValueError(f"a message of {len(message)} bytes does not fit {size}")
    together = multihost_utils.process_allgather(np.frombuffer(message.ljust(size), np.uint8))
    return [bytes(np.asarray(row, np.uint8)) for row in np.asarray(together).reshape(jax.process_count(), -1)]


def from_process_0(text: str) -> str:
    """Return the text of process 0 on all processes.

    It travels through the coordination service: programs on the devices time out sooner.
    """
    if jax.process_count() == 1:
        return text
    client, key = ocp.multihost.get_jax_distributed_client(), f"ringformer/process_0/{next(_numbers)}"
    if jax.process_index() == 0:
        client.key_value_set(key, _SENT + text)
    return client.blocking_key_value_get(key, int(1000 * ANSWER_SECONDS)).removeprefix(_SENT)
