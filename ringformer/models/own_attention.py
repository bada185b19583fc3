"""Attentions of your own: functions that take the place of `ring_attention` in the layers of any family."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class OwnAttention(NamedTuple):
    """A registered attention."""

    attend: Callable[..., Any]
    """Function with the arguments of `ring_attention`: `attend(q, k, v, *, axis_name, **options) -> o`."""
    visible: Callable[[jax.Array, jax.Array, int | None], jax.Array] | None
    """`visible(query, key, window) -> bool`, by position, for decoding with a cache; None: the model cannot decode."""


class UnknownAttention(ValueError):
    """Raised for a name that no attention is registered under."""


REGISTERED: dict[str, OwnAttention] = {}
ATTENTION = ("vanilla", "memory_efficient", "blockwise", "ring")
"""Columns of the paper's Table 3. vanilla materializes the [T, S] logits; memory_efficient attends chunk by chunk;
blockwise also computes the feed-forward chunk by chunk; ring distributes blockwise over the mesh axis `sp`."""


def register_attention(
    name: str,
    attend: Callable[..., Any],
    visible: Callable[[jax.Array, jax.Array, int | None], jax.Array] | None = None,
) -> None:
    """Register an attention under a name for `--config.model.attention`.

    Inside the train step's `shard_map`, every layer calls `attend(q, k, v, axis_name=..., layout=..., segment_ids=...,
    **options)` with its rotated q [B, T, H, d] and its k, v [B, T, K, d], local to the device, and with all options
    that `ring_attention` would get from the config; it returns o [B, T, H, d].

    Args:
      visible: whether a query at position [B, 1] sees a key at position [B, S], both int32, in a layer with this window
        (None: without one), which `attend` gets as well. It alone decides, to decode tokens after a prompt, which
        `attend` reads whole. None: generation is refused.

    Raises ValueError if the name is taken.
    """
    if name in ATTENTION or name in REGISTERED:
        raise ValueError(f"attention {name!r} is registered already: choose another name")
    REGISTERED[name] = OwnAttention(attend, visible)
