"""What a token at a time loses in bfloat16, against float64 on the same rounded inputs.

An error is at most 1.15 times the one measured when the bound was written (JAX 0.10.2). Casts are compiled as they are
written, as in `tests/ops/test_precision.py`.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ringformer.inference import decode_step, programs
from ringformer.inference.cache.arrays import Cache, Entries, LayerCache, as_entries, layer_cache
from ringformer.inference.cache.token_attention import attend_token, for_tokens
from ringformer.inference.decode_step import decode_hidden, next_logits
from ringformer.inference.sampling import Kind
from ringformer.models.share_products import ALL, own_rows_product
from ringformer.parallel.mesh import make_mesh
from tests.helpers import normal, relative_error
from tests.inference.models import CONFIG, generator, log_probabilities
from tests.models.test_families import tiny

ROOM = 1.15
AS_WRITTEN = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}

jit = partial(jax.jit, compiler_options=AS_WRITTEN)


def rounded(x):
    return np.asarray(x, jnp.bfloat16)


@pytest.mark.parametrize(
    ("mean", "bound"), [(0.0, 5.23e-4), (10.0, 1.39e-4)], ids=["values around 0", "values around 10"]
)
def test_attention_of_a_token(mean, bound):
    """To 1,200 cached keys on a ring of 4, some of whose slots hold nothing, and to its own, which weighs as much as
    hundreds of them; values with a mean, or without."""
    ranks, B, K, G, S, d = 4, 2, 2, 2, 300, 32
    rng = np.random.default_rng(0)
    q = rounded(3 * normal(0, B, K, G, d))
    k = rounded(0.15 * q[:, :, 0].astype(np.float32))
    cached_k, cached_v = rounded(normal(2, B, K, ranks * S, d)), rounded(normal(3, B, K, ranks * S, d) + mean)
    v, valid = rounded(normal(4, B, K, d) + mean), rng.random((B, ranks * S)) < 0.9

    mesh = make_mesh(f"1,1,1,{ranks}", jax.devices()[:ranks])
    sharded = LayerCache(Entries(P(None, None, "sp")), Entries(P(None, None, "sp")), P(None, "sp"))
    attend = partial(attend_token, ring="sp")
    attend = jax.shard_map(attend, mesh=mesh, in_specs=(P(), P(), P(), [sharded]), out_specs=P())
    found = jit(attend)(q, k, v, [LayerCache(Entries(cached_k), Entries(cached_v), valid)])

    pairs = (cached_k, k), (cached_v, v)
    keys, values = (np.concatenate([a, b[:, :, None]], axis=2, dtype=np.float64) for a, b in pairs)
    s = np.einsum("bkgd,bksd->bkgs", q.astype(np.float64), keys) / np.sqrt(d)
    p = np.exp(s) * np.concatenate([valid, np.ones((B, 1))], axis=1)[:, None, None]
    expected = np.einsum("bkgs,bksd->bkgd", p / p.sum(axis=-1, keepdims=True), values)
    assert relative_error(found, expected) <= ROOM * bound


@pytest.mark.parametrize("int8", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_attention_of_a_token_to_the_cache_as_a_platform_reads_it(platform, int8):
    """GPUs read words. Two caches, one of which all rows share; exact for the numbers as they are stored."""
    B, K, G, S, d = 2, 2, 2, 24, 16
    q, k, v = (jnp.asarray(rounded(normal(i, *shape))) for i, shape in enumerate(((B, K, G, d), (B, K, d), (B, K, d))))
    caches, keys, values = [], [k[:, :, None]], [v[:, :, None]]
    for i, rows in ((3, B), (4, 1)):
        like = Entries(jnp.int8(0), jnp.float32(0)) if int8 else Entries(jnp.bfloat16(0))
        entries = [as_entries(jnp.asarray(normal(10 * i + j, 1, rows, K, S, d)), like) for j in (0, 1)]
        cache = for_tokens(Cache(*entries, jnp.zeros((rows, S), jnp.int32)), G, platform)
        assert (cache.k.values.dtype == jnp.uint32) == (platform == "gpu")
        caches.append(layer_cache(cache, jnp.int32(0), S))
        for parts, x in zip((keys, values), entries, strict=True):
            parts.append(jnp.broadcast_to(x.as_dtype(jnp.float32)[0], (B, K, S, d)))
    mesh = make_mesh("1,1,1,1", jax.devices()[:1])
    attend = jax.shard_map(partial(attend_token, ring="sp"), mesh=mesh, in_specs=P(), out_specs=P())
    keys, values = (np.concatenate([np.asarray(x, np.float64) for x in parts], axis=2) for parts in (keys, values))
    s = np.einsum("bkgd,bksd->bkgs", np.asarray(q, np.float64), keys) / np.sqrt(d)
    p = np.exp(s)
    expected = np.einsum("bkgs,bksd->bkgd", p / p.sum(axis=-1, keepdims=True), values)
    # Products round the weights to bfloat16; the shared cache is always a product.
    assert relative_error(jax.jit(attend)(q, k, v, caches), expected) <= 3e-3


@pytest.mark.parametrize("tied", [False, True], ids=["head", "embed"])
def test_logits_of_the_next_token_are_float32(tied):
    """Of bfloat16 states and weights."""
    mesh = make_mesh("1,2,2,2", jax.devices()[:8])
    B, D, V = 3, 256, 64
    x, head = rounded(normal(0, B, D)), rounded(normal(1, D, V))
    weights, spec = ({"embed": head.T}, {"embed": P(ALL)}) if tied else ({"head": head}, {"head": P(None, ALL)})
    config = replace(CONFIG, vocab_size=V, tie_embeddings=tied)
    logits = jax.shard_map(partial(next_logits, config), mesh=mesh, in_specs=(spec, P()), out_specs=P())
    assert relative_error(jit(logits)(weights, x), x.astype(np.float64) @ head.astype(np.float64)) <= 1e-6


def test_parts_of_a_product_are_float32_until_they_are_summed():
    """Eight devices' parts; the error is the rounding of the sum."""
    mesh = make_mesh("1,2,2,2", jax.devices()[:8])
    x, matrix = rounded(normal(0, 64, 256)), rounded(normal(1, 256, 64))
    summed = jax.shard_map(own_rows_product, mesh=mesh, in_specs=(P(None, ALL), P(ALL)), out_specs=P())
    expected = x.astype(np.float64) @ matrix.astype(np.float64)
    assert relative_error(jit(summed)(x, matrix), expected) <= ROOM * 1.67e-3


