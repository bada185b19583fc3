"""Several rings on one mesh axis, each with a sequence of its own."""

import jax
import numpy as np
import pytest

from ringformer.ops import layouts
from ringformer.ops.ring_attention import ring_attention
from tests.dense import attention as exact
from tests.helpers import assert_close, packed_segments, ring_mesh
from tests.ops.rings import HEADS, arrays, on_ring


@pytest.mark.usual("8-2-striped-options2", "8-2-zigzag-options0", "8-8-zigzag-options1")
@pytest.mark.parametrize(
    ("n", "rings", "layout", "options"),
    [
        (8, 2, "zigzag", {}),
        (8, 8, "zigzag", {}),
        (8, 2, "striped", dict(ring="gathered")),
        (8, 2, "zigzag", dict(ulysses=2, ring="both_ways")),
        (6, 3, "contiguous", dict(window=11)),
        pytest.param(8, 4, "zigzag", dict(ulysses=2, window=9, attend_first=2), marks=pytest.mark.slow),
        pytest.param(8, 2, "contiguous", dict(ulysses=2, ring="gathered"), marks=pytest.mark.slow),
    ],
)
def test_each_ring_attends_to_its_own_sequence(n, rings, layout, options):
    """As dense attention to each part of the sequence alone; with documents, a bias and a cotangent of lse."""
    T = n * 8
    inputs, cotangents = arrays(T, bias=True)
    ids = None if "attend_first" in options else packed_segments(2, 2, T, 5)
    pair = None if ids is None else (ids, ids)
    out = on_ring(n, layout, inputs, cotangents, pair, rings=rings, q_chunk=4, k_chunk=4, **options)
    known = {name: options[name] for name in ("window", "attend_first") if name in options}
    parts = []
    for tokens in np.split(np.arange(T), rings):
        own = {name: x[:, tokens] for name, x in inputs.items()}
        of_own = dict(do=cotangents["do"][:, tokens], dlse=cotangents["dlse"][:, :, tokens])
        parts.append(exact(own, of_own, None if ids is None else (ids[:, tokens],) * 2, **known))
    assert_close(out, {x: np.concatenate([p[x] for p in parts], axis=2 if x == "lse" else 1) for x in parts[0]})


@pytest.mark.parametrize("layout", layouts.VISIBLE)
def test_the_order_of_several_rings_is_that_of_each(layout):
    whole = layouts.permutation(layout, 64, 8, 4)
    for first in range(0, 64, 16):
        assert (whole[first : first + 16] == first + layouts.permutation(layout, 16, 2)).all()


@pytest.mark.parametrize(
    ("rings", "axis", "message"),
    [(3, "sp", "rings=3 does not divide the 8 ranks"), (0, "sp", "rings=0"), (2, None, "rings=2 cuts")],
)
def test_rings_that_the_axis_does_not_have(rings, axis, message):
    x = jax.numpy.ones((1, 64, 2, 8))
    run = jax.shard_map(
        lambda x: ring_attention(x, x, x, axis_name=axis, rings=rings),
        mesh=ring_mesh(8),
        in_specs=HEADS,
        out_specs=HEADS,
    )
    with pytest.raises(ValueError, match=message):
        run(x)
