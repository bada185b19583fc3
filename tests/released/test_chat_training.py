"""Training on conversations with released templates: what is trained on continues the prompt that a user will send, and
is what the templates' marked variants mark.

A variant's marks are corrected in three ways before they are compared: they begin at the prompt's end, include the
token that ends the turn, and end there.
"""

import json
import random
import re
from collections import Counter
from typing import NamedTuple

import pytest

from ringformer.data import open_or_build
from ringformer.data.chats.continued_ids import encode_answers
from ringformer.data.chats.sandboxed_template import BREAK, START, STOP, ChatTemplate, Refused, without_marks
from ringformer.data.chats.templates import load_template
from ringformer.data.chats.tokenizer_template import OUTPUT
from ringformer.data.chats.trained_answers import sequences_of
from ringformer.data.stores.options import StoreOptions
from ringformer.data.tokenizers.load import load_tokenizer
from ringformer.inference.text.run_text import RunText
from tests.commit import ROOT
from tests.inference.runs import converted_folder
from tests.released.folders import llama_cpp_templates, tokenizer, trl_templates
from tests.released.test_chat_prompts import CALLED, RELEASED, RESULT, THOUGHT, TOOL, TOOLS, messages_of, turns

CONVERSATIONS = {
    "one turn": turns("What is a ring?", "It carries keys."),
    "a system message": turns("What is a ring?", "It carries keys.", system="Be brief."),
    "unicode": turns("日本語 🙂 é?", "naïve café 🙂", "and?", "日本語"),
    "five turns": turns("a", "b1", "c", "d1", "e", "f1", "g", "h1", "i", "j1"),
    "thoughts": turns("Why?", THOUGHT, "And then?", THOUGHT.replace("Keys", "Values")),
    "thoughts beside answers": [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Keys move.", "reasoning_content": "They move keys."},
    ],
    "an empty answer": turns("Say nothing.", "", "Thanks.", "Please."),
    "a tool": [*turns("How many words?"), CALLED, RESULT, {"role": "assistant", "content": "There are two words."}],
}
MARKED = re.compile("_training$")
NAMES = re.compile(r"<\|?/?[\w▁-]+\|?>|<｜[^｜>]+｜>|\[/?[A-Z_]+\]|\[\|\w+\|\]|\[e~\[")
"""Control tokens in a template's own text: without its tokenizer, all that look so."""
HEADER = 20
"""Characters between the end of a prompt and a mark behind it: Gemma's diffusion model writes its header after a tool's
result, but not at the end of the prompt."""
USUAL = ("qwen3", "qwen2_5", "llama3", "gemma3", "gptoss", "deepseek_r1_distill", "phi3", "cohere2")


class Shown(NamedTuple):
    """A character of a rendered conversation that is trained on."""

    place: int
    character: str


def compiled(template: str) -> ChatTemplate:
    controls = sorted({*NAMES.findall(template), "<s>", "</s>"} - {"<think>", "</think>"})
    return ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}, controls, None, OUTPUT)


def as_sent(kind: str) -> list[list]:
    return [list(message) for message in messages_of(CONVERSATIONS[kind], TOOLS_OF.get(kind))]


TOOLS_OF = {"a tool": [TOOL]}


