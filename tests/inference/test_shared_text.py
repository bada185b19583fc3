"""A text that rows share is read once, and leaves as much room as a new session does: also without a shared cache."""

from dataclasses import replace

import pytest

from ringformer.inference.session import Session
from ringformer.inference.shared_text import SharedText, shared_length
from tests.inference.models import CONFIG, generator, greedy

DOCUMENT = [(7 * i * i + 3 * i) % 61 for i in range(50)]
QUESTIONS = [[8, 1, 30, 9, 2], [17], [2, 2, 59, 45], [5, 6], [7, 1, 1]]
NEW = 5
CASES = {
    "shared cache, ring of 4": ({}, "1,1,1,4", None, [[1, 50]]),
    "windows": ({"window": 5}, "1,1,1,1", None, [[2, 50]]),
    "windows, in chunks on a ring": ({"window": 5}, "1,1,1,2", 24, [[2, 48]]),
    "dp": ({}, "2,1,1,2", None, [[2, 48]]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_rows_go_on_as_alone_up_to_the_last_token_that_fits(case, monkeypatch):
    """The longest row has exactly as many tokens as the model reads at most, and its batch comes last."""
    changes, mesh_dim, chunk, read = CASES[case]
    config = replace(CONFIG, **changes)
    model = generator(config, mesh_dim, max_length=len(DOCUMENT) + len(QUESTIONS[0]) + NEW, prefill_chunk=chunk)
    calls, append = [], Session._append

    def noted(self, rows, scored=False):
        calls.append([len(rows), max(map(len, rows))])
        return append(self, rows, scored)

    monkeypatch.setattr(Session, "_append", noted)
    length = shared_length(model, len(DOCUMENT), batches=3)
    shared = SharedText(model, DOCUMENT[:length], rows=2)
    for batch in ([QUESTIONS[1], QUESTIONS[2]], [QUESTIONS[3], QUESTIONS[4]], [QUESTIONS[0], QUESTIONS[0]]):
        rows = [DOCUMENT[length:] + question for question in batch]
        session = shared.session(max(map(len, rows)) + NEW)
        session.append(rows)
        answers = list(zip(*session.decode(max_new_tokens=NEW), strict=True))
        for question, answer in zip(batch, answers, strict=True):
            assert list(answer) == greedy(config, DOCUMENT + question, NEW)
        del session
    assert [call for call in calls if call[1] > 20] == read, "the document once"


def test_what_is_not_worth_it_is_not_shared():
    windows = generator(replace(CONFIG, window=5), "1,1,1,2")
    assert shared_length(windows, 50, batches=2) == 48 and shared_length(windows, 50, batches=1) == 0
    assert shared_length(generator(CONFIG, "1,1,1,2"), 50, batches=1) == 50
