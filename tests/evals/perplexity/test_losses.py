"""Rows of stretches, their checks, and means over documents with their intervals."""

import json
import math

import numpy as np
import pytest

from ringformer.evals.case_file import CaseFile
from ringformer.evals.intervals import bootstrap
from ringformer.evals.perplexity import sliding
from ringformer.evals.perplexity.losses import ALL, check_row, loss_table, losses_by_context, mean_loss
from tests.evals.perplexity.stores import BOS, Known, make_documents

KEY = "key"


def row_of(documents, document, length=20, start=0):
    stretch = documents.stretch(length, document, start, start + length)
    (losses,) = Known().token_losses([stretch.tokens.tolist()])
    return documents.row(stretch, losses, {KEY: np.arange(len(losses)) % 3 == 0})


def test_means_weigh_tokens_and_intervals_documents():
    """By hand, of three documents with unequal numbers of tokens; two stretches of one document are one document."""
    sums = {1: (30.0, 10, 40), 2: (80.0, 20, 50), 3: (5.0, 5, 10)}
    rows = [{"length": 8, "document": i, "sums": {ALL: sums[i]}} for i in sums]
    loss = mean_loss(rows, ALL)
    assert (loss.nats, loss.tokens, loss.documents, loss.share) == (115 / 35, 35, 3, 1)
    assert loss.bits_per_byte == pytest.approx(115 / math.log(2) / 100)
    assert loss.interval == bootstrap([30, 80, 5], [10, 20, 5]) and loss.interval[0] < 115 / 35 < loss.interval[1]
    halves = [*rows[1:], *[{"length": 8, "document": 1, "sums": {ALL: (15.0, 5, 20)}}] * 2]
    assert mean_loss(halves, ALL).interval == loss.interval
    assert mean_loss(rows[:1], ALL).interval is None


def test_no_token_is_no_loss():
    rows = [{"length": 8, "document": i, "sums": {ALL: (3.0, 2, 0), KEY: (0.0, 0, 0)}} for i in (1, 2)]
    none, whole = mean_loss(rows, KEY), mean_loss(rows, ALL)
    assert math.isnan(none.nats) and (none.tokens, none.share, none.interval) == (0, 0, None)
    assert math.isnan(whole.bits_per_byte) and whole.nats == 1.5
    assert loss_table({8: none}).splitlines()[1].split() == ["8", "0", "0", "0.00%", "nan", "nan", "nan", "-"]


def test_the_table_has_every_number():
    documents = make_documents()
    rows = [row_of(documents, i) for i in (1, 3)]
    losses = losses_by_context(rows, KEY)
    (loss,) = losses.values()
    _, line = loss_table(losses).splitlines()
    low, high = map(math.exp, loss.interval)
    numbers = f"{loss.nats:.4f} {loss.bits_per_byte:.4f} {math.exp(loss.nats):,.3f} {low:,.3f}-{high:,.3f}"
    assert line.split() == ["20", "2", "14", f"{14 / 38:.2%}", *numbers.split()]


def test_a_document_that_begins_with_the_token_has_it_once():
    documents = make_documents(begin=[1000])
    assert documents.stretch(8, 1, 0, 5).tokens.tolist() == [1000, 1001, 1002, 1003, 1004]
    assert documents.stretch(8, 1, 1, 3).tokens.tolist() == [1000, 1001, 1002]
    assert make_documents(begin=[BOS]).stretch(8, 1, 0, 2).counted.tolist() == [False, True, True]


@pytest.mark.parametrize("begin", [[], [BOS]], ids=["", "BOS"])
def test_documents_begin_as_the_model_s_texts_whatever_the_store_has(begin):
    stored, plain = make_documents(begin=begin, begun=True), make_documents(begin=begin)
    assert BOS in stored.store.tokens and BOS not in plain.store.tokens
    for start in (0, 3):
        read, expected = (documents.stretch(20, 3, start, start + 9) for documents in (stored, plain))
        assert read.tokens.tolist() == expected.tokens.tolist() and read.prompt_hash == expected.prompt_hash
        assert read.counted.tolist() == expected.counted.tolist()
    windows = [list(sliding.windows(documents, 3, 20, 7, None)) for documents in (stored, plain)]
    assert [window.prompt_hash for window in windows[0]] == [window.prompt_hash for window in windows[1]]
    assert [stored.choose(n, 1, print) for n in (41, 70)] == [plain.choose(n, 1, print) for n in (41, 70)]


def test_documents_are_spread_over_those_long_enough():
    documents, lines = make_documents(), []
    assert documents.choose(40, 9, lines.append) == [1, 2, 3, 5]
    assert lines == ["4 documents of the store have 40 tokens, not 9"]
    assert documents.choose(40, 2, lines.append) == [1, 5] and documents.choose(41, 1, lines.append) == [3]
    with pytest.raises(ValueError, match="has no document of 71 tokens, the longest has 70: choose shorter"):
        documents.choose(71, 1, lines.append)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["key"], "[20, 2, 0]"),
        (["length"], 16),
        (["document"], 2),
        (["start"], 1),
        (["sums", KEY, 0], 1e6),
        (["sums", KEY, 0], -1.0),
        (["sums", KEY, 0], math.nan),
        (["sums", ALL, 0], math.nan),
        (["sums", KEY, 1], 20),
        (["sums", KEY, 2], 10_000),
        (["sums", ALL, 1], 21),
        (["sums"], {}),
        (["sums"], {ALL: [1.0, 1, 1]}),
        (["sums", KEY], [1.0, 1]),
    ],
)
def test_a_row_whose_numbers_cannot_be_is_refused(place, value, tmp_path):
    row = row_of(make_documents(), 1)
    path = tmp_path / "cases.jsonl"
    head = {"evaluation": "longppl", "settings": {}}

    def opened(row):
        path.write_text("".join(json.dumps(line) + "\n" for line in (head, row)))
        return CaseFile(path, "longppl", {}, lambda row: check_row(row, KEY))

    assert list(opened(row).rows) == [row["key"]]
    target = row
    for name in place[:-1]:
        target = target[name]
    target[place[-1]] = value
    with pytest.raises(ValueError, match=r"cases\.jsonl:2 is not a case"):
        opened(row)


def test_what_is_not_finite_is_no_loss():
    documents = make_documents()
    stretch = documents.stretch(8, 1, 3, 11)
    with pytest.raises(FloatingPointError, match="document 1: a loss is not finite in 8 tokens from token 3"):
        documents.row(stretch, np.array([1.0] * 6 + [math.inf]), {})
