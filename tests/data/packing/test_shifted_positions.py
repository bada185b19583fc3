"""Shifted positions (PoSE): only positions change, each document has one jump, and all distances in the range occur."""

import dataclasses

import numpy as np
import pytest

from ringformer.checkpoints.saved_model import context_of, run_context
from ringformer.data import DocumentStream, WholeDocuments
from ringformer.data.packing.buckets import LengthBuckets
from ringformer.data.packing.document_lengths import document_lengths, too_short
from ringformer.data.packing.options import PackingOptions
from ringformer.models.registry import preset_config
from ringformer.runs.config import Config, DataConfig, OptimizerConfig
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from tests.data.packing_samples import LENGTHS, MODES, SEED, build
from tests.train.runs import MODEL, read_metrics, write_chats

SEQ_LEN, RANGE = 64, 1000


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return build(tmp_path_factory.mktemp("store") / "s", LENGTHS)


def packed(store, kind, position_range=RANGE, packed_attention="document", seed=SEED):
    options = PackingOptions(packed_attention=packed_attention, position_range=position_range)
    if kind == "stream":
        return DocumentStream(store, SEQ_LEN, seed, options)
    whole = dataclasses.replace(options, packing="whole")
    if kind == "whole":
        return WholeDocuments(store, SEQ_LEN, seed, whole, batch_size=2)
    return LengthBuckets(store, SEQ_LEN, seed, dataclasses.replace(whole, buckets=1), batch_size=2)


CASES = [*((kind, mode) for kind in ("stream", "whole") for mode in MODES), ("buckets", "document")]


@pytest.mark.parametrize(("kind", "packed_attention"), CASES)
def test_each_document_has_one_jump_and_nothing_else_changes(store, kind, packed_attention):
    shifted, plain = (packed(store, kind, n, packed_attention) for n in (RANGE, 0))
    jumps = 0
    for index in range(2 * plain.per_epoch):
        new, old = (sequences.read(index, np.arange(SEQ_LEN)) for sequences in (shifted, plain))
        for field in ("tokens", "targets", "segment_ids", "mask", "ends"):
            np.testing.assert_array_equal(getattr(new, field), getattr(old, field))
        assert new.positions.dtype == np.int32 and new.positions.min() >= 0 and new.positions.max() < RANGE
        ids = np.zeros(SEQ_LEN) if old.segment_ids is None else old.segment_ids
        for document in np.unique(ids):
            by = (new.positions - old.positions)[ids == document]
            assert by[0] == 0 and (np.diff(by) >= 0).all() and len(np.unique(by)) <= 2
            jumps += int(by[-1] > 0)
    assert jumps > plain.per_epoch


@pytest.mark.parametrize(("kind", "packed_attention"), CASES)
def test_parts_of_a_sequence_have_the_positions_of_the_whole(store, kind, packed_attention):
    """As ranks of a ring read them, each in a process of its own."""
    rng = np.random.default_rng(0)
    for index in (0, 3):
        whole = packed(store, kind, packed_attention=packed_attention).read(index, np.arange(SEQ_LEN)).positions
        for columns in (rng.permutation(SEQ_LEN), np.array([SEQ_LEN - 1]), np.r_[0:8, 56:64], np.arange(17, 40)):
            part = packed(store, kind, packed_attention=packed_attention).read(index, columns).positions
            np.testing.assert_array_equal(part, whole[columns])


def test_cuts_and_shifts_are_uniform(store):
    """In a sequence of one document, every cut and every shift up to the range is as likely as any other."""
    sequences = packed(store, "stream", packed_attention="sequence")
    shifted = np.stack([sequences.read(index, np.arange(SEQ_LEN)).positions for index in range(2000)])
    by = shifted[:, -1] - (SEQ_LEN - 1)
    cuts = (shifted == np.arange(SEQ_LEN)).sum(1)[by > 0]
    most = RANGE - SEQ_LEN
    for drawn, low, high in ((by, 0, most), (cuts, 1, SEQ_LEN - 1)):
        assert drawn.min() < low + 0.02 * high + 1 and drawn.max() > 0.98 * high - 1 and drawn.max() <= high
        counts, _ = np.histogram(drawn, bins=8, range=(low, high + 1))
        assert np.abs(counts / len(drawn) - 1 / 8).max() < 0.03


