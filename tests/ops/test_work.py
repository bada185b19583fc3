"""Work counted where it happens: every chunk pair that a rank executes reports itself from inside the loop."""

from functools import partial

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from ringformer.ops import blockwise_attention, layouts, online_softmax, ring_attention
from ringformer.ops.kernels.block_kernels import BLOCK_KERNELS
from ringformer.ops.work_list import cut_axis
from tests.helpers import normal, packed_segments, ring_mesh

N, d = 8, 8
MATMULS = {"forward": 2, "backward": 5}


@pytest.fixture
def executed(monkeypatch):
    """`executed(T, layout, ...)` runs attention and its gradients on a ring of 8; FLOPs [rank] of each pass."""
    reports, in_backward, programs = [], [], {}
    update, logits, xla = online_softmax.update, blockwise_attention._logits, BLOCK_KERNELS["xla"]

    def report(phase, s):
        flops = 2 * MATMULS[phase] * s.size * d
        jax.debug.callback(lambda rank: reports.append((phase, int(rank), flops)), lax.axis_index("sp"))

    def counted_update(state, s, v):
        report("forward", s)
        return update(state, s, v)

    def counted_logits(*args):
        s, slope = logits(*args)
        if in_backward:
            report("backward", s)
        return s, slope

    def marked_backward(*args):
        in_backward.append(True)
        result = xla.backward(*args)
        in_backward.pop()
        return result

    monkeypatch.setattr(online_softmax, "update", counted_update)
    monkeypatch.setattr(blockwise_attention, "_logits", counted_logits)
    monkeypatch.setitem(BLOCK_KERNELS, "xla", xla._replace(backward=marked_backward))

    def run(T, layout, segment_ids=None, chunk=None, window=None):
        arrays = [normal(i, 1, N * T, 1, d) for i in range(4)]
        tokens = layouts.permutation(layout, N * T, N)
        arrays += [] if segment_ids is None else [segment_ids[:, tokens]]

        def per_device(q, k, v, do, ids=None):
            attention = partial(
                ring_attention.ring_attention,
                axis_name="sp",
                layout=layout,
                segment_ids=ids,
                q_chunk=chunk,
                k_chunk=chunk,
                window=window,
            )
            o, vjp = jax.vjp(attention, q, k, v)
            return o, vjp(do)

        reports.clear()
        key = T, layout, segment_ids is None, chunk, window
        if key not in programs:
            program = jax.shard_map(per_device, mesh=ring_mesh(N), in_specs=P(None, "sp"), out_specs=P(None, "sp"))
            programs[key] = jax.jit(program)
        jax.block_until_ready(programs[key](*arrays))
        jax.effects_barrier()
        flops = {phase: np.zeros(N, int) for phase in MATMULS}
        for phase, rank, amount in reports:
            flops[phase][rank] += amount
        return flops

    return run


def needed(phase, tokens):
    """FLOPs of the pairs that a causal mask over `tokens` leaves."""
    return 2 * MATMULS[phase] * d * tokens * (tokens + 1) // 2


CASES = [
    pytest.param("zigzag", 2048, None, 16, id="default chunks-zigzag"),
    pytest.param("striped", 2048, None, 16, id="default chunks-striped", marks=pytest.mark.slow),
    pytest.param("zigzag", 256, 64, 4, id="four chunks-zigzag"),
    pytest.param("striped", 256, 64, 4, id="four chunks-striped"),
]


@pytest.mark.usual("four chunks-zigzag")
@pytest.mark.parametrize(("layout", "T", "chunk", "nc"), CASES)
def test_balanced_layouts_share_the_work(executed, layout, T, chunk, nc):
    """Ranks differ by at most 2%; together they do at most 1 + 1/nc of what the mask needs, 1.1 by default."""
    for phase, flops in executed(T, layout, chunk=chunk).items():
        ratio = flops.sum() / needed(phase, N * T)
        assert flops.max() <= 1.02 * flops.min(), (phase, flops)
        assert 1 <= ratio <= 1 + 1 / nc, (phase, ratio)
        assert chunk is not None or ratio <= 1.1, (phase, ratio)


