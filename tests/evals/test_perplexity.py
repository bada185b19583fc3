"""Perplexity of a store: losses that are known at every place are found again, token by token."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from ringformer.evals import perplexity
from ringformer.evals.case_file import CaseFile
from ringformer.evals.tables import perplexity_tables

LENGTHS = [5, 40, 40, 70, 39, 41]
BYTES = 2.5


def make_store(mask=False):
    """Documents of these lengths, whose tokens are 1000 * document + index; a mask counts unequal parts of them."""
    tokens = np.concatenate([1000 * i + np.arange(n) for i, n in enumerate(LENGTHS)])
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    counted = np.concatenate([np.arange(n) % (i + 1) == 1 % (i + 1) for i, n in enumerate(LENGTHS)]).astype(np.uint8)
    return SimpleNamespace(
        path="runs/store", tokens=tokens.astype(np.uint16), offsets=offsets, mask=counted if mask else None
    )


class Known:
    """A token's loss is a function of the token and of how many stand before it."""

    def __init__(self):
        self.rows = []

    def token_losses(self, rows):
        self.rows += rows
        return [np.array([self.loss(t, i) for i, t in enumerate(row)][1:], np.float32) for row in rows]

    @staticmethod
    def loss(token, before):
        return 2 + token % 7 + 8 / before if before else math.nan


def evaluate(path, model, store, lengths=(8, 16, 40), documents=9, last=6, batch_size=2):
    file = CaseFile(path, "perplexity", {}, perplexity.check_row)
    perplexity.measure_store(
        model.token_losses, store, lengths, documents=documents, last=last, batch_size=batch_size, file=file, say=str
    )
    return list(file.rows.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", "[8, 2]"),
        ("length", 16),
        ("last_tokens", 9),
        ("last_nats", 1e6),
        ("last_nats", -1.0),
        ("document", 2),
        ("bin_tokens", [1, 2]),
        ("bin_tokens", [9, 9, 9]),
        ("last_nats", math.nan),
    ],
)
def test_a_row_whose_numbers_cannot_be_is_refused(field, value, tmp_path):
    path = tmp_path / "cases.jsonl"
    evaluate(path, Known(), make_store(), lengths=(8,))
    text = path.read_text().splitlines()
    text[1] = json.dumps(json.loads(text[1]) | {field: value})
    path.write_text("\n".join(text) + "\n")
    with pytest.raises(ValueError, match=r"cases\.jsonl:2 is not a case"):
        CaseFile(path, "perplexity", {}, perplexity.check_row)


@pytest.mark.parametrize("masked", [False, True])
def test_losses_stand_where_the_tokens_do(masked, tmp_path):
    store, model = make_store(masked), Known()
    rows = evaluate(tmp_path / "cases.jsonl", model, store)
    documents = [1, 2, 3, 5]
    counted = {1000 * i + k: store.mask[store.offsets[i] + k] if masked else 1 for i in documents for k in range(40)}
    context = perplexity.by_context(rows, BYTES)
    for length in (8, 16, 40):
        losses = [
            Known.loss(1000 * i + k, k - (40 - length))
            for i in documents
            for k in range(34, 40)
            if counted[1000 * i + k]
        ]
        assert context[length].tokens == len(losses) and context[length].nats == pytest.approx(np.mean(losses))
        assert context[length].bits_per_byte == pytest.approx(np.mean(losses) / math.log(2) / BYTES)
        assert context[length].perplexity == pytest.approx(math.exp(np.mean(losses)))
    position = perplexity.by_position(rows, BYTES)
    assert list(position) == [1, 2, 4, 8, 16, 32]
    for k, loss in position.items():
        losses = [
            Known.loss(1000 * i + n, n) for i in documents for n in range(k, min(2 * k, 40)) if counted[1000 * i + n]
        ]
        assert loss.tokens == len(losses) and loss.nats == pytest.approx(np.mean(losses))
    assert {len(row) for row in model.rows} == {8, 16, 40} and all(
        t // 1000 in documents for r in model.rows for t in r
    )


def test_the_tables_say_it(tmp_path):
    rows = evaluate(tmp_path / "cases.jsonl", Known(), make_store())
    text = perplexity_tables(perplexity.by_context(rows, BYTES), perplexity.by_position(rows, BYTES), 6)
    assert "the same last 6 tokens" in text
    assert [line.split()[:2] for line in text.splitlines()[2:5]] == [["8", "24"], ["16", "24"], ["40", "24"]]
    assert [line.split()[:2] for line in text.splitlines()[8:]] == [
        ["1", "4"],
        ["2", "8"],
        ["4", "16"],
        ["8", "32"],
        ["16", "64"],
        ["32", "32"],
    ]


def test_it_goes_on_where_it_was(tmp_path):
    path, model = tmp_path / "cases.jsonl", Known()
    before = evaluate(path, Known(), make_store(), lengths=(8, 40))
    rows = evaluate(path, model, make_store())
    assert {len(row) for row in model.rows} == {16} and [row for row in rows if row["length"] != 16] == before


def test_documents_are_spread_over_those_long_enough():
    store = make_store()
    assert perplexity.choose_documents(store, 40, 9) == [1, 2, 3, 5]
    assert perplexity.choose_documents(store, 40, 2) == [1, 5] and perplexity.choose_documents(store, 41, 1) == [3]
    with pytest.raises(ValueError, match="has no document of 71 tokens, the longest has 70: choose shorter"):
        perplexity.choose_documents(store, 71, 1)


@pytest.mark.parametrize("last", [0, 8])
def test_too_many_last_tokens_are_refused(last):
    with pytest.raises(ValueError, match=f"--last={last} tokens must be at least 1, and fewer than the 8"):
        perplexity.check(make_store(), [8, 16], last)


def test_what_is_not_finite_is_no_loss(tmp_path):
    model = Known()
    model.loss = lambda token, before: math.inf if before == 7 else 1.0
    with pytest.raises(FloatingPointError, match="document 1: a loss is not finite at 8 tokens"):
        evaluate(tmp_path / "cases.jsonl", model, make_store())
