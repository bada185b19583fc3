"""The passes of a ring whose ranks gather all keys at once, instead of sending them from hop to hop.

One block of all other ranks' keys, for each half of the heads, stands for the steps of a ring. The keys of one half
travel while the other half, or the rank's own block, is computed. Backward, a reduce-scatter sums the float32 [dk, dv]
of one half under the other half, or under the own block.
"""

from collections.abc import Callable

import jax
from jax import lax

from ringformer.ops.blockwise_attention import Cotangents, KeyGradients, Keys
from ringformer.ops.online_softmax import Softmax
from ringformer.ops.rank import OWN, Rank
from ringformer.ops.streams import with_shared_ids
from ringformer.ops.work_list import WorkList


def gathered_forward(rank: Rank, states: list[Softmax], keys: list[Keys]) -> list[Softmax]:
    """Add the keys of all ranks to the running softmax of every query, as `ring_forward`."""
    states = rank.attend(states, keys, OWN)
    pairs = _pairs_of_others(rank)
    attended = []
    for state, queries, others in zip(states, rank.queries, _gathered(rank, keys), strict=True):
        attended.append(rank.blocks.forward(state, queries, others, pairs))
    return attended


def gathered_backward(
    rank: Rank,
    dqs: list[jax.Array],
    own_keys: Callable[..., list[Keys]],
    k_and_v: tuple[jax.Array, jax.Array],
    rows: list[Cotangents],
) -> tuple[list[jax.Array], list[KeyGradients]]:
    """Add to dq, and return the gradients of the rank's own keys, as `ring_backward`."""
    pairs = _pairs_of_others(rank)
    new_dqs = []
    dkeys = []
    gathered = _gathered(rank, own_keys(*k_and_v))
    for dq, queries, others, of_stream in zip(dqs, rank.queries, gathered, rows, strict=True):
        new_dq, gradients = rank.blocks.backward(dq, queries, others, of_stream, pairs)
        new_dqs.append(new_dq)
        dkeys.append(rank.ring.scattered(gradients))
    # As in ring_backward: gathered keys take memory enough.
    (dqs, dkeys), k_and_v = lax.optimization_barrier(((new_dqs, dkeys), k_and_v))
    return rank.differentiate(dqs, dkeys, own_keys(*k_and_v), rows, OWN)


def _gathered(rank: Rank, keys: list[Keys]) -> list[Keys]:
    """Gather the keys of all ranks, in the order of the ranks."""
    return [rank.ring.gathered(x) for x in with_shared_ids(rank.streams, keys)]


def _pairs_of_others(rank: Rank) -> WorkList:
    """Make the chunk pairs of the rank's queries and the keys of all other ranks."""
    return rank.attention.work_list_of_others(rank.tokens, rank.length, rank.index)
