"""Where tokens go: no two into one slot, the ranks evenly, padding written over; and which pieces hold them all."""

import numpy as np
import pytest

from ringformer.inference.cache.chunk_attention import cheaper_to_move
from ringformer.inference.cache.slots import Slots
from ringformer.models.families.llama import LlamaConfig
from ringformer.ops.layouts import VISIBLE, permutation


def chunk(filled):
    """Positions of a chunk of one row [1, ranks, T]: 0 where it has a token."""
    return np.where(filled, 0, -1)[None]


@pytest.mark.parametrize("layout", VISIBLE)
def test_no_slot_is_given_twice(layout):
    """Chunks with padding, and tokens one by one, to the last slot of a ring of four."""
    slots, rng, taken = Slots(1, 4, 40), np.random.default_rng(0), set()
    one = np.array([0])
    while slots.room >= 24:
        count = int(rng.integers(1, 17))
        filled = (permutation(layout, 24, 4) < count).reshape(4, 6)
        starts = slots.take_chunk(chunk(filled))
        new = {(rank, int(starts[rank]) + i) for rank, i in zip(*np.nonzero(filled), strict=True)}
        assert len(new) == count and not new & taken and (starts + 6 <= 40).all()
        taken |= new
        for _ in range(8):
            at = slots.take(one)
            assert at not in taken
            taken.add(at)
        assert slots.free == 160 - len(taken) and slots.top == 1 + max(slot for _, slot in taken)
    taken |= {slots.take(one) for _ in range(slots.free)}
    assert taken == {(rank, slot) for rank in range(4) for slot in range(40)}
    with pytest.raises(ValueError, match="the cache is full"):
        slots.take(one)
    with pytest.raises(ValueError, match="4 tokens do not fit in the cache; it has room for 0"):
        slots.take_chunk(chunk(np.ones((4, 1), bool)))


def test_generated_tokens_are_striped_over_the_ring():
    slots = Slots(1, 4, 10)
    assert [slots.take(np.array([0])) for _ in range(6)] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1)]


def test_a_piece_is_whole_if_all_rows_and_ranks_have_all_of_its_tokens():
    """Two rows on two ranks, pieces of three slots, of which the last has two: a chunk of both rows, one of the first
    row, a token of each row and a token of the first."""
    slots = Slots(2, 2, 11)
    slots.take_chunk(np.arange(2 * 2 * 4).reshape(2, 2, 4))
    slots.take_chunk(np.stack([np.arange(4).reshape(2, 2), np.full((2, 2), -1)]))
    pieces = slots.pieces(3)
    assert pieces.order.tolist() == [0, 1, 2, 3] and pieces.counts.tolist() == [1, 1]
    for alive in (True, False, False, True, True, True, True, True, True, True):
        slots.take(np.array([90, 91 if alive else -1]))
    assert slots.pieces(3).counts.tolist() == [1, 3] and slots.free == 0
    assert slots.pieces(11).counts.tolist() == [0, 1]
    whole = Slots(1, 2, 6)
    whole.take_chunk(np.arange(12).reshape(1, 2, 6))
    assert whole.pieces(3).counts.tolist() == [2, 0] and whole.pieces(4).counts.tolist() == [1, 1]


def test_truncated_tokens_free_their_slots():
    """Up to the last slot that still holds a token of any row; the pieces of the others have holes."""
    slots = Slots(2, 2, 6)
    slots.take_chunk(np.stack([np.arange(8).reshape(2, 4), np.arange(8).reshape(2, 4)]))
    slots.truncate(np.array([7, 2]))
    assert slots.free == 2 * 6 - 4 - 3 and slots.pieces(2).counts.tolist() == [0, 2]
    slots.truncate(np.array([2, 2]))
    assert slots.free == 2 * 6 - 2 - 0


@pytest.mark.parametrize(
    ("heads", "new", "cached", "expected"),
    [
        ((32, 32), 1000, 1, "queries"),
        ((32, 8), 1000, 1000, "keys"),
        ((32, 8), 1000, 1001, "queries"),
        ((8, 1), 1, 3, "keys"),
        ((8, 1), 1, 4, "queries"),
    ],
)
def test_what_is_cheaper_to_move(heads, new, cached, expected):
    """Of [B, T, H, d] queries there and outputs back against [B, S, K, d] keys and values: new / all >= 2 K / H."""
    H, K = heads
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=H, num_kv_heads=K, head_dim=2
    )
    assert cheaper_to_move(config, new, cached) == expected