def trained_here(template: str, kind: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the whole conversation, and the spans in it that are trained on. Raises Refused, also if an answer is in
    another sequence."""
    *others, whole = sequences_of(compiled(template), as_sent(kind))
    if others:
        raise Refused("rewrites an answer")
    text, spans = "", []
    for part, trained, _ in whole["parts"]:
        if trained and spans and spans[-1][1] == len(text):
            spans[-1] = (spans[-1][0], len(text) + len(part))
        elif trained:
            spans.append((len(text), len(text) + len(part)))
        text += part
    return text, spans


def marked_there(template: str, kind: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the whole conversation as the marked variant writes it, and the spans of its marks."""
    variant = compiled(template)
    rendered = variant.render(variant.read(as_sent(kind)))
    text, spans = "", []
    for number, part in enumerate(re.split(f"{START}|{STOP}", rendered)):
        part = part.replace(BREAK, "")
        if number % 2 and part:
            spans.append((len(text), len(text) + len(part)))
        text += part
    return text, spans


def compared(plain: str, marked: str, kind: str) -> str:
    """Say how the spans of a template and those of its marked variant differ."""
    try:
        text, spans = trained_here(plain, kind)
    except Refused as error:
        return "rewrites an answer" if "rewrites" in str(error) else "refused"
    try:
        variant_text, marks = marked_there(marked, kind)
    except Refused:
        return "refused by the variant"
    if variant_text != text:
        return "another text"
    template = compiled(plain)
    messages = template.read(as_sent(kind))
    starts = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    prompts = [len(without_marks(template.render(messages[:i], True)).replace(BREAK, "")) for i in starts]
    corrections = set()
    for (start, stop), prompt in zip(spans, prompts, strict=True):
        inside = [mark for mark in marks if mark[1] > prompt and mark[0] < stop]
        if not inside:
            return "wrong: an answer without a mark"
        begin, end = inside[0][0], inside[-1][1]
        if begin < prompt or len(text[prompt:begin]) in range(1, HEADER):
            corrections.add("begins at the prompt's end")
            begin = prompt
        if end < stop:
            if NAMES.fullmatch(text[end:stop].strip()) is None:
                return "wrong: it ends before the variant"
            corrections.add("includes the end token")
        if end > stop:
            if text[stop:end].strip() and NAMES.fullmatch(text[stop:end].strip()) is None:
                return "wrong: it ends behind the variant"
            corrections.add("excludes what follows it")
        if begin != start:
            return "wrong: it begins elsewhere"
    return "equal" + "".join(f", {correction}" for correction in sorted(corrections))


@pytest.mark.parametrize("is_usual", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "all others"])
def test_masks_are_those_of_the_marked_variants(is_usual):
    texts = trl_templates()
    verdicts: Counter[str] = Counter()
    wrong = []
    for name, marked in texts.items():
        plain = texts.get(MARKED.sub("", name))
        if MARKED.search(name) is None or plain is None or (MARKED.sub("", name) in USUAL) != is_usual:
            continue
        for kind in CONVERSATIONS:
            verdict = compared(plain, marked, kind)
            verdicts[verdict] += 1
            if verdict.startswith("wrong"):
                wrong.append((name, kind, verdict))
    for verdict, count in verdicts.most_common():  # for whoever looks with -s
        print(f"{count:4} {verdict}")
    assert not wrong
    assert sum(count for verdict, count in verdicts.items() if verdict.startswith("equal")) > verdicts.total() / 3


def continues_or_refuses(template: str, kind: str) -> str:
    """Check that each answer follows the template's prompt for it, and is trained on once."""
    ours = compiled(template)
    try:
        sequences = sequences_of(ours, as_sent(kind))
    except Refused as error:
        return re.sub(r"'.*'|\d+|: .*", "_", str(error), flags=re.DOTALL)[:60]
    messages = ours.read(as_sent(kind))
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    trained = []
    for sequence in sequences:
        text, was_trained, number = "", False, -1
        for part, is_trained, _ in sequence["parts"]:
            if is_trained and not was_trained:
                number += 1
                trained.append(sequence["answers"][number])
                prompt = without_marks(ours.render(messages[: answers[trained[-1]]], True)).replace(BREAK, "")
                assert text.startswith(prompt), (text, prompt)
                assert START in ours.render(messages) or text == prompt
            text, was_trained = text + part, is_trained
    assert sorted(trained) == list(range(len(answers)))
    return "trained"


