"""A chat reads new turns only, and what it has in its cache is the conversation as its template renders it."""

import pytest

from ringformer.data.chats.conversations import Message
from ringformer.data.chats.templates import load_template
from ringformer.inference.text.chat import Chat
from ringformer.inference.text.run_text import RunText
from ringformer.inference.text.text_generator import TextGenerator
from tests.data.chat_samples import llama3, sentencepiece
from tests.inference.fake_generator import FakeGenerator
from tests.inference.runs import llama2, run_folder

CASES = [
    ("bytes", "vicuna"),
    ("sp", "vicuna"),
    ("sp", "llama2"),
    ("llama2", "vicuna"),
    ("llama2", "llama2"),
    ("llama3", "llama3"),
    ("llama3", "tokenizer"),
]
TURNS = [("what is a ring?", "It carries keys."), ("and then?", "日本 - one\n- two"), ("  b ", "the end")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    tokenizers = {
        "bytes": "bytes",
        "sp": sentencepiece(folder),
        "llama2": llama2(folder / "2"),
        "llama3": llama3(folder / "3"),
    }
    return {
        (kind, name): RunText(
            run_folder(folder / f"{kind}-{name}", str(tokenizers[kind]), format="messages", template=name)
        )
        for kind, name in CASES
    }


def rendered(text, messages):
    """The oracle: the conversation as training tokenizes it, and where its answers are."""
    ((ids, trained),) = text.tokenizer.encode_chats([load_template(text.template_name, text.tokenizer)(messages)])
    return ids.tolist(), trained


def answer_ids(text, messages, answer):
    """The tokens of an answer behind a conversation, its end token too, as a trained model says them."""
    before = text.encode_chat(messages).ids
    ids, _ = rendered(text, [*messages, Message("assistant", answer)])
    assert ids[: len(before)] == before
    return ids[len(before) :]


def script_of(text, turns, system=None):
    messages, script = [] if system is None else [Message("system", system)], []
    for question, answer in turns:
        messages.append(Message("user", question))
        script.append([answer_ids(text, messages, answer)])
        messages.append(Message("assistant", answer))
    return script, messages


@pytest.mark.parametrize(("kind", "name"), CASES)
@pytest.mark.parametrize("system", (None, "You are a ring."))
def test_the_cache_is_the_conversation_as_it_is_trained_on(runs, kind, name, system):
    text = runs[kind, name]
    script, messages = script_of(text, TURNS, system)
    generator = FakeGenerator(script)
    chat = Chat(TextGenerator(generator, text), system)
    for question, answer in TURNS:
        assert "".join(chat.ask(question, max_new_tokens=200)).removesuffix(" ") == answer
    (session,) = generator.sessions
    assert session.rows == [rendered(text, messages)[0]]
    assert len(session.appended) == 3
    fresh = [len(new[0]) for new in session.appended]
    assert max(fresh[1:]) < 60 and sum(fresh) + sum(len(ids) for (ids,) in script) == len(session.rows[0])


def test_an_answer_that_was_cut_is_ended_in_the_cache(runs):
    """By max_new_tokens, or by who asks for no more: the next question is appended behind an end token."""
    text = runs["sp", "vicuna"]
    ids = answer_ids(text, [Message("user", "a")], "The ring carries keys")
    first, second = (Message("user", "a"), Message("assistant", text.tokenizer.decode(ids[:3]).lstrip())), "b"
    expected, _ = rendered(text, [*first, Message("user", second), Message("assistant", "")])
    for most, taken in ((3, 99), (20, 3)):
        generator = FakeGenerator([[ids], [ids]])
        chat = Chat(TextGenerator(generator, text))
        answer = chat.ask("a", max_new_tokens=most)
        while len(answer.ids) < taken and next(answer, None) is not None:
            pass
        assert answer.ids == ids[:3]
        again = chat.ask(second, max_new_tokens=5)
        assert again.prompt_tokens == len(again.prompt.ids) - len(answer.prompt.ids) - 3
        (session,) = generator.sessions
        assert session.rows[0] == expected[: len(session.rows[0])] and len(session.rows[0]) > len(expected) - 3
        assert chat.messages == [*first, Message("user", second)]


def texts_of(session):
    """The tokens of each prompt that a session of one row read, and those that it read of them."""
    return [row for (row,) in session.appended]


def test_another_spelling_is_read_from_its_first_token_on(runs):
    """A model may spell an answer in other tokens than the tokenizer does; nothing of them stays in the cache."""
    text = runs["sp", "vicuna"]
    spelled = [i for letter in " ring" for i in text.tokenizer.encode(letter)] + [text.tokenizer.eos_id]
    assert len(text.tokenizer.encode(" ring")) < 4
    generator = FakeGenerator([[spelled], [spelled]])
    chat = Chat(TextGenerator(generator, text))
    first = chat.ask("a", max_new_tokens=9)
    assert "".join(first) == "ring"
    second = chat.ask("b", max_new_tokens=9)
    expected = text.encode_chat([Message("user", "a"), Message("assistant", "ring"), Message("user", "b")]).ids
    assert [session.rows for session in generator.sessions] == [[expected]]
    assert texts_of(generator.sessions[0]) == [first.prompt.ids, expected[len(first.prompt.ids) :]]
    assert second.prompt_tokens == len(expected) - len(first.prompt.ids)


def test_a_template_that_rewrites_earlier_turns_is_read_from_there_on(tmp_path):
    """Here the thoughts of earlier answers are left out."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content if loop.last else m.content.split('~')[-1] }}<|eot_id|>{% endgeneration %}"
        "{% else %}<|start_header_id|>{{ m.content }}<|end_header_id|>{% endif %}{% endfor %}"
    )
    run = run_folder(tmp_path / "run", str(llama3(tmp_path / "t", template)), format="messages", template="tokenizer")
    text = RunText(run)
    thoughts = answer_ids(text, [Message("user", "a")], "hm~the ring")
    plain = answer_ids(text, [Message("user", "a")], "yes")
    generator = FakeGenerator([[plain], [thoughts], [plain]])
    chat = Chat(TextGenerator(generator, text))
    answers = []
    for question in "abc":
        answers.append(chat.ask(question, max_new_tokens=50))
        list(answers[-1])
    (session,) = generator.sessions
    second, third = (answer.prompt.ids for answer in answers[1:])
    assert third[: len(second)] == second, "up to the answer with the thoughts"
    assert texts_of(session)[1:] == [second[len(answers[0].prompt.ids) + len(plain) :], third[len(second) :]]
    assert session.rows == [third + plain] and "hm~" not in text.tokenizer.decode(session.rows[0])
    assert [m.content for m in chat.messages] == ["a", "yes", "b", "hm~the ring", "c"]


def test_a_stop_string_is_forgotten_and_what_is_before_it_is_not_read_anew(runs):
    """It is in the cache, but not in the conversation."""
    text = runs["llama3", "llama3"]
    script, _ = script_of(text, [("a", "the ring STOP and"), ("b", "c")])
    generator = FakeGenerator(script)
    chat = Chat(TextGenerator(generator, text))
    first = chat.ask("a", max_new_tokens=50, stop=["STOP"])
    assert "".join(first) == "the ring "
    second = chat.ask("b", max_new_tokens=50)
    (session,) = generator.sessions
    assert second.prompt.ids == text.encode_chat(chat.messages).ids == session.rows[0]
    cached = first.prompt.ids + first.ids
    kept = next(i for i, (x, y) in enumerate(zip(cached, second.prompt.ids, strict=False)) if x != y)
    assert kept > len(first.prompt.ids) and texts_of(session)[1] == second.prompt.ids[kept:]
    assert "STOP" not in text.tokenizer.decode(session.rows[0])


def test_an_interrupted_answer_begins_anew(runs):
    """Ctrl-C within a step: nobody knows what the session has."""
    text = runs["bytes", "vicuna"]
    script, _ = script_of(text, [("a", "the ring"), ("b", "yes")])
    generator = FakeGenerator(script)
    chat = Chat(TextGenerator(generator, text))
    answer = chat.ask("a", max_new_tokens=50)
    next(answer)
    generator.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        next(answer)
    assert list(answer) == []
    second = chat.ask("b", max_new_tokens=50)
    assert second.prompt_tokens == len(second.prompt.ids) and len(generator.sessions) == 2
    assert chat.messages[1] == Message("assistant", "t")


def test_a_conversation_that_is_full_stays_as_it_was(runs):
    text = runs["bytes", "vicuna"]
    script, messages = script_of(text, [("a", "b"), ("c", "d")])
    generator = FakeGenerator(script, max_length=220)
    chat = Chat(TextGenerator(generator, text))
    list(chat.ask("a", max_new_tokens=5))
    for bad, message in (("x" * 99, "limit of 220 tokens: the prompt alone fills it"), ("", "the prompt is empty")):
        with pytest.raises(ValueError, match=message):
            chat.ask(bad, max_new_tokens=5)
    assert "".join(chat.ask("c", max_new_tokens=5)) == "d"
    (session,) = generator.sessions
    assert session.rows == [rendered(text, messages)[0]] and len(session.appended) == 2


def test_a_cache_that_turns_have_left_full_of_holes_is_read_anew(runs):
    """In the session that there is: another beside it would take the memory twice."""
    text = runs["sp", "llama2"]
    script, messages = script_of(text, TURNS)
    generator = FakeGenerator(script, turns_that_fit=2)
    chat = Chat(TextGenerator(generator, text))
    answers = [(list(answer := chat.ask(question, max_new_tokens=99)), answer)[1] for question, _ in TURNS]
    assert [answer.prompt_tokens == len(answer.prompt.ids) for answer in answers] == [True, False, True]
    (session,) = generator.sessions
    assert session.rows == [rendered(text, messages)[0]]
