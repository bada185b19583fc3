"""Prompts in one session, with a real model: what is read is new, and answers are those to the whole text."""

import itertools
from dataclasses import replace

import pytest

from ringformer import register_attention, ring_attention
from ringformer.inference.sampling import Sampling
from ringformer.inference.text.chat import Chat
from ringformer.inference.text.run_text import Prompt
from ringformer.inference.text.text_generator import TextGenerator
from ringformer.inference.text.text_session import TextSession, shared_beginning
from ringformer.models.own_attention import REGISTERED
from tests.inference.models import CONFIG, generator, greedy
from tests.inference.runs import model_folder

QUESTIONS = ["what is a ring? " * 20, "and then?", "why?"]
DRAWN = Sampling(1.2, seed=5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("run") / "ours")


@pytest.fixture(scope="module")
def whole(run):
    """A model that reads every conversation whole, on one device."""
    return TextGenerator.load(run, max_length=512, compute_dtype="float32", template="llama3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh_dim", "cache_dtype"),
    [("1,1,1,1", "compute"), ("1,1,2,4", "compute"), pytest.param("1,1,1,2", "int8", marks=pytest.mark.slow)],
)
def test_after_a_stop_string_only_new_tokens_are_read(run, whole, mesh_dim, cache_dtype):
    """The first answer ends at a stop string, the second where its reader stops; each is what a model says to the whole
    conversation. Of each turn, tokens are read from the first on that differs from those in the cache."""
    options = {"max_length": 512, "compute_dtype": "float32", "template": "llama3"}
    chat = Chat(TextGenerator.load(run, mesh_dim=mesh_dim, cache_dtype=cache_dtype, **options))
    said = "".join(whole.stream(QUESTIONS[0], max_new_tokens=24, sampling=DRAWN, chat=True))
    held, read = [], 0
    for question, stop, pieces in zip(QUESTIONS, ([said[9:12]], [], []), (99, 3, 99), strict=True):
        answer = chat.ask(question, max_new_tokens=24, sampling=DRAWN, stop=stop)
        common, ids = shared_beginning(held, answer.prompt.ids), answer.prompt.ids
        assert answer.prompt_tokens == len(ids) - common
        assert answer.session.timings.prefill_tokens == read + answer.prompt_tokens
        if held:
            assert answer.prompt_tokens < 60 < common and held != ids[: len(held)], "some tokens are forgotten"
        list(itertools.islice(answer, pieces))
        if cache_dtype == "compute":
            expected = whole.session().answer(whole.text.encode_chat(chat.messages), 24, DRAWN, stop)
            assert "".join(expected).startswith(answer.text) and expected.ids[: len(answer.ids)] == answer.ids
        held, read = ids + answer.ids, read + answer.prompt_tokens
    assert answer.session.lengths == [len(held)] and len(chat.messages) == 5


PROMPTS = [[5, 9, 20, 3, 1, 2, 60], [5, 9, 20, 8, 8], [5, 9, 20, 8, 8], [5, 9], [7, 9, 20]]
READ = [7, 2, 1, 1, 3]


@pytest.mark.usual("1,1,1,1")
@pytest.mark.parametrize("mesh_dim", ["1,1,1,1", "1,1,1,4"])
def test_prompts_that_begin_as_the_one_before(mesh_dim, run):
    """Equal ones, beginnings of it and others, each continued as by whole forward passes."""
    session = TextSession(generator(CONFIG, mesh_dim), TextGenerator.load(run, max_length=8).tokenizer)
    read = 0
    for ids, expected in zip(PROMPTS, READ, strict=True):
        answer = session.answer(Prompt(ids, frozenset()), 3, Sampling(), [])
        list(answer)
        assert answer.ids == greedy(CONFIG, ids, 3) and answer.prompt_tokens == expected
        read += expected
        assert answer.session.timings.prefill_tokens == read and answer.session.lengths == [len(ids) + 3]


@pytest.mark.slow
def test_an_attention_of_ones_own_reads_every_prompt_whole(run):
    """Nothing can be added to its cache; answers are those of a new session."""

    def attend(q, k, v, *, window=None, **options):
        return ring_attention(q, k, v, window=4, **options)

    register_attention("near", attend, visible=lambda query, key, window: key > query - 4)
    try:
        model = generator.__wrapped__(replace(CONFIG, attention="near"), "1,1,1,2")
        tokenizer = TextGenerator.load(run, max_length=8).tokenizer
        session = TextSession(model, tokenizer)
        for ids in ([5, 9, 20, 3, 1, 2, 60], [5, 9, 20, 3, 8, 8], [5, 9, 20, 3, 8, 8, 1]):
            answer = session.answer(Prompt(ids, frozenset()), 4, Sampling(), [])
            list(answer)
            assert answer.prompt_tokens == len(ids)
            assert answer.ids == model.generate([ids], max_new_tokens=4)[0]
            assert answer.ids == greedy(replace(CONFIG, window=4), ids, 4)
    finally:
        del REGISTERED["near"]


def test_a_prompt_that_does_not_fit_is_refused_and_the_next_one_is_read():
    model = generator(CONFIG, "1,1,1,1", max_length=16)
    session = TextSession(model, None)
    for ids, new, message in (([1] * 17, 1, "append at most 16"), ([1] * 12, 9, "exceed the limit of 16 tokens")):
        with pytest.raises(ValueError, match=message):
            session.answer(Prompt(ids, frozenset()), new, Sampling(), [])
