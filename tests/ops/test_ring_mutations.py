"""Ways of getting the ring wrong, each of which the comparison with dense attention must catch."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from ringformer.ops import online_softmax
from ringformer.ops.blockwise_attention import block_backward, block_forward
from ringformer.ops.kernels.block_kernels import BLOCK_KERNELS
from ringformer.ops.online_softmax import Softmax
from ringformer.ops.varying_axes import vary_like
from tests.helpers import errors
from tests.ops.rings import arrays, dense, on_ring


def drop_hops(which):
    """Forget the blocks of one call of `block_forward`: 0 own, 1 those of the loop, 2 the last."""
    calls = []

    def forward(state, *rest):
        calls.append(None)
        return state if len(calls) == which + 1 else block_forward(state, *rest)

    return {"forward": forward}


def merge_normalised_blocks():
    """Sum outputs that were each divided by their own block's denominator."""

    def forward(state, queries, keys, work_list, scale):
        empty = vary_like(online_softmax.init(state.m.shape, state.o.shape[-1]), queries, keys)
        o = online_softmax.output(block_forward(empty, queries, keys, work_list, scale))
        return Softmax(state.o + o, jnp.zeros_like(state.m), jnp.ones_like(state.l))

    return {"forward": forward}


def swap_dk_and_dv():
    def backward(*args):
        dq, dkeys = block_backward(*args)
        return dq, dkeys._replace(kv=dkeys.kv[::-1])

    return {"backward": backward}


def probabilities_of_the_block():
    """Take the block's own maximum and denominator in the backward, not the row's final ones."""

    def backward(dq, queries, keys, rows, work_list, scale):
        empty = vary_like(online_softmax.init(rows.rows.shape[1:], queries.q.shape[-1]), queries, keys)
        block = block_forward(empty, queries, keys, work_list, scale)
        own = jnp.stack([*online_softmax.shift_and_weight(block.m, block.l), rows.rows[2]])
        return block_backward(dq, queries, keys, rows._replace(rows=own), work_list, scale)

    return {"backward": backward}


def drop_backward_hop():
    calls = []

    def backward(dq, queries, keys, *rest):
        calls.append(None)
        new, dkeys = block_backward(dq, queries, keys, *rest)
        return (dq, jax.tree.map(jnp.zeros_like, dkeys)) if len(calls) == 1 else (new, dkeys)

    return {"backward": backward}


MUTATIONS = {
    "own block forgotten": (partial(drop_hops, 0), {"o", "lse", "dq", "dk", "dv"}),
    "middle hops forgotten": (partial(drop_hops, 1), {"o", "lse", "dq", "dk", "dv"}),
    "last hop forgotten": (partial(drop_hops, 2), {"o", "lse", "dq", "dk", "dv"}),
    "blocks normalised before they are merged": (merge_normalised_blocks, {"o", "lse", "dq", "dk", "dv"}),
    "dk and dv swapped": (swap_dk_and_dv, {"dk", "dv"}),
    "per-block softmax in the backward": (probabilities_of_the_block, {"dq", "dk", "dv"}),
    "first backward hop forgotten": (drop_backward_hop, {"dq", "dk", "dv"}),
}


SLOW_MUTATIONS = "own block forgotten", "last hop forgotten"


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x in SLOW_MUTATIONS else ()) for x in MUTATIONS]
)
def test_mutations_are_caught(name, monkeypatch):
    """Each way of getting the ring wrong exceeds the tolerance in just the arrays that it spoils."""
    mutate, spoiled = MUTATIONS[name]
    monkeypatch.setitem(BLOCK_KERNELS, "xla", BLOCK_KERNELS["xla"]._replace(**mutate()))
    inputs, cotangents = arrays(4 * 4)
    found = errors(on_ring(4, "zigzag", inputs, cotangents), dense(inputs, cotangents))
    assert {array for array, error in found.items() if error > 1e-5} == spoiled, found
