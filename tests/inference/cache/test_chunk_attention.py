"""A chunk's attention to a sharded cache, piece by piece, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ringformer.inference.cache.arrays import Cache, Entries, as_entries
from ringformer.inference.cache.chunk_attention import Reads, attend_cached, softmax_of
from ringformer.inference.cache.slots import Pieces, Slots
from ringformer.ops import online_softmax
from ringformer.ops.online_softmax import Softmax
from ringformer.parallel.mesh import make_mesh
from tests.helpers import normal, relative_error

RANKS, L, B, T, H, K, S, d = 4, 3, 2, 8, 4, 2, 22, 16
"""T and S are those of a rank."""
ENTRIES = P(None, None, None, "sp")


def cache_of(held, int8=False):
    """A cache of random entries; `held` [B, ranks, S]: slots that hold a token."""
    k, v = (Entries(jnp.asarray(normal(i, L, held.shape[0], K, RANKS * S, d), jnp.float32)) for i in (1, 2))
    if int8:
        k, v = (as_entries(x.values, Entries(jnp.int8(0), jnp.float32(0))) for x in (k, v))
    return Cache(k, v, jnp.where(held.reshape(held.shape[0], -1), 5, -1))


def slots_of(held) -> Slots:
    slots = Slots(len(held), RANKS, S)
    slots.take_chunk(np.where(held, 5, -1))
    return slots


def dense(q, cache, layer):
    """o and lse of queries [B, T, H, d] to all valid keys of a layer, in float64."""
    k, v = (np.asarray(x.as_dtype(jnp.float32), np.float64)[layer].repeat(H // K, axis=1) for x in cache[:2])
    s = np.einsum("bthd,bhsd->bhts", np.asarray(q, np.float64), k) / np.sqrt(d)
    p = np.exp(s) * (np.asarray(cache.positions) >= 0)[:, None, None]
    return np.einsum("bhts,bhsd->bthd", p, v) / p.sum(-1).swapaxes(1, 2)[..., None], np.log(p.sum(-1))


def on_ring(q, cache, layer, reads, pieces):
    """Run `attend_cached` on a ring, queries and slots sharded; return o [B, T, H, d] and lse [B, H, T]."""
    mesh = make_mesh(f"1,1,1,{RANKS}", jax.devices()[:RANKS])
    entries = Entries(ENTRIES, None if cache.k.scales is None else ENTRIES)
    specs = P(None, "sp"), Cache(entries, entries, P(None, "sp")), P(), Pieces(P(), P())

    def run(q, cache, layer, pieces):
        return attend_cached(q, cache, layer, reads, pieces, "sp", kernel="xla", q_chunk=4, k_chunk=4)

    rows = P(None, "sp")
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=Softmax(rows, rows, rows))
    state = jax.jit(mapped)(q, cache, jnp.int32(layer), pieces)
    return online_softmax.output(state), online_softmax.log_sum_exp(state.m, state.l).swapaxes(1, 2)


def some_held(rows, seed=0):
    """Slots of a long text of whole pieces, then with holes in some rows and ranks, and a token in the last slot."""
    held = np.zeros((rows, RANKS, S), bool)
    held[:, :, :14] = True
    held[:, :, 14:20] = np.random.default_rng(seed).random((rows, RANKS, 6)) < 0.5
    held[:, :, -1] = True
    return held


@pytest.mark.usual("4-queries", "5-queries", "22-queries")
@pytest.mark.parametrize("travels", ["keys", "queries"])
@pytest.mark.parametrize("piece", [4, 5, 22])
def test_pieces_of_a_cache(travels, piece):
    """Whole pieces and pieces with holes; pieces that do not divide the slots, and one of all slots."""
    held = some_held(B)
    cache, pieces = cache_of(held), slots_of(held).pieces(piece)
    assert pieces.counts.tolist() == {4: [3, 3], 5: [2, 3], 22: [0, 1]}[piece]
    q = jnp.asarray(normal(0, B, RANKS * T, H, d), jnp.float32)
    found = on_ring(q, cache, 1, Reads(S, piece, travels, holes=True), pieces)
    for x, expected in zip(found, dense(q, cache, 1), strict=True):
        assert relative_error(x, expected) <= 1e-6


@pytest.mark.parametrize("travels", ["keys", "queries"])
def test_whole_pieces_need_no_masks(travels):
    held = np.zeros((B, RANKS, S), bool)
    held[:, :, :20] = True
    cache, pieces = cache_of(held), slots_of(held).pieces(4)
    q = jnp.asarray(normal(0, B, RANKS * T, H, d), jnp.float32)
    found = on_ring(q, cache, 2, Reads(S, 4, travels), pieces)
    for x, expected in zip(found, dense(q, cache, 2), strict=True):
        assert relative_error(x, expected) <= 1e-6


def test_a_row_without_keys_sees_nothing():
    """Its log-sum-exp is -inf, and joining it to another state changes nothing."""
    held = some_held(B)
    held[1] = False
    cache, pieces = cache_of(held), slots_of(held).pieces(5)
    q = jnp.asarray(normal(0, B, RANKS * T, H, d), jnp.float32)
    o, lse = on_ring(q, cache, 0, Reads(S, 5, "queries", holes=True), pieces)
    assert (np.asarray(lse[1]) == -np.inf).all() and (np.asarray(o[1]) == 0).all()
    nothing, other = (softmax_of(*x) for x in ((o, lse), (normal(5, *o.shape), normal(6, *lse.shape))))
    for joined in (online_softmax.join(nothing, other), online_softmax.join(other, nothing)):
        np.testing.assert_allclose(online_softmax.output(joined)[1], other.o[1], rtol=1e-6)


def test_rows_share_a_cache_of_one_row():
    held = some_held(1)
    cache, pieces = cache_of(held), slots_of(held).pieces(4)
    q = jnp.asarray(normal(0, B, RANKS * T, H, d), jnp.float32)
    found = on_ring(q, cache, 1, Reads(S, 4, "queries", holes=True), pieces)
    repeated = jax.tree.map(lambda x, axis: jnp.repeat(x, B, axis), cache, Cache(Entries(1), Entries(1), 0))
    for x, expected in zip(found, dense(q, repeated, 1), strict=True):
        assert relative_error(x, expected) <= 1e-6


def test_int8_entries():
    """Read as they are stored; and stored within a 254th of a token's largest value."""
    held = some_held(B)
    cache, pieces = cache_of(held, int8=True), slots_of(held).pieces(5)
    q = jnp.asarray(normal(0, B, RANKS * T, H, d), jnp.float32)
    found = on_ring(q, cache, 1, Reads(S, 5, "queries", holes=True), pieces)
    for x, expected in zip(found, dense(q, cache, 1), strict=True):
        assert relative_error(x, expected) <= 1e-6
    exact = cache_of(held)
    for stored, x in zip(cache[:2], (exact.k.values, exact.v.values), strict=True):
        assert stored.values.dtype == jnp.int8
        largest = np.abs(np.asarray(x)).max(axis=-1, keepdims=True)
        assert (np.abs(np.asarray(stored.as_dtype(jnp.float32)) - x) <= largest / 254 * 1.001).all()


