"""Messages that all processes of a run receive, either from every process or from process 0.

They travel through JAX's coordination service, because programs on the devices time out sooner.
"""

import itertools
import json
from collections.abc import Iterable
from typing import Any

import jax
import orbax.checkpoint as ocp

WAIT_SECONDS = 3600.0
"""Longest wait for a message, in seconds: its sender may be reading a checkpoint, or waiting for the lock of another
run. Lost and stalled processes are noticed sooner (`peers.py`, `watchdog.py`)."""

_numbers = itertools.count()
"""Counter that numbers the messages, so that each has its own key."""


def from_all(value: Any) -> list[Any]:
    """Return the JSON values that all processes pass, in order of process index. Every process must call this."""
    return _exchange(value, range(jax.process_count())) if jax.process_count() > 1 else [value]


def from_process_0(value: Any) -> Any:
    """Return the JSON value that process 0 passes. Every process must call this."""
    return _exchange(value, [0])[0] if jax.process_count() > 1 else value


def _exchange(value: Any, senders: Iterable[int]) -> list[Any]:
    client = ocp.multihost.get_jax_distributed_client()
    key = f"ringformer/agreement/{next(_numbers)}/"
    if jax.process_index() in senders:
        client.key_value_set(f"{key}{jax.process_index()}", json.dumps(value))
    milliseconds = int(1000 * WAIT_SECONDS)
    return [json.loads(client.blocking_key_value_get(f"{key}{sender}", milliseconds)) for sender in senders]