@pytest.mark.usual("half a part")
@pytest.mark.parametrize(
    ("layout", "chunk", "window", "most"),
    [("zigzag", 16, 128, 1.15), ("zigzag", 32, 128, 1.27), ("contiguous", 16, 300, 1.15)],
    ids=["half a part", "large chunks", "two parts"],
)
def test_the_work_of_a_window_is_its_pairs(executed, layout, chunk, window, most):
    """Chunks of an eighth and of a quarter of the window, as 512 and 1024 of 4096; a window of more than a part. Only
    ranks that hold the beginning of the sequence have less to do."""
    T = 512 if layout == "zigzag" else 256
    pairs = np.minimum(np.arange(N * T) + 1, window).sum()
    for phase, flops in executed(T, layout, chunk=chunk, window=window).items():
        ratio = flops.sum() / (2 * MATMULS[phase] * d * pairs)
        assert 1 <= ratio <= most, (phase, ratio)
        assert flops[2:].max() == flops[2:].min(), (phase, flops)


def test_contiguous_is_unbalanced(executed):
    """The paper's layout: the last of n ranks does nearly 2n - 1 times the work of the first."""
    for phase, flops in executed(256, "contiguous", chunk=16).items():
        assert (np.diff(flops) > 0).all()
        assert 0.9 * (2 * N - 1) <= flops[-1] / flops[0] <= 2 * N - 1, (phase, flops)
        assert flops.sum() <= (1 + 1 / 16) * needed(phase, N * 256)


def in_common(q_ids, k_ids):
    return np.intersect1d(q_ids, k_ids).size > 0


def interleaved(q_ids, k_ids):
    """Do the ranges of the ids meet?"""
    return q_ids.min() <= k_ids.max() and k_ids.min() <= q_ids.max()


def pairs_with_work(T, layout, chunk, ids, common=in_common):
    """Brute force, int [rank]: chunk pairs that hold a visible element, and keys of a segment of the queries."""
    positions = layouts.permutation(layout, N * T, N).reshape(N, T)
    chunks = cut_axis(T, layouts.PARTS[layout], chunk)
    slices = [slice(start, start + chunks.size) for start in chunks.start]
    count = np.zeros(N, int)
    for rank in range(N):
        for origin in range(N):
            for q in slices:
                for k in slices:
                    q_at, k_at = positions[rank][q], positions[origin][k]
                    visible = (q_at[:, None] >= k_at).any()
                    count[rank] += visible and common(ids[0, q_at], ids[0, k_at])
    return count


@pytest.mark.usual("striped")
@pytest.mark.parametrize("layout", layouts.VISIBLE)
def test_chunks_without_a_common_segment_are_not_computed(executed, layout):
    """Packed documents: exactly the chunk pairs that share a document run, and none of a hop that shares nothing.

    With packed attention "sequence" text is one segment and every token of padding its own, which costs the diagonal.
    Striped chunks are wide: those of a stripe hold every n-th token of it each, and the diagonal is one of stripes.
    """
    T, chunk, filled = 64, 16, 300
    documents = packed_segments(5, 1, N * T, 6)
    padded = np.maximum(np.arange(N * T, dtype=np.int32) - filled + 2, 1)[None]
    of_documents = pairs_with_work(T, layout, chunk, documents)
    of_padded = pairs_with_work(T, layout, chunk, padded, interleaved)
    if layout == "striped":  # a stripe is 128 tokens, in 8 chunks: two of text and one of both, then one of padding
        assert of_padded.sum() == (3 * 4 // 2 + 1) * N * N
    else:  # a chunk is 16 neighbours: 18 of text and one of both, then 13 of padding
        assert of_padded.sum() == 19 * 20 // 2 + 13 == pairs_with_work(T, layout, chunk, padded).sum()
    for ids, count in ((documents, of_documents), (padded, of_padded)):
        for phase, flops in executed(T, layout, ids, chunk).items():
            assert (flops == count * 2 * MATMULS[phase] * d * chunk * chunk).all(), (phase, flops, count)


def test_whole_hops_without_a_common_segment_cost_nothing(executed):
    """One document per rank: every rank computes its own block and no other."""
    T = 32
    flops = executed(T, "contiguous", np.repeat(np.arange(N, dtype=np.int32), T)[None], chunk=32)
    for phase, amount in flops.items():
        assert (amount == 2 * MATMULS[phase] * d * T * T).all()