@pytest.mark.slow
def test_all_templates_train_on_what_continues_their_prompts():
    """All templates and conversations: each answer is trained on once, behind its own prompt, or the record is
    refused."""
    verdicts: Counter[str] = Counter()
    for texts in (trl_templates(), llama_cpp_templates()):
        for template in texts.values():
            verdicts.update(continues_or_refuses(template, kind) for kind in CONVERSATIONS)
    for verdict, count in verdicts.most_common():
        print(f"{count:4} {verdict}")
    trained, total = verdicts["trained"], verdicts.total()
    assert f"of {total:,}, {trained:,} are trained on" in page()
    assert f"{total - trained} are refused by name" in page()


def page() -> str:
    """Text of the page that reports these counts, on one line."""
    return " ".join((ROOT / "docs" / "data.md").read_text().split())


def long_thoughts() -> list[dict]:
    """Five questions and answers with thoughts, some 12,000 tokens as Qwen3 shows them in the end."""
    chosen = random.Random(0)
    carried = ["ring", "keys", "values", "queries", "devices", "hops", "chunks", "layers", "gradients", "tokens"]
    words = [*carried, "carry", "compute", "wait", "send", "own"]

    def text(number: int) -> str:
        return " ".join(chosen.choices(words, k=number))

    messages = []
    for _ in range(5):
        answer = f"<think>\n{text(4000)}\n</think>\n\n{text(1400)}"
        messages += [{"role": "user", "content": text(800)}, {"role": "assistant", "content": answer}]
    return messages


@pytest.mark.slow
def test_what_rewritten_answers_cost(tmp_path, capsys):
    """32K tokens with all thoughts: the sequences are as long as the page says, and a line says that they are many."""
    folder = str(tokenizer("qwen3"))
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": long_thoughts()}) + "\n")
    tokens = {}
    for rewritten in ("split", "last"):
        options = StoreOptions(
            f"jsonl:{tmp_path}/a.jsonl",
            tokenizer=folder,
            held_out=0,
            format="messages",
            template="tokenizer",
            rewritten=rewritten,
        )
        store, _ = open_or_build(tmp_path / rewritten, options, load_tokenizer(folder))
        tokens[rewritten] = store.meta["tokens"]
        assert store.meta["documents"] == (5 if rewritten == "split" else 1)
        assert ("times the text" in capsys.readouterr().err) == (rewritten == "split")
    assert f"{tokens['last']:,} tokens as Qwen3 shows them in the end" in page(), tokens
    assert f"five sequences of {tokens['split']:,}" in page(), tokens


SPACED = {
    "newlines": turns("What is a ring?", "\n\nIt carries keys."),
    "more newlines": turns("And what else?", "\n\n\nValues."),
    "a tab": turns("What is a ring?", "\tIt carries keys."),
    "spaces": turns("What is a ring?", "    It carries keys."),
}
"""Answers that begin with white space, which a tokenizer would join with the end of their prompts."""


@pytest.mark.usual("smol")
@pytest.mark.parametrize("name", RELEASED)
def test_trained_tokens_continue_those_of_the_prompt(name, tmp_path):
    """By the family's own tokenizer: the tokens before an answer are those that `generate --chat` sends."""
    folder = RELEASED[name].folder(name, tmp_path / "tokenizer")
    ours = load_tokenizer(str(folder))
    template = load_template("tokenizer", ours)
    text = RunText(converted_folder(tmp_path / "model", folder))
    compared = 0
    for kind, conversation in (CONVERSATIONS | SPACED).items():
        messages = messages_of(conversation, TOOLS.get(kind))
        answers = [place for place, message in enumerate(messages) if message.role == "assistant"]
        try:
            sequences = template.sequences(messages)
        except ValueError:
            continue
        encoded = encode_answers(ours, [sequence.segments for sequence in sequences])
        for sequence, (ids, trained) in zip(sequences, encoded, strict=True):
            begins = [i for i in range(len(ids)) if trained[i] and not trained[i - 1]]
            for number, start in zip(sequence.answers, begins, strict=True):
                expected = text.encode_chat(messages[: answers[number]]).ids
                assert ids[:start].tolist() == expected, (kind, number)
                compared += 1
    assert compared >= 5
