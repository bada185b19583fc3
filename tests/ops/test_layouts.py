"""Which tokens a rank holds, how they get there, and what they see: tables against positions."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ringformer.ops import layouts
from ringformer.ops.layouts import PARTS, VISIBLE
from tests.helpers import ring_mesh

LAYOUTS = ("contiguous", "striped", "zigzag")
RING_SIZES = range(1, 9)
RINGS = [(r, u) for r in RING_SIZES for u in RING_SIZES if r * u <= 8]
"""Ranks of a ring, and devices of a rank."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", RING_SIZES)
def test_permutation_is_what_the_layout_says(layout, n):
    """A permutation, and rank r's shard is the one of the module's definition."""
    T = 6
    tokens = layouts.permutation(layout, n * T, n)
    assert sorted(tokens) == list(range(n * T))
    for r, shard in enumerate(tokens.reshape(n, T)):
        low, high = r, 2 * n - 1 - r
        expected = {
            "contiguous": range(r * T, (r + 1) * T),
            "striped": range(r, n * T, n),
            "zigzag": [*range(low * T // 2, (low + 1) * T // 2), *range(high * T // 2, (high + 1) * T // 2)],
        }[layout]
        assert list(shard) == list(expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("r, u", RINGS)
def test_positions_are_the_permutation(layout, r, u):
    """Each device knows the places of its tokens, in int32: a rank's devices hold consecutive pieces of its shard."""
    run = jax.shard_map(
        lambda: layouts.positions(layout, 6, "sp", u),
        mesh=ring_mesh(r * u),
        in_specs=(),
        out_specs=P("sp"),
        check_vma=False,
    )
    found = jax.jit(run)()
    assert found.dtype == np.int32 and (found == layouts.permutation(layout, r * u * 6, r)).all()


@pytest.mark.parametrize("layout", ("striped", "zigzag"))
@pytest.mark.parametrize("r, u", RINGS)
def test_enter_equals_the_permutation_and_leave_undoes_it(layout, r, u):
    """Moving shards from device to device is the permutation, for floats and integers, and leave inverts it. An even
    number of devices a rank allows odd shards."""
    odd = layout == "zigzag" and u % 2 == 0
    N, mesh = r * u * (5 if odd else 2 * r), ring_mesh(r * u)
    x = np.random.default_rng(r).standard_normal((2, N, 3)).astype(np.float32)
    ids = np.arange(2 * N, dtype=np.int32).reshape(2, N)

    def there_and_back(tree):
        there = jax.tree.map(lambda x: layouts.enter(x, layout, "sp", u), tree)
        return there, jax.tree.map(lambda x: layouts.leave(x, layout, "sp", u), there)

    moved = jax.shard_map(there_and_back, mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"))
    there, back = jax.jit(moved)((x, ids))
    tokens = layouts.permutation(layout, N, r)
    for natural, a, b in zip((x, ids), there, back, strict=True):
        assert (a == natural[:, tokens]).all() and (b == natural).all()


def test_contiguous_moves_nothing():
    """enter and leave of the natural order return the very array."""
    x = np.zeros((1, 4))
    run = jax.shard_map(
        lambda x: (layouts.enter(x, "contiguous", "sp"), layouts.leave(x, "contiguous", "sp")),
        mesh=ring_mesh(2),
        in_specs=P(None, "sp"),
        out_specs=P(None, "sp"),
    )
    assert "ppermute" not in str(jax.make_jaxpr(run)(x)) and "all_to_all" not in str(jax.make_jaxpr(run)(x))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", RING_SIZES)
def test_visible_tables_equal_the_mask_of_positions(layout, n):
    """For every pair of ranks: the table's offset masks are exactly `query position >= key position`."""
    T = 6
    positions = layouts.permutation(layout, n * T, n).reshape(n, T)
    part = T // PARTS[layout]
    for rank in range(n):
        for origin in range(n):
            source = "own" if origin == rank else "earlier" if origin < rank else "later"
            mask = np.zeros((T, T), int)
            for q_part, k_part, offset in VISIBLE[layout][source]:
                visible = np.arange(part)[:, None] + offset >= np.arange(part)
                mask[q_part * part :, k_part * part :][:part, :part] += visible
            assert (mask == (positions[rank][:, None] >= positions[origin])).all(), (rank, origin)


@pytest.mark.parametrize(
    "layout, length, n, numbers",
    [
        ("contiguous", 30, 8, ("30", "8", "24", "32")),
        ("striped", 9, 2, ("9", "2", "8", "10")),
        ("zigzag", 24, 8, ("24", "16", "16", "32")),
        ("zigzag", 3, 4, ("3", "8")),
        ("contiguous", 0, 4, ("0", "4")),
    ],
)
def test_bad_lengths_name_the_numbers_and_a_way_out(layout, length, n, numbers):
    """A length that does not fit raises ValueError with the length, what must divide it, and lengths that fit."""
    with pytest.raises(ValueError) as caught:
        layouts.permutation(layout, length, n)
    message = str(caught.value)
    assert layout in message and all(number in message for number in numbers), message


def test_unknown_layout_is_named():
    """The message holds the wrong name and the known ones."""
    with pytest.raises(ValueError, match=r"striped3.*contiguous, striped, zigzag"):
        layouts.check_layout("striped3", 8, 2)


def test_striped_needs_a_local_length_that_the_ring_divides():
    """The all-to-all of `enter` cannot cut 3 tokens in 2: say so."""
    run = jax.shard_map(
        lambda x: layouts.enter(x, "striped", "sp"), mesh=ring_mesh(2), in_specs=P(None, "sp"), out_specs=P(None, "sp")
    )
    with pytest.raises(ValueError, match=r"3.*2"):
        jax.eval_shape(run, jax.ShapeDtypeStruct((1, 6), np.float32))
