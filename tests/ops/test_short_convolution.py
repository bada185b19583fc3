"""A short convolution along rings, against a token at a time in float64."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ringformer.ops.layouts import permutation
from ringformer.ops.short_convolution import short_convolution
from tests.helpers import relative_error
from tests.ops.delta_rule.reference import convolution

SLOW = [
    (8, "contiguous", 1, 1),
    (8, "zigzag", 2, 1),
    (6, "zigzag", 3, 1),
    (5, "zigzag", 1, 1),
    (8, "zigzag", 1, 2),
    (8, "zigzag", 2, 2),
    (8, "zigzag", 8, 1),
    (8, "contiguous", 4, 1),
    (1, "zigzag", 1, 1),
]


@pytest.mark.parametrize("documents", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("devices", "layout", "ulysses", "rings"),
    [(8, "zigzag", 1, 1), *(pytest.param(*ring, marks=pytest.mark.slow) for ring in SLOW)],
)
def test_a_ring_reads_the_tails_of_its_neighbours(devices, layout, ulysses, rings, documents):
    rng = np.random.default_rng(0)
    B, T, c, W = 2, 8 * devices, 6, 4
    x, dy = rng.standard_normal((2, B, T, c)).astype(np.float32)
    weight = rng.standard_normal((c, W)).astype(np.float32)
    ids = np.sort(rng.integers(0, 9, (B, T)), axis=1).astype(np.int32) if documents else None
    of_rings = []
    for part in np.split(np.arange(T), rings):
        of_rings.append(
            convolution(x[:, part], weight, None if ids is None else ids[:, part], dy[:, part].astype(float))
        )
    y, dx, dweights = zip(*of_rings, strict=True)
    expected = np.concatenate(y, axis=1), np.concatenate(dx, axis=1), sum(dweights)

    mesh = Mesh(np.array(jax.devices()[:devices]), ("sp",))
    convolve = partial(short_convolution, axis_name="sp", layout=layout, ulysses=ulysses, rings=rings)

    def of_device(x, weight, ids, dy):
        y, vjp = jax.vjp(lambda x, weight: convolve(x, weight, segment_ids=ids), x, weight)
        return y, *vjp(dy)

    tokens = P(None, "sp")
    run = jax.shard_map(of_device, mesh=mesh, in_specs=(tokens, P(), tokens, tokens), out_specs=(tokens, tokens, P()))
    order = permutation(layout, T, devices // ulysses, rings)
    x, ids, dy = jax.tree.map(lambda a: a[:, order], (x, ids, dy))
    y, dx, dweight = jax.jit(run)(x, weight, ids, dy)
    natural = np.argsort(order)
    for found, wanted in zip((y[:, natural], dx[:, natural], dweight), expected, strict=True):
        assert relative_error(found, wanted) <= 5e-7


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((1, 8, 6), (5, 4)), {}, "weight (5, 4) of 6 channels"),
        (((1, 8, 6), (6, 4)), {"layout": "striped"}, "no two of its tokens are neighbours"),
        (((1, 2, 6), (6, 4)), {}, "2 tokens of a device in 1 intervals are too short for a convolution of 4"),
    ],
)
def test_arguments_that_are_refused(as_for_users, shapes, options, message):
    x, weight = (np.zeros(shape, np.float32) for shape in shapes)
    with pytest.raises(ValueError) as caught:
        short_convolution(x, weight, axis_name=None, **options)
    assert message in str(caught.value)
