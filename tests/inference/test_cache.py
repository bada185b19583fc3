"""Where tokens go: no two into one slot, the ranks evenly, padding written over."""

import numpy as np
import pytest

from ringformer.inference.cache import Slots
from ringformer.inference.cached_attention import cheaper_to_move
from ringformer.models.families.llama import LlamaConfig
from ringformer.ops.layouts import VISIBLE, permutation


@pytest.mark.parametrize("layout", VISIBLE)
def test_no_slot_is_given_twice(layout):
    """Chunks with padding, and tokens one by one, to the last slot of a ring of four."""
    slots, rng, taken = Slots(4, 40), np.random.default_rng(0), set()
    while slots.room >= 24:
        count = int(rng.integers(1, 17))
        filled = (permutation(layout, 24, 4) < count).reshape(4, 6)
        starts = slots.take_chunk(filled)
        new = {(rank, int(starts[rank]) + i) for rank, i in zip(*np.nonzero(filled), strict=True)}
        assert len(new) == count and not new & taken and (starts + 6 <= 40).all()
        taken |= new
        for _ in range(8):
            at = slots.take()
            assert at not in taken
            taken.add(at)
        assert slots.free == 160 - len(taken) and slots.top == 1 + max(slot for _, slot in taken)
    taken |= {slots.take() for _ in range(slots.free)}
    assert taken == {(rank, slot) for rank in range(4) for slot in range(40)}
    with pytest.raises(ValueError, match="the cache is full"):
        slots.take()
    with pytest.raises(ValueError, match="4 tokens do not fit in the cache; it has room for 0"):
        slots.take_chunk(np.ones((4, 1), bool))


def test_generated_tokens_are_striped_over_the_ring():
    slots = Slots(4, 10)
    assert [slots.take() for _ in range(6)] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1)]


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
