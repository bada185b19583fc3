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


def gathered_forward(rank: Rank, states: list[Softmax], keys: list[Keys]) -> list[Softmax]:
    """Add the keys of all ranks to the running softmax of every query, as `ring_forward`."""
    states = rank.attend(states, keys, OWN)
    return rank.attend_to_others(states, rank.gathered(keys))


def gathered_backward(
    rank: Rank,
    dqs: list[jax.Array],
    own_keys: Callable[..., list[Keys]],
    k_and_v: tuple[jax.Array, jax.Array],
    rows: list[Cotangents],
) -> tuple[list[jax.Array], list[KeyGradients]]:
    """Add to dq, and return the gradients of the rank's own keys, as `ring_backward`."""
    others = rank.gathered(own_keys(*k_and_v))
    dqs, of_others = rank.differentiate_others(dqs, others, rows)
    dkeys = [rank.ring.scattered(gradients) for gradients in of_others]
    # As in ring_backward: gathered keys take memory enough.
    (dqs, dkeys), k_and_v = lax.optimization_barrier(((dqs, dkeys), k_and_v))
    return rank.differentiate(dqs, dkeys, own_keys(*k_and_v), rows, OWN)