@pytest.mark.slow
def test_a_decode_in_bfloat16(monkeypatch):
    """The errors of log-probabilities, after a prompt and after each of 40 tokens: their root mean square."""
    monkeypatch.setattr(programs, "compiler_options", lambda mesh: AS_WRITTEN)
    config = replace(CONFIG, compute_dtype="bfloat16", norm_eps=1.1e-5)  # of no other test: its programs are its own
    session = generator(config, "1,2,2,2").session(1)
    text, found = [5, 9, 20, 3, 1], []
    session.append([text])
    for (token,) in session.decode(max_new_tokens=40):
        text.append(token)
        found.append(np.asarray(session.logits[0], np.float64))
    found = np.array(found)
    found -= np.log(np.exp(found).sum(axis=-1, keepdims=True))
    error = np.sqrt(((found - log_probabilities(config, text)[5:]) ** 2).mean())
    assert error <= ROOM * 2.94e-2


@pytest.mark.parametrize("family", ["qwen2", "olmo3"])
def test_queries_and_keys_have_the_compute_dtype(family, monkeypatch):
    """As in prefill: float32 biases made them float32, and the attention converted the cache."""
    dtypes = []

    def recorded(q, k, v, *arguments, **options):
        dtypes.extend(str(x.dtype) for x in (q, k, v))
        return attend_token(q, k, v, *arguments, **options)

    monkeypatch.setattr(decode_step, "attend_token", recorded)
    mesh = make_mesh("1,1,1,2", jax.devices()[:2])
    programs.Programs(tiny(family, compute_dtype="bfloat16"), mesh).lower_decode(2, 16, 16, Kind())
    assert dtypes and set(dtypes) == {"bfloat16"}


def test_layers_one_after_another(monkeypatch):
    """As GPUs decode with matrix products: two rows on eight devices, against whole forward passes in float64."""
    monkeypatch.setattr(programs, "decode_hidden", lambda *arguments, unroll: decode_hidden(*arguments, unroll=True))
    config = replace(CONFIG, num_layers=3, norm_eps=1.2e-5)  # of no other test: its programs are its own
    session = generator(config, "1,2,2,2").session(2)
    texts = [[5, 9, 20, 3, 1], [7, 2, 2]]
    session.append([list(text) for text in texts])
    for tokens in session.decode(max_new_tokens=6):
        for text, token, logits in zip(texts, tokens, session.logits, strict=True):
            text.append(token)
            found = np.asarray(logits, np.float64)
            found -= np.log(np.exp(found).sum())
            np.testing.assert_allclose(found, log_probabilities(config, text)[-1], atol=1e-4)
