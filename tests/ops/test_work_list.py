"""The work list of a block, by brute force over its elements."""

import numpy as np
import pytest

from ringformer.ops.layouts import PARTS, VISIBLE
from ringformer.ops.work_list import cut_axis, default_chunk, visible_pairs

LENGTHS_AND_CHUNKS = [
    (12, 4, 4),
    (12, 12, 12),
    (12, 1, 1),
    (10, 4, 4),
    (10, 3, 4),
    (14, 4, 5),
    (10, 5, 2),
    (2, 1, 1),
    (12, 7, 7),
    (18, 4, 4),
    (10, 100, 3),
]


def elements(unmasked_and_masked, q, k):
    """Times each (query, key) of the block is computed, and the mask `row + offset >= column` of each pair."""
    seen = np.zeros((q.start.max() + q.size, k.start.max() + k.size), int)
    for pairs, masked in zip(unmasked_and_masked, (False, True), strict=True):
        for i, j, offset in zip(*pairs, strict=True):
            row, column = np.arange(q.size)[:, None], np.arange(k.size)
            visible = (row + offset >= column) & (row >= q.fresh[i]) & (column >= k.fresh[j]) & (column < k.used[j])
            if not masked:
                assert visible.all(), "an unmasked pair holds a hidden element"
            assert visible.any(), "a pair with nothing to compute"
            seen[q.start[i] : q.start[i] + q.size, k.start[j] : k.start[j] + k.size] += visible
    return seen


def visible_of_tables(layout, source, T):
    mask, part = np.zeros((T, T), int), T // PARTS[layout]
    for q_part, k_part, offset in VISIBLE[layout][source]:
        mask[q_part * part :, k_part * part :][:part, :part] += np.arange(part)[:, None] + offset >= np.arange(part)
    return mask


@pytest.mark.parametrize("layout", VISIBLE)
@pytest.mark.parametrize("source", ("own", "earlier", "later"))
@pytest.mark.parametrize("T, q_chunk, k_chunk", LENGTHS_AND_CHUNKS)
def test_pairs_cover_every_visible_element_exactly_once(layout, source, T, q_chunk, k_chunk):
    """Ragged chunks, unequal chunks and zigzag's parts included."""
    q, k = (cut_axis(T, PARTS[layout], chunk) for chunk in (q_chunk, k_chunk))
    seen = elements(visible_pairs(layout, source, True, q, k), q, k)
    assert (seen == visible_of_tables(layout, source, T)).all()


@pytest.mark.parametrize("T, S, q_chunk, k_chunk", [(10, 7, 4, 3), (3, 11, 8, 4), (8, 8, 4, 4), (1, 5, 1, 2)])
def test_without_a_causal_mask_every_element_is_covered_once(T, S, q_chunk, k_chunk):
    """Cross attention: as many queries and keys as you like."""
    q, k = cut_axis(T, 1, q_chunk), cut_axis(S, 1, k_chunk)
    assert (elements(visible_pairs("contiguous", "own", False, q, k), q, k) == 1).all()


@pytest.mark.parametrize("layout", VISIBLE)
@pytest.mark.parametrize("source", ("own", "earlier", "later"))
@pytest.mark.parametrize("T, filler, q_chunk, k_chunk", [(16, 1, 4, 4), (16, 3, 8, 4), (24, 5, 4, 6), (16, 7, 8, 8)])
def test_keys_that_fill_a_part_up_are_hidden(layout, source, T, filler, q_chunk, k_chunk):
    parts = PARTS[layout]
    q, k = cut_axis(T, parts, q_chunk), cut_axis(T, parts, k_chunk, filler)
    part = T // parts
    expected = visible_of_tables(layout, source, T) * (np.arange(T) % part < part - filler)
    assert (elements(visible_pairs(layout, source, True, q, k), q, k) == expected).all()


@pytest.mark.parametrize("parts", (1, 2))
@pytest.mark.parametrize("length, chunk", [(12, 4), (14, 4), (10, 4), (6, 100), (2, 1), (4096, None)])
def test_chunks_cover_the_axis_and_never_straddle_a_part(length, chunk, parts):
    """The fresh rows of the chunks are each index of the axis once, in order; no chunk crosses into another part."""
    c = cut_axis(length, parts, chunk)
    fresh = [s + i for s, f in zip(c.start, c.fresh, strict=True) for i in range(f, c.size)]
    assert fresh == list(range(length))
    part = length // parts
    assert (c.start // part == c.part).all() and ((c.start + c.size - 1) // part == c.part).all()
    assert (c.origin == c.part * part).all() and c.size <= (chunk or part)


def test_default_chunk():
    """Sixteen chunks of a shard, of 128 to 1024 tokens."""
    assert [default_chunk(t) for t in (1, 128, 2048, 4096, 4097, 16384, 10**6)] == [128, 128, 128, 256, 257, 1024, 1024]