@pytest.mark.parametrize(("dtype", "entry", "output"), [("bfloat16", 1.7e-3, 4.3e-3), ("int8", 6.5e-3, 1.5e-2)])
def test_what_a_cache_dtype_costs(dtype, entry, output):
    """Relative errors of entries, and of attention to 4,096 of them with logits of a standard deviation of 3, against
    float64 (docs/inference.md has these numbers)."""
    k, v, q = normal(0, 4096, 128), normal(1, 4096, 128), 3 * normal(2, 16, 128)
    like = Entries(jnp.int8(0), jnp.float32(0)) if dtype == "int8" else Entries(jnp.bfloat16(0))

    def stored(x):
        return np.asarray(as_entries(jnp.asarray(x, jnp.float32), like).as_dtype(jnp.float32), np.float64)

    def attention(k, v):
        p = np.exp(q.astype(np.float64) @ k.T / np.sqrt(128))
        return p @ v / p.sum(axis=-1, keepdims=True)

    assert relative_error(stored(k), k) == pytest.approx(entry, rel=0.03)
    exact = attention(k.astype(np.float64), v.astype(np.float64))
    assert relative_error(attention(stored(k), stored(v)), exact) == pytest.approx(output, rel=0.03)


def test_zero_is_stored_as_zero():
    entries = as_entries(jnp.zeros((2, 3)), Entries(jnp.int8(0), jnp.float32(0)))
    np.testing.assert_array_equal(entries.as_dtype(jnp.float32), np.zeros((2, 3)))
