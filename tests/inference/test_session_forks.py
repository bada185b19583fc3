"""Rows that begin with one text, tokens forgotten, and scores, against whole forward passes in float64."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from ringformer.inference.session import Session
from tests.inference.models import CONFIG, generator, log_probabilities

DOCUMENT = [5, 9, 20, 3, 1, 2, 60, 33, 12, 7, 4, 18, 44, 31, 6, 6, 52, 10, 11, 40, 21]
QUESTIONS = [[8, 1, 30], [17], [2, 2, 59, 45, 23, 0, 12]]
GQA = {"num_kv_heads": 1}
MESHES = {
    "one device": ("1,1,1,1", {}, None),
    "ring of 8": ("1,1,1,8", {}, None),
    "in chunks, striped": ("1,1,1,2", {"layout": "striped"}, 4),
    "fsdp x tp x sp": ("1,2,2,2", {}, 8),
    "keys travel": ("1,1,1,4", GQA, 8),
    "heads exchanged, fewer key heads than tp": ("1,1,4,2", GQA | {"ulysses": 1}, None),
    "rows on two devices": ("2,1,1,1", {}, None),
}
APART = "rows on two devices"
"""Its rows cannot share a text."""
SLOW = "keys travel", "heads exchanged, fewer key heads than tp"
CASES = [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in MESHES if case != APART]


def check(session: Session, texts: list[list[int]], config, new: int = 3) -> list[list[int]]:
    """Decode, and compare the logits after each token with those of a whole forward pass. Return the texts."""
    texts = [list(text) for text in texts]
    for _ in range(new):
        logits = np.asarray(session.logits, np.float64)
        for row, text in enumerate(texts):
            found = logits[row] - np.log(np.exp(logits[row] - logits[row].max()).sum()) - logits[row].max()
            np.testing.assert_allclose(found, log_probabilities(config, text)[-1], atol=1e-4)
        (step,) = session.decode(max_new_tokens=1)
        for text, token in zip(texts, step, strict=True):
            text.append(token)
    assert session.lengths == [len(text) for text in texts]
    return texts


@pytest.mark.usual("in chunks, striped")
@pytest.mark.parametrize("case", CASES)
def test_rows_share_the_text_of_one(case):
    mesh_dim, changes, chunk = MESHES[case]
    config = replace(CONFIG, **changes)
    session = generator(config, mesh_dim, prefill_chunk=chunk).session(1)
    session.append([DOCUMENT])
    kept = [np.asarray(x) for x in jax.tree.leaves(session._state)]
    fork = session.fork(3, max_new=24)
    fork.append(QUESTIONS)
    texts, turn = check(fork, [DOCUMENT + question for question in QUESTIONS], config), [[3], [9, 9], [1]]
    fork.append(turn)
    check(fork, [text + more for text, more in zip(texts, turn, strict=True)], config)
    del fork
    again = session.fork(2, max_new=8)
    check(again, [DOCUMENT] * 2, config)
    for before, after in zip(kept, jax.tree.leaves(session._state), strict=True):
        np.testing.assert_array_equal(before, np.asarray(after))


def test_the_shared_text_is_once_on_the_devices():
    session = generator(CONFIG, "1,1,1,2", max_length=4096).session(1)
    session.append([DOCUMENT])
    whole = session._state.cache.k.values.nbytes
    fork = session.fork(50, max_new=16)
    assert fork._state.cache.k.values.nbytes < whole / 4, "fifty rows of the whole text would take fifty times"


@pytest.mark.usual(APART)
@pytest.mark.parametrize("case", [*CASES, APART])
def test_what_is_forgotten_leaves_no_trace(case):
    """Logits after a truncation and another text are those of a whole forward pass over that text."""
    mesh_dim, changes, chunk = MESHES[case]
    config = replace(CONFIG, **changes)
    session = generator(config, mesh_dim, prefill_chunk=chunk).session(2)
    session.append([DOCUMENT, DOCUMENT[:4]])
    mark = session.mark()
    free = session._slots.free
    for question in QUESTIONS:
        session.append([question, question[::-1]])
        check(session, [DOCUMENT + question, DOCUMENT[:4] + question[::-1]], config, new=2)
        session.rewind(mark)
        assert session._slots.free == free, "slots are free again"
    check(session, [DOCUMENT, DOCUMENT[:4]], config, new=1)
    session.truncate([10, 2])
    with pytest.raises(ValueError, match="row 0 was truncated: append to it first, or rewind to a mark"):
        session.decode(max_new_tokens=1)
    session.append([[7, 7], [8]])
    check(session, [[*DOCUMENT[:10], 7, 7], [*DOCUMENT[:2], 8]], config)


@pytest.mark.usual("one device")
@pytest.mark.parametrize("case", CASES)
def test_scores(case):
    """Score every token appended to a session and to its fork; compare losses and likeliest tokens with the oracle."""
    mesh_dim, changes, chunk = MESHES[case]
    config = replace(CONFIG, **changes)
    session = generator(config, mesh_dim, prefill_chunk=chunk).session(1)
    session.append([DOCUMENT])
    fork = session.fork(3, max_new=12)
    endings = [*QUESTIONS[:2], [int(log_probabilities(config, DOCUMENT)[-1].argmax()), 3]]
    for scores, ending in zip(fork.score(endings), endings, strict=True):
        compare(scores, DOCUMENT, ending, config)
    del fork
    (scores,) = session.score([QUESTIONS[2] * 2])
    compare(scores, DOCUMENT, QUESTIONS[2] * 2, config)


def compare(scores, before, tokens, config):
    expected = log_probabilities(config, before + tokens)[len(before) - 1 : -1]
    np.testing.assert_allclose(scores.losses, -expected[np.arange(len(tokens)), tokens], atol=1e-4)
    assert scores.likeliest.tolist() == (expected.argmax(axis=1) == tokens).tolist()


def test_what_cannot_be_is_refused():
    session = generator(CONFIG, "1,1,1,1").session(1)
    for refused in (session.mark, lambda: session.fork(2, 8), lambda: session.score([[1]])):
        with pytest.raises(ValueError, match="append a prompt first"):
            refused()
    session.append([DOCUMENT])
    with pytest.raises(ValueError, match="row 0 has 21 tokens: it can be truncated to 0 to 21, not 22"):
        session.truncate([22])
    with pytest.raises(ValueError, match="2 lengths given, but the session has 1 rows"):
        session.truncate([1, 2])
    with pytest.raises(ValueError, match="2 rows given, but the session has 1"):
        session.score([[1], [2]])
    mark = session.mark()
    session.truncate([5])
    session.append([[1] * 20])
    with pytest.raises(ValueError, match="the session was truncated to before this mark"):
        session.rewind(mark)
    session.truncate([5])
    session.append([DOCUMENT[5:]])
    fork = session.fork(2, max_new=8)
    for change in (
        lambda: session.append([[1]]),
        lambda: session.truncate([3]),
        lambda: session.decode(max_new_tokens=1),
    ):
        with pytest.raises(ValueError, match="rows of another session share this one's cache"):
            change()
    with pytest.raises(ValueError, match="row 1 has 21 tokens: it can be truncated to 21 to 21, not 20"):
        fork.truncate([21, 20])
    with pytest.raises(ValueError, match="row 0 would have 31 tokens, but max_length is 29: append at most 8"):
        fork.append([[1] * 10, [2]])
    with pytest.raises(ValueError, match="only a session of one row"):
        fork.fork(2, 8)
    windowed = generator(replace(CONFIG, window=5), "1,1,1,1").session(1)
    windowed.append([DOCUMENT])
    with pytest.raises(ValueError, match="models with windows"):
        windowed.fork(2, 8)


@pytest.mark.parametrize("change", ["append", "truncate", "fork", "decode"])
def test_a_decode_ends_when_its_session_changes(change):
    """It would go on from text that is forgotten. A refused change is none."""
    session = generator(CONFIG, "1,1,1,1").session(1)
    session.append([DOCUMENT])
    running = session.decode(max_new_tokens=4)
    next(running)
    with pytest.raises(ValueError):
        session.append([[-1]])
    next(running)
    changes = {
        "append": lambda: session.append([[1]]),
        "truncate": lambda: session.truncate([5]),
        "fork": lambda: session.fork(2, max_new=4),
        "decode": lambda: session.decode(max_new_tokens=1),
    }
    other = changes[change]()
    with pytest.raises(ValueError, match="the session has changed since this decode began: call decode again"):
        next(running)
    del other
