"""No leak: with documents packed whole, what one document holds does not touch another, not by a bit; and with packed
attention "sequence" all that came before it does, as if the sequence were one text."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from ringformer.data import Loader
from ringformer.data.packing.options import PackingOptions
from ringformer.models.families.llama import LlamaConfig
from ringformer.ops.layouts import permutation
from ringformer.parallel.mesh import BATCH, make_mesh
from ringformer.parallel.parameters import abstract_model, weight_shardings
from ringformer.runs.config import OptimizerConfig
from ringformer.train.optimizer import make_optimizer
from ringformer.train.state import init_state, state_shardings
from ringformer.train.step import make_logits, make_train_step
from tests.data.packing_samples import build
from tests.helpers import relative_error

T = 64
UNSEEN = 257
"""A token that no document has."""


def model(layout):
    return LlamaConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        init_std=0.3,
        compute_dtype="float32",
        ffn_chunk=8,
        loss_chunk=8,
        q_chunk=4,
        k_chunk=3,
        layout=layout,
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return build(tmp_path_factory.mktemp("store") / "s", [23, 9, 17, 30, 11, 8, 21, 13, 38, 26, 14, 12])


LAYOUTS = ["contiguous", "striped", "zigzag"]
QUICK = {("zigzag", 4)}
CASES = [
    pytest.param(layout, n, marks=() if (layout, n) in QUICK else pytest.mark.slow)
    for layout in LAYOUTS
    for n in (1, 2, 4, 8)
]


@pytest.mark.parametrize(("layout", "ring_size"), CASES)
def test_documents_and_padding_do_not_leak(store, layout, ring_size):
    """Change every second document, then the others, then the padding.

    Logits elsewhere are the same bits, and so is the whole state after a step on the loss of those elsewhere: the
    gradient of a document's loss depends on no other document. Padding is given a token of its own, whose embedding
    gets no gradient.
    """
    config = model(layout)
    mesh = make_mesh(f"1,1,1,{ring_size}", jax.devices()[:ring_size])
    optimizer = make_optimizer(OptimizerConfig(warmup_steps=0, schedule="constant"), 10, abstract_model(config)[2])
    shardings = state_shardings(weight_shardings(config, mesh), optimizer)
    first = init_state(config, optimizer, shardings, mesh, seed=0)
    logits = make_logits(config, shardings.params, mesh)
    train_step = make_train_step(config, optimizer, shardings, mesh, clip_norm=1.0)

    def device(batch):
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, BATCH)), batch)

    def step(batch):
        """The logits; the state after a step on the batch, and its metrics."""
        batch = device(batch)
        before = logits(first.params, batch)
        return jax.device_get((before, *train_step(jax.tree.map(lambda x: x.copy(), first), batch)))

    loader = Loader(
        store, batch_size=2, seq_len=T, seed=3, layout=layout, ring_size=ring_size, packing=PackingOptions("whole")
    )
    batch = loader.read(0)
    ids = batch.segment_ids
    documents = np.array([[len(loader.sequences.parts[0].pieces(row))] for row in range(2)])
    padding = ids > documents
    assert padding.sum() > 2 and documents.min() > 1
    assert not batch.mask[padding].any()

    def other(places):
        """The batch with other tokens at these places, and as targets where these are predicted."""
        rng = np.random.default_rng(0)
        tokens, targets = (
            np.where(places, (x + rng.integers(1, 257, x.shape)) % 257, x).astype(np.int32)
            for x in (batch.tokens, batch.targets)
        )
        return batch._replace(tokens=tokens, targets=targets)

    for changed in ((ids % 2 == 0) & ~padding, (ids % 2 == 1) & ~padding, padding):
        mask = batch.mask & ~changed
        before, after = step(batch._replace(mask=mask)), step(other(changed)._replace(mask=mask))
        np.testing.assert_array_equal(before[0][~changed], after[0][~changed])
        assert (before[0][changed] != after[0][changed]).any(axis=-1).all()  # or nothing was changed
        jax.tree.map(np.testing.assert_array_equal, before[1:], after[1:])
        assert after[2]["grad_norm"] > 0

    marked = batch._replace(tokens=np.where(padding, UNSEEN, batch.tokens).astype(np.int32))
    _, state, _ = step(marked)
    moment = state.opt_state[0].mu["embed"]  # a row for each token, the padded ones of the array last
    assert not moment[UNSEEN].any()
    assert moment[batch.tokens[batch.mask]].any(axis=-1).all()


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "ring_size"), CASES)
def test_a_packed_sequence_is_one_text(store, layout, ring_size):
    """The logits are those of a dense model that reads a row as one text; a changed document changes all after it."""

    def logits(config, mesh):
        optimizer = make_optimizer(OptimizerConfig(), 1000, abstract_model(config)[2])
        weights = weight_shardings(config, mesh)
        params = init_state(config, optimizer, state_shardings(weights, optimizer), mesh, seed=0).params
        compiled = make_logits(config, weights, mesh)
        return lambda batch: np.asarray(compiled(params, jax.device_put(batch, NamedSharding(mesh, BATCH))))

    config = model(layout)
    ring, one = (make_mesh(f"1,1,1,{n}", jax.devices()[:n]) for n in (ring_size, 1))
    of_ring, of_dense = logits(config, ring), logits(dataclasses.replace(config, attention="vanilla"), one)
    for packing in ("stream", "whole"):
        loader = Loader(
            store,
            batch_size=2,
            seq_len=T,
            seed=3,
            layout=layout,
            ring_size=ring_size,
            packing=PackingOptions(packing, "sequence"),
        )
        batch, order = loader.read(0), permutation(layout, T, ring_size)
        text = jax.tree.map(lambda x, order=order: x[:, np.argsort(order)], batch)
        if packing == "stream":
            assert batch.segment_ids is None
            padding = np.zeros((2, T), bool)
        else:
            padding = text.segment_ids > 1
            assert 2 < padding.sum() < T
        before = of_ring(batch)[:, np.argsort(order)]
        as_one = text._replace(positions=np.tile(np.arange(T, dtype=np.int32), (2, 1)), segment_ids=None)
        assert relative_error(before[~padding], of_dense(as_one)[~padding]) < 1e-5

        second = np.argmax(text.ends, axis=1)[:, None] + 1  # where each row's second document begins
        assert (text.ends & ~padding).sum() > 4
        changed = np.where(np.arange(T) == second, (text.tokens + 1) % 257, text.tokens)[:, order]
        after = of_ring(batch._replace(tokens=changed.astype(np.int32)))[:, np.argsort(order)]
        untouched = (np.arange(T) < second) | padding
        np.testing.assert_array_equal(before[untouched], after[untouched])
        assert (before != after)[~untouched].any(axis=-1).all()