def test_a_sequence_has_its_own_shifts_by_the_seed(store):
    def positions(seed, index):
        return packed(store, "stream", seed=seed).read(index, np.arange(SEQ_LEN)).positions.tobytes()

    assert positions(1, 5) == positions(1, 5)
    assert len({positions(seed, index) for seed in (1, 2) for index in (0, 5, 6)}) == 6


def test_the_shifts_are_the_same_with_every_numpy(store):
    """A resumed run must meet the positions that it began with."""
    positions = packed(store, "stream", packed_attention="sequence", seed=2**40).read(7, np.arange(SEQ_LEN)).positions
    assert (int((positions == np.arange(SEQ_LEN)).sum()), int(positions[-1])) == PINNED


PINNED = (42, 937)
"""The cut, and the last position."""


def test_a_range_says_what_a_token_sees(store):
    described = document_lengths(packed(store, "stream"))
    assert described.positions == RANGE and "up to 999" in str(described)
    long = DocumentStream(store, sum(LENGTHS) - 1, SEED)
    assert too_short([document_lengths(long)]) and too_short([described._replace(seq_len=479)]) is None


@pytest.mark.parametrize(
    ("range_", "model", "message"),
    [
        (64, MODEL, "position_range=64 must be above seq_len=64"),
        (1000, preset_config("smollm3_3b", layer_types="N"), "no layer of the model has"),
        (1000, dataclasses.replace(MODEL, window=32), "layers with a window of 32 tokens"),
        (1000, preset_config("gemma3_1b"), "layers with a window of"),
    ],
)
def test_a_range_that_means_nothing_is_refused(range_, model, message):
    with pytest.raises(ValueError, match=message):
        Config(model, DataConfig(store="s", position_range=range_), OptimizerConfig(), seq_len=64)


@pytest.mark.parametrize("value", [-1, 2**31, 1.5, True])
def test_a_range_is_a_number_of_tokens(value):
    message = r"data\.position_range=.* must be a (number of tokens below 2\^31|whole number)"
    with pytest.raises(ValueError, match=message):
        DataConfig(store="s", position_range=value)


@pytest.fixture
def config(tmp_path):
    write_chats(tmp_path / "chats.json")
    source = dict(source=f"json:{tmp_path}/chats.json", format="messages", held_out=0.2)
    return Config(
        MODEL,
        DataConfig(store=str(tmp_path / "store"), position_range=RANGE, **source),
        OptimizerConfig(warmup_steps=0),
        run_dir=str(tmp_path / "run"),
        mesh_dim="2,2,2,1",
        seq_len=SEQ_LEN,
        batch_size=4,
        steps=3,
        eval_batches=1,
    )


def test_held_out_data_keep_their_positions(config):
    run = prepare(config)
    assert max(run.train_data.read(step).positions.max() for step in range(4)) > SEQ_LEN
    assert max(run.eval_data.read(step).positions.max() for step in range(4)) < SEQ_LEN
    assert run.identity["data.position_range"] == RANGE


@pytest.mark.slow
def test_a_run_trains_on_them_and_reaches_the_range(config):
    """Generation and exports take its context from the range; evaluations are at true positions."""
    train(prepare(config))
    assert context_of(config.run_dir) == RANGE
    rows = read_metrics(config.run_dir)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    (positions,) = [row["eval_by_position"] for row in rows if row["step"] == 3 and "eval_loss" in row]
    assert positions[-1]["first"] < SEQ_LEN
    assert run_context({"seq_len": SEQ_LEN}) == SEQ_LEN and run_context({}) is None
