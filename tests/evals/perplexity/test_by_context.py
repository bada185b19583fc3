"""Losses by context and by position: those that are known at every place are there again, token by token."""

import math

import numpy as np
import pytest

from ringformer.evals.perplexity import by_context
from ringformer.evals.perplexity.losses import ALL, losses_by_context
from tests.evals.perplexity.stores import BOS, LENGTHS, Known, make_documents

CHOSEN = [1, 2, 3, 5]


def rows_of(documents, model, lengths=(8, 16, 40), last=6):
    stretches = [by_context.stretch(documents, i, n, max(lengths)) for n in lengths for i in CHOSEN]
    losses = model.token_losses([stretch.tokens.tolist() for stretch in stretches])
    return [documents.row(x, loss, by_context.parts(x, last)) for x, loss in zip(stretches, losses, strict=True)]


@pytest.mark.parametrize("begin", [[], [BOS]], ids=["", "BOS"])
@pytest.mark.parametrize("masked", [False, True])
def test_losses_stand_where_the_tokens_do(masked, begin):
    """After a BOS token, a context has a token less of the document, and ends at a token before."""
    documents, model, shift = make_documents(masked, begin), Known(), len(begin)
    rows = rows_of(documents, model)
    store = documents.store
    counted = {1000 * i + k: store.mask[store.offsets[i] + k] if masked else 1 for i in CHOSEN for k in range(40)}
    context = losses_by_context(rows, by_context.LAST)
    for length in (8, 16, 40):
        tokens = [1000 * i + k for i in CHOSEN for k in range(34 - shift, 40 - shift) if counted[1000 * i + k]]
        losses = [Known.loss(t, t % 1000 - (40 - length) + shift) for t in tokens]
        assert context[length].tokens == len(losses) and context[length].nats == pytest.approx(np.mean(losses))
        bits = sum(losses) / math.log(2) / sum(t % 10 for t in tokens)
        assert context[length].bits_per_byte == pytest.approx(bits)
        assert context[length].perplexity == pytest.approx(math.exp(np.mean(losses)))
    position = by_context.by_position(rows)
    assert list(position) == [1, 2, 4, 8, 16, 32][masked and shift :], "no counted token is the first after BOS"
    for k, loss in position.items():
        tokens = [
            1000 * i + n - shift for i in CHOSEN for n in range(k, min(2 * k, 40)) if counted[1000 * i + n - shift]
        ]
        losses = [Known.loss(t, t % 1000 + shift) for t in tokens]
        assert loss.tokens == len(losses) and loss.nats == pytest.approx(np.mean(losses))
        assert loss.share == pytest.approx(len(tokens) / losses_by_context(rows, ALL)[40].tokens)
    assert {len(row) for row in model.rows} == {8, 16, 40} and all(row[:shift] == begin for row in model.rows)


def test_a_row_whose_positions_are_not_all_tokens_is_refused():
    row = rows_of(make_documents(), Known())[0]
    by_context.check_row(row)
    del row["sums"]["2"]
    with pytest.raises(ValueError, match="are not all tokens"):
        by_context.check_row(row)
    del row["sums"]["last"]
    with pytest.raises(ValueError, match="a part is missing"):
        by_context.check_row(row)


@pytest.mark.parametrize("last", [0, 8])
def test_too_many_last_tokens_are_refused(last):
    with pytest.raises(ValueError, match=f"--last={last} tokens must be at least 1, and fewer than the 8"):
        by_context.check([8, 16], last)


def test_documents_are_those_long_enough():
    assert [n >= 40 for n in LENGTHS] == [i in CHOSEN for i in range(6)]
