"""Packed documents through cuDNN's rectangles, emulated on the CPU, against dense attention with segment ids."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ringformer.data import Batch
from ringformer.models.decoder import Decoder
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.ops import layouts
from ringformer.ops.kernels import cudnn_documents
from ringformer.ops.layouts import PARTS, VISIBLE
from ringformer.ops.ring_attention import ring_attention
from ringformer.ops.sharded_ring_attention import sharded_ring_attention
from tests.helpers import errors, packed_segments, ring_mesh
from tests.ops.kernels.cudnn_emulation import emulated
from tests.ops.kernels.test_cudnn_attention import as_float32, assert_as_good_as_dense, rounded
from tests.ops.rings import B, arrays, dense, on_ring

__all__ = ["emulated"]

INTERVALS = ("contiguous", "zigzag")
SIZES = [(1, 5), (8, 6), (2, 1), (3, 4), (4, 30), (5, 3)]
"""Ranks, and documents of a row at most."""


@pytest.fixture
def short_pieces(monkeypatch):
    """A shard of some ten tokens is cut into pieces."""
    monkeypatch.setattr(cudnn_documents, "SHORTEST", 4)


def documents(T, most, seed=7):
    return packed_segments(seed, B, T, most)


@pytest.mark.usual("3-4-zigzag", "1-5-contiguous")
@pytest.mark.parametrize(
    ("n", "most", "layout"),
    [
        *((*x, "zigzag") for x in SIZES),
        *((*x, "contiguous") for x in SIZES[:2]),
        *(pytest.param(*x, "contiguous", marks=pytest.mark.slow) for x in SIZES[2:]),
    ],
)
def test_documents_as_dense(layout, n, most, emulated, short_pieces):
    """From one document to many within a piece, edges anywhere, rows of the batch of their own; GQA; also through
    lse."""
    T = n * 2 * 16
    inputs, cotangents = arrays(T, d=16)
    ids = documents(T, most)
    found = on_ring(n, layout, rounded(inputs), cotangents, ids, kernel="cudnn", segments="ascending")
    assert_as_good_as_dense(found, inputs, cotangents, segment_ids=ids)
    assert {causal for *_, causal in emulated} == {"rectangle"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "layout", "options"),
    [
        (3, "zigzag", {"ring": "both_ways"}),
        (4, "contiguous", {"ring": "gathered"}),
        (4, "zigzag", {"ulysses": 2, "ring": "gathered"}),
    ],
)
def test_documents_whose_keys_travel_otherwise(n, layout, options, emulated, short_pieces):
    """Both ways, gathered, and with heads exchanged."""
    T = n * 2 * 16
    inputs, cotangents = arrays(T, d=16)
    ids = documents(T, 5)
    found = on_ring(n, layout, rounded(inputs), cotangents, ids, kernel="cudnn", segments="ascending", **options)
    assert_as_good_as_dense(found, inputs, cotangents, segment_ids=ids)


@pytest.mark.usual("48")
@pytest.mark.parametrize("length", [2 * 33, 2 * 24, 2 * 7])
def test_shards_of_any_length(length, emulated, short_pieces):
    """Odd pieces, and shards that are not cut at all."""
    inputs, cotangents = arrays(2 * length, d=16)
    ids = documents(2 * length, 5)
    found = on_ring(2, "zigzag", rounded(inputs), cotangents, ids, kernel="cudnn", segments="ascending")
    assert_as_good_as_dense(found, inputs, cotangents, segment_ids=ids)


@pytest.mark.slow
def test_padding_with_ids_of_its_own(emulated, short_pieces):
    """The ids of `WholeDocuments`: every token of padding is a segment, after the documents."""
    T = 4 * 32
    inputs, cotangents = arrays(T, d=16)
    ids = documents(T, 3)
    ids[:, T * 2 // 3 :] = ids.max() + 1 + np.arange(T - T * 2 // 3)
    found = on_ring(4, "zigzag", rounded(inputs), cotangents, ids, kernel="cudnn", segments="ascending")
    assert_as_good_as_dense(found, inputs, cotangents, segment_ids=ids)


@pytest.mark.slow
def test_more_ranks_make_no_larger_error(emulated, short_pieces):
    T = 8 * 64
    inputs, cotangents = arrays(T, d=32)
    cotangents["dlse"] = np.zeros_like(cotangents["dlse"])
    ids, half = documents(T, 3), rounded(inputs)
    truth = dense(as_float32(half), cotangents, segment_ids=ids)
    options = dict(kernel="cudnn", segments="ascending")
    alone, ring = (errors(as_float32(on_ring(n, "zigzag", half, cotangents, ids, **options)), truth) for n in (1, 8))
    assert all(ring[name] <= 1.3 * alone[name] for name in ("o", "dq", "dk", "dv")), (alone, ring)


def test_global_arrays(emulated, short_pieces):
    T = 4 * 32
    inputs, _ = arrays(T, d=16)
    ids, half = documents(T, 4), rounded(inputs)
    o = sharded_ring_attention(
        **half, mesh=ring_mesh(4), segment_ids=ids, segments="ascending", kernel="cudnn", layout="zigzag"
    )
    expected = sharded_ring_attention(**half, mesh=ring_mesh(4), segment_ids=ids, layout="zigzag")
    assert errors({"o": np.asarray(o, np.float32)}, {"o": np.asarray(expected, np.float32)})["o"] < 4e-3


def test_calls_of_a_block(emulated, short_pieces):
    """The own shard: one call a level, its pairs as rows of the batch; then two calls of a visiting block."""
    T = 2 * 32
    inputs, _ = arrays(T, d=16)
    options = dict(axis_name="sp", layout="zigzag", kernel="cudnn", segments="ascending")
    spec = jax.sharding.PartitionSpec(None, "sp")
    sharded = jax.shard_map(
        lambda ids, q, k, v: ring_attention(q, k, v, segment_ids=ids, **options),
        mesh=ring_mesh(2),
        in_specs=spec,
        out_specs=spec,
    )
    jax.eval_shape(sharded, documents(T, 3), *rounded(inputs).values())
    calls = [(q[0], q[1], k[1]) for _, q, k, _ in emulated]
    assert calls == [(4 * B, 4, 4), (2 * B, 8, 8), (B, 16, 16), *4 * [(B, 16, 16)]]


@pytest.mark.parametrize("layout", INTERVALS)
def test_two_parts_share_at_most_one_document(layout):
    """By brute force: what the queries of a part see of an earlier part is the rectangle, with any documents."""
    rng = np.random.default_rng(0)
    pairs = 0
    for n, T, most in product((1, 2, 3, 4, 8), (4, 8, 16), (1, 3, 8, 40, 100)):
        ids = np.sort(rng.integers(0, most, n * T))
        shards = ids[layouts.permutation(layout, n * T, n)].reshape(n, PARTS[layout], -1)
        for here, there in product(range(n), range(n)):
            source = "own" if here == there else "earlier" if there < here else "later"
            for q_part, k_part, offset in VISIBLE[layout][source]:
                if offset == 0:  # the diagonal
                    continue
                q_ids, k_ids = shards[here, q_part], shards[there, k_part]
                rows, columns = cudnn_documents.shared_document(
                    jnp.asarray(q_ids[None]), jnp.asarray(k_ids[None])
                ).lengths
                same = q_ids[:, None] == k_ids
                rectangle = np.zeros_like(same)
                rectangle[: int(rows[0]), len(k_ids) - int(columns[0]) :] = True
                assert (same == rectangle).all()
                pairs += 1
    assert pairs > 400


@pytest.mark.parametrize(
    ("length", "pieces"), [(65536, 64), (98304, 64), (1023, 1), (2048, 2), (2049, 1), (3 * 2**14, 32)]
)
def test_pieces(length, pieces):
    assert cudnn_documents.count_pieces(length) == pieces
    assert [level.pairs for level in cudnn_documents.levels(length)] == [2**i for i in range(pieces.bit_length() - 1)][
        ::-1
    ]


def test_what_is_refused_says_what_works(as_for_users):
    q, ids = jnp.zeros((1, 16, 2, 64), jnp.bfloat16), np.zeros((1, 16), np.int32)

    def attend(**options):
        return ring_attention(q, q, q, kernel="cudnn", **{"axis_name": None, "segment_ids": ids} | options)

    with pytest.raises(ValueError, match="pass segments='ascending' if yours do; kernel='xla' takes any"):
        attend()
    with pytest.raises(ValueError, match="only with causal=True; kernel='xla' takes both"):
        attend(segments="ascending", causal=False)
    with pytest.raises(ValueError, match=r"not in striped.*layout='zigzag' balances"):
        attend(segments="ascending", layout="striped", axis_name="sp")
    with pytest.raises(ValueError, match="for one array of segment ids; got a pair"):
        attend(segments="ascending", segment_ids=(ids, ids))
    with pytest.raises(ValueError, match="for one array of segment ids; got a pair"):
        sharded_ring_attention(q, q, q, mesh=ring_mesh(2), segments="ascending", segment_ids=(ids, ids))
    with pytest.raises(ValueError, match="segments='descending': choose one of any, ascending"):
        attend(segments="descending")
    with pytest.raises(ValueError, match="takes no bias; kernel='xla' does"):
        attend(segment_ids=None, bias=np.zeros((1, 16), np.float32))


@pytest.mark.slow
def test_a_model_promises_what_batches_keep(emulated, short_pieces):
    """The loss of a batch calls cuDNN for its documents; logits of any segment ids do not."""
    config = LlamaConfig(**preset("tiny") | {"kernel": "cudnn", "num_layers": 1})
    ids = documents(32, 4)
    tokens, mask = np.random.default_rng(0).integers(0, config.vocab_size, (B, 33), np.int32), np.ones((B, 32), bool)
    positions = np.tile(np.arange(32, dtype=np.int32), (B, 1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], positions, ids, mask, ~mask)
    loss = Decoder(config, rngs=nnx.Rngs(0)).loss(batch)
    expected = Decoder(replace(config, kernel="xla"), rngs=nnx.Rngs(0)).loss(batch)
    assert abs(float(loss) / float(expected) - 1) < 1e-3 and "rectangle" in {mask for *_, mask in emulated}
    with pytest.raises(ValueError, match="pass segments='ascending' if yours do"):
        Decoder(config, rngs=nnx.Rngs(0))(batch.tokens, segment_ids=ids)
