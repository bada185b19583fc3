"""MRCR: the conversations read back turn by turn, the scorer written again, and models that answer in known ways."""

import difflib
import json
import random
import re

import pytest

from ringformer.data.chats.conversations import Message
from ringformer.evals.cases import Case
from ringformer.evals.mrcr import conversations as mrcr
from ringformer.evals.texts import shipped

PASSAGES = mrcr.passages_of(shipped.read_text())
QUESTION = re.compile(r"Prepend (\w{10}) to the (\d)\w\w \(1 indexed\) (.*) about the (.*)\. Do not include any ")


def tokens(prompt):
    return len(prompt if isinstance(prompt, str) else "".join(message.content for message in prompt)) // 4


def cases(length=6000, count=3, needles=4, seed=0, chat=True, passages=PASSAGES):
    return list(mrcr.cases_of_length(length, count, seed, needles, passages, tokens, chat=chat))


def exchanges_of(prompt):
    """The requests with their answers, and the question, of messages or of a text."""
    if isinstance(prompt, str):
        assert prompt.endswith("\n\nAssistant:")
        turns = re.split(r"(?:^|\n\n)(?:User: |Assistant:) ?", prompt)[1:-1]
    else:
        assert [message.role for message in prompt] == ["user", "assistant"] * (len(prompt) // 2) + ["user"]
        turns = [message.content for message in prompt]
    return list(zip(turns[:-1:2], turns[1::2], strict=True)), turns[-1]


def answer_to(prompt, passage_of=lambda answers, asked: answers[asked]):
    """Answer the question of a prompt as a reader of the conversation does."""
    exchanges, question = exchanges_of(prompt)
    prefix, number, kind, noun = QUESTION.match(question).groups()
    answers = [answer for request, answer in exchanges if request == f"Write a {kind} about the {noun}."]
    return prefix + passage_of(answers, int(number) - 1)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("needles", [2, 4, 8])
def test_a_reader_finds_the_answer(needles, chat):
    for case in cases(needles=needles, chat=chat):
        exchanges, question = exchanges_of(case.prompt)
        assert len(exchanges) == case.labels["exchanges"] > needles
        kind, noun = QUESTION.match(question).groups()[2:]
        wanted = f"Write a {kind} about the {noun}."
        same = [answer for request, answer in exchanges if request == wanted]
        assert len(same) == len(set(same)) == needles
        assert case.expected == (answer_to(case.prompt),)
        assert all(request == wanted or answer not in same for request, answer in exchanges)


def test_both_forms_hold_the_same_conversation():
    for of_messages, of_text in zip(cases(length=5000), cases(length=5000, chat=False), strict=True):
        (asked, question), (told, same) = exchanges_of(of_messages.prompt), exchanges_of(of_text.prompt)
        shorter = min(len(asked), len(told))
        assert question == same and [a for _, a in asked[:shorter]] == [a for _, a in told[:shorter]]


@pytest.mark.parametrize("length", [3000, 20_000])
def test_a_conversation_fills_its_context(length):
    for case in cases(length=length, needles=2):
        room = length - case.max_new_tokens
        assert room - 300 < tokens(case.prompt) <= room
        assert tokens(case.expected[0]) <= case.max_new_tokens


def test_a_conversation_beyond_the_text_repeats_passages_but_not_those_of_the_request():
    passages = PASSAGES[:20]
    for case in cases(length=10_000, passages=passages, needles=8):
        exchanges, _ = exchanges_of(case.prompt)
        assert len(exchanges) > len(passages)
        assert case.expected == (answer_to(case.prompt),)
    assert len({case.expected for case in cases(count=6)}) == 6 == len({case.prompt for case in cases(count=6)})
    assert cases() == cases() and cases(seed=1)[0].prompt != cases(seed=2)[0].prompt


def rule(expected, answer):
    """The rule of openai/mrcr, written again."""
    prefix = expected[:10]
    if not answer.startswith(prefix):
        return 0
    return float(difflib.SequenceMatcher(None, answer[len(prefix) :], expected[len(prefix) :]).ratio())


def test_the_score_is_that_of_the_rule():
    """On 100 answers: right, cut, with another passage, with words in between, without the prefix, behind it."""
    rng = random.Random(0)
    scores = []
    for i in range(100):
        expected = f"{rng.getrandbits(40):010x}" + PASSAGES[i]
        other = expected[:10] + PASSAGES[i + 1]
        words = expected.split(" ")
        rng.shuffle(words)
        cut = expected[: rng.randrange(len(expected))]
        answers = [expected, cut, other, " ".join(words), PASSAGES[i], "Sure! " + expected]
        answer = answers[i % 6]
        case = Case(1, i, "", (expected,), 1, {})
        assert mrcr.score(case, answer) == rule(expected, answer)
        scores.append(mrcr.score(case, answer))
    assert scores[0] == 1 and scores[4] == scores[5] == 0 and 0 < scores[2] < 0.9
    assert mrcr.score(case, "\n " + expected) == 1.0


def test_readers_of_other_answers_score_what_the_page_says():
    """2% in the mean for an answer to the same request that is not the one asked for."""
    right = []
    other = []
    for case in cases(count=12, needles=4):
        right.append(mrcr.score(case, answer_to(case.prompt)))
        other.append(mrcr.score(case, answer_to(case.prompt, lambda answers, asked: answers[asked - 1])))
    assert set(right) == {1.0}
    assert sum(other) / len(other) == pytest.approx(0.02, abs=0.015)


@pytest.mark.parametrize("needles", [1, 9, 0])
def test_a_request_is_made_two_to_eight_times(needles):
    with pytest.raises(ValueError, match="2 to 8 times"):
        mrcr.check(needles)


def test_a_text_without_paragraphs_and_a_context_without_room_are_refused():
    with pytest.raises(ValueError, match="has 0 paragraphs of 40 to 120 words"):
        mrcr.passages_of("one line\n\nanother")
    with pytest.raises(ValueError, match="ask for a longer context"):
        cases(length=700, needles=8)


def test_the_table_has_intervals():
    rows = [
        {"length": 4096, "prompt_tokens": 4000 + i, "exchanges": 30 + i, "score": score, "index": i}
        for i, score in enumerate((0.0, 0.5, 1.0, 0.5))
    ]
    table = mrcr.table([*rows, *({**row, "length": 8192, "score": 1.0} for row in rows)]).splitlines()
    assert table[1].split()[:5] == ["4,096", "4,002", "30-33", "4", "50.0%"]
    low, high = table[1].split()[5].rstrip("%").split("-")
    assert 0 <= float(low) < 50 < float(high) <= 100
    assert table[2].split()[4:] == ["100.0%", "51.0-100.0%"]


def test_prompts_of_messages_have_hashes_of_their_own():
    def hashed(*contents):
        return Case(1, 0, tuple(Message("user", text) for text in contents), ("a",), 1, {}).prompt_hash

    assert hashed("a") == hashed("a") != hashed("b") and hashed("a", "b") != hashed("b", "a")
    assert json.loads(Case(1, 0, (), ("a",), 1, {}).key)[:2] == [1, 0]
