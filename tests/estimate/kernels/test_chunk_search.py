"""The search for chunks: cycles of known answer instead of a compiler's."""

import pytest

from ringformer.estimate.kernels.chunk_search import SIZES, STRETCH, best_of, ideal_cycles, search, stretch_cycles
from ringformer.estimate.kernels.pair_kernels import Pair, TooLarge
from ringformer.estimate.kernels.slot_use import SlotUse


def use(cycles, hbm_bytes=0.0):
    return SlotUse(cycles, {}, 0, 0, hbm_bytes, 0)


def count(fits=lambda pair: True, tried=None, step=100.0):
    """A kernel that reaches the ideal, but for some cycles at each step."""

    def count(generation, kind, pair):
        if tried is not None:
            tried.append((kind, pair.q_chunk, pair.k_chunk))
        if not fits(pair):
            raise TooLarge("no room")
        cycles = pair.ideal_cycles(generation, kind) + step
        return {"whole": use(cycles), "masked": use(cycles), "visit": use(0)}

    return count


def test_a_stretch_is_all_of_its_pairs():
    """With chunks of a half: one pair below the diagonal, two on it, two visits."""
    half = Pair(STRETCH // 2, STRETCH // 2)
    uses = {"whole": use(100.0), "masked": use(130.0), "visit": use(7.0)}
    assert stretch_cycles("forward", half, uses, "v5e") == 100 + 2 * 130 + 2 * 7
    wide = Pair(STRETCH // 2, STRETCH)
    assert stretch_cycles("forward", wide, uses, "v5e") == 2 * 130 + 2 * 7
    assert stretch_cycles("backward", wide, uses, "v5e") == 2 * 130 + 7


def test_bytes_count_where_they_take_longer():
    bytes_per_cycle = 819e9 / 1.5e9
    uses = {"whole": use(100.0, 200 * bytes_per_cycle), "masked": use(130.0), "visit": use(0.0)}
    assert stretch_cycles("forward", Pair(STRETCH // 2, STRETCH // 2), uses, "v5e") == pytest.approx(200 + 2 * 130)


def test_the_ideal_is_two_forwards_and_a_backward_of_the_causal_half():
    flops = (2 * 2 + 5) * 2 * 128 * STRETCH * (STRETCH + 1) / 2
    assert sum(ideal_cycles("v5e", kind, 128) for kind in ("forward", "backward")) == pytest.approx(flops / 131072)


@pytest.mark.parametrize(("step", "best"), [(0.0, (512, 512)), (100.0, (1024, 1024)), (20000.0, (2048, 2048))])
def test_the_best_is_found(step, best):
    """Small chunks waste least on the diagonal, large ones have the fewest steps. All of its neighbours were tried."""
    found = list(search("v5e", 128, count(step=step)))
    assert best_of(found)[:2] == best and best_of(found).share_of_ideal < 1
    tried = [candidate[:2] for candidate in found]
    assert len(set(tried)) == len(tried) < len(SIZES) ** 2
    near = [(q, k) for q in SIZES for k in SIZES if {q / best[0], k / best[1]} in ({1, 2}, {1, 0.5}, {2}, {0.5})]
    assert near and set(near) <= set(tried)
    for candidate in found:
        assert (candidate.share_of_ideal is None) == bool(candidate.why)


def test_what_cannot_be_better_is_not_compiled():
    """Larger than too large; and the backward of one whose forward alone is too slow."""
    tried = []
    found = list(search("v4", 128, count(lambda pair: pair.k_chunk < 1024, tried)))
    assert best_of(found)[1] == 512
    assert {(q, k) for _, q, k in tried if q >= 1024 and k >= 1024} == {(1024, 1024)}

    tried = []
    found = list(search("v5e", 128, count(tried=tried, step=20000.0)))
    slower = [c[:2] for c in found if c.why == "slower than the best by its forward alone"]
    assert slower and all(("backward", *chunks) not in tried and ("forward", *chunks) in tried for chunks in slower)


def test_none_that_fits_is_an_error():
    with pytest.raises(
        ValueError, match="no candidate fits: 1024 x 1024: too large for the chip's VMEM; 512 x 512: too"
    ):
        best_of(list(search("v5e", 128, count(lambda pair: False))))
