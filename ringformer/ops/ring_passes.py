"""Ring attention of one rank, forward and backward (paper, section 3, algorithm 1).

    forward     the rank's own block (step 0), then steps 1 .. n-1.
                n-1 hops of [k, v] in the input dtype; every hop starts before the block that hides it.
    backward    steps 1 .. n-1, then the own block. The gradients of keys start on the first rank that the keys visit,
                and follow them one hop behind. The own block hides the hop that brings them home.
                n-1 hops of [k, v], n-1 of float32 [dk, dv].

At step t, a rank computes with keys that made t hops. Segment ids and a bias hop with [k, v], and the gradients of the
bias with [dk, dv]. Where a kernel adds to the gradients of two streams, those of the first hop a block earlier.

`rank.py` has what a rank does at a step. A ring that gathers all keys at once has other passes (`gathered_passes.py`),
and so has a window (`window_passes.py`). `ring_vjp.py` makes a differentiable function of the passes.
"""

from collections.abc import Callable

import jax
from jax import lax

from ringformer.ops.blockwise_attention import Cotangents, KeyGradients, Keys
from ringformer.ops.online_softmax import Softmax
from ringformer.ops.rank import OWN, Rank

LOOP = "ring"
"""Name scope of the loops over hops, by which readers of the compiled program recognise them."""


def ring_forward(rank: Rank, states: list[Softmax], keys: list[Keys]) -> list[Softmax]:
    """Add the keys of all ranks to the running softmax of every query.

    Args:
      states, keys: of each stream; a plain ring has one.
    """
    n = rank.ring.size

    def block_and_hop(step, carry):
        states, keys = carry
        arriving = rank.shift(keys)
        states = rank.attend(states, keys, step)
        return rank.in_order(states, arriving)

    if n > 1:
        carry = block_and_hop(OWN, (states, keys))
        with jax.named_scope(LOOP):
            carry = lax.fori_loop(1, n - 1, block_and_hop, carry, unroll=rank.blocks.code.unroll)
        states, keys = carry
    return rank.attend(states, keys, n - 1)


def ring_backward(
    rank: Rank,
    dqs: list[jax.Array],
    own_keys: Callable[..., list[Keys]],
    k_and_v: tuple[jax.Array, jax.Array],
    rows: list[Cotangents],
) -> tuple[list[jax.Array], list[KeyGradients]]:
    """Add to dq, and return the gradients of the rank's own keys, summed over all ranks.

    Args:
      dqs, rows: of each stream; a plain ring has one.
      own_keys: stacks k and v, and returns the keys of each stream.
    """
    n = rank.ring.size

    def block_and_hop(step, carry):
        dqs, dkeys, keys = carry
        arriving = rank.shift(keys)
        dqs, dkeys = rank.differentiate(dqs, dkeys, keys, rows, step)
        dqs, arriving = rank.in_order(dqs, arriving)
        return dqs, dkeys, arriving

    dkeys = rank.no_gradients
    if n > 1:
        keys = rank.shift(own_keys(*k_and_v))
        if n > 2:
            # Before the loop, whose carry needs arrays: no rank has computed gradients before this step.
            carry = block_and_hop(1, (dqs, dkeys, keys))
            with jax.named_scope(LOOP):
                carry = lax.fori_loop(2, n - 1, block_and_hop, carry, unroll=rank.blocks.code.unroll)
            dqs, dkeys, keys = carry
        dqs, dkeys = rank.differentiate(dqs, dkeys, keys, rows, n - 1)
    # The barrier keeps the compiler from stacking the own keys once, for their hop and for this block: they would be
    # kept through the loop, beside k and v.
    (dqs, dkeys), k_and_v = lax.optimization_barrier(((dqs, dkeys), k_and_v))
    return rank.differentiate(dqs, dkeys, own_keys(*k_and_v), rows, OWN)
