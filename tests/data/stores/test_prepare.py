"""Chats become stores with masks; reports, changed sources and what cannot be trained on."""

import io
import itertools
import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from benchmarks.prepare import measure
from ringformer.cli import main
from ringformer.data import TokenStore, load_tokenizer, open_or_build
from ringformer.data.chats.templates import load_template
from ringformer.data.stores.inspect_store import show_samples
from ringformer.data.stores.options import StoreOptions
from tests.data.chat_samples import CHATS, LLAMA3_JINJA, chat, llama3, sentencepiece
from tests.terminal import on_terminal


def write(path, conversations):
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    records = [
        {"id": str(i), "conversations": [{"from": names[role], "value": text} for role, text, *_ in messages]}
        for i, messages in enumerate(conversations)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return f"jsonl:{path}"


MANY = [*CHATS.values(), *(chat(f"question {i}", "so " * (i % 30) + str(i), "and?", str(i)) for i in range(60))]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(llama3(tmp_path_factory.mktemp("l3"))))


@pytest.fixture
def options(tmp_path):
    source = write(tmp_path / "chats.jsonl", MANY)
    return StoreOptions(source, held_out=0.2, format="sharegpt", template="llama3")


def documents(store):
    pairs = itertools.pairwise(store.offsets)
    return [(store.tokens[a:b].tolist(), store.mask[a:b].astype(bool).tolist()) for a, b in pairs]


@pytest.mark.parametrize("group", [2**21, 50])
def test_stores_hold_ids_and_masks_of_every_chat(tmp_path, options, tokenizer, monkeypatch, group):
    monkeypatch.setattr("ringformer.data.stores.prepare.ENCODE_CHARACTERS", group)
    stores = open_or_build(tmp_path / "s", options, tokenizer)
    template = load_template("llama3", tokenizer)
    expected = [(ids.tolist(), t.tolist()) for ids, t in tokenizer.encode_chats([template(m) for m in MANY])]
    assert sorted(documents(stores[0]) + documents(stores[1])) == sorted(expected)
    assert [d for d in expected if d in documents(stores[0])] == documents(stores[0]), "order is kept"
    for store in stores:
        assert store.meta["trained_tokens"] == np.sum(store.mask) < store.meta["tokens"]
    answers = sum(len(m.content.encode()) for messages in MANY for m in messages if m.role == "assistant")
    assert sum(store.meta["utf8_bytes"] for store in stores) == answers


def test_the_report_counts_what_was_made_and_left_out(tmp_path, options, tokenizer):
    path = tmp_path / "chats.jsonl"
    path.write_text(path.read_text() + "{}\n" + path.read_text().splitlines()[0] + "\n")
    with pytest.raises(ValueError, match=rf"chats\.jsonl:{len(MANY) + 1}: no list 'conversations'.*--skip_malformed"):
        open_or_build(tmp_path / "s", options, tokenizer)
    options = replace(options, skip_malformed=True, clean="duplicate,short")
    stores = open_or_build(tmp_path / "s", options, tokenizer)
    report = json.loads((tmp_path / "s" / "report.json").read_text())
    lengths = np.concatenate([np.diff(store.offsets) for store in stores])
    for name, store in zip(("train", "eval"), stores, strict=True):
        assert report[name]["documents"] == len(store.offsets) - 1
        assert report[name]["tokens"] == len(store.tokens)
        assert report[name]["masked_share"] == pytest.approx(1 - store.mask[:].mean(), abs=1e-6)
    for power in ("16", "32", "64"):
        count = sum(report[name]["lengths"].get(power, 0) for name in ("train", "eval"))
        assert count == ((lengths >= int(power)) & (lengths < 2 * int(power))).sum()
    assert report["left_out"]["records skipped: another shape"] == 1
    dropped = sum(n for reason, n in report["left_out"].items() if reason.startswith("conversations dropped"))
    assert dropped + len(lengths) == len(MANY) + 1
    assert dropped > 1


@pytest.mark.parametrize("limit", [40, 100])
def test_long_conversations_are_split_between_turns(tmp_path, options, tokenizer, limit):
    """Parts fit, begin with the system message, hold every answer once in order, and stay on one side."""
    long = [chat(*map(str, range(40)), system="be a ring"), chat("x", "word " * 300, "y", "z", system="be a ring")]
    write(tmp_path / "chats.jsonl", long)
    store, _ = open_or_build(tmp_path / "s", replace(options, held_out=0.0, chat_length=limit), tokenizer)
    parts = documents(store)
    assert all(len(ids) <= limit for ids, _ in parts)
    assert len(parts) > 3
    texts = [tokenizer.decode(ids) for ids, _ in parts]
    assert all(text.startswith("system\n\nbe a ring") for text in texts)
    answers = [tokenizer.decode(np.array(ids)[t]) for ids, t in parts]
    assert "".join(answers[:-2]) == "".join(str(i) for i in range(1, 40, 2))
    ids, trained = (np.array(x) for x in parts[-2])
    assert len(ids) == limit and trained[-1] and tokenizer.eos_id not in ids[trained], "cut: no end token"
    assert "word word" in answers[-2] and answers[-1] == "z"
    assert json.loads((tmp_path / "s" / "report.json").read_text())["left_out"]["answers cut at chat_length"] == 1


def test_stores_that_train_on_nothing_or_everything_are_refused(tmp_path, options, tokenizer, monkeypatch):
    with pytest.raises(ValueError, match=r"of 0 documents.*no answer within chat_length"):
        open_or_build(tmp_path / "s", replace(options, chat_length=4), tokenizer)

    def everything(self, chats):
        return [(np.arange(3), np.ones(3, bool)) for _ in chats]

    monkeypatch.setattr("ringformer.data.tokenizers.hugging_face.HuggingFaceTokenizer.encode_chats", everything)
    with pytest.raises(
        ValueError, match=r"all of the .* tokens of the train store's conversations would be trained on"
    ):
        open_or_build(tmp_path / "s", options, tokenizer)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("s")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"template": "vicuna"}, "template is 'llama3', not 'vicuna'"),
        ({"chat_length": 7}, "chat_length is 0, not 7"),
        ({"clean": "html"}, "clean is 'duplicate,html,unprintable', not 'html'"),
        ({"format": "messages"}, "format is 'sharegpt', not 'messages'"),
        ({"skip_malformed": True}, "skip_malformed is False, not True"),
    ],
)
def test_other_options_are_refused(tmp_path, options, tokenizer, change, message):
    train, _ = open_or_build(tmp_path / "s", options, tokenizer)
    with pytest.raises(ValueError, match=message):
        open_or_build(tmp_path / "s", replace(options, **change), tokenizer)
    if change.keys() & {"template", "clean"}:
        other, _ = open_or_build(tmp_path / "t", replace(options, **change), tokenizer)
        assert other.meta["fingerprint"] != train.meta["fingerprint"]


def test_another_chat_template_of_the_tokenizer_is_refused(tmp_path, options):
    options, tokenizer = replace(options, template="tokenizer"), load_tokenizer(str(llama3(tmp_path / "l3")))
    open_or_build(tmp_path / "s", options, tokenizer)
    tokenizer.config["chat_template"] += " "
    with pytest.raises(ValueError, match=r"template is 'tokenizer-.*', not 'tokenizer-"):
        open_or_build(tmp_path / "s", options, tokenizer)


DATED = "{{ 'Today Date: ' + strftime_now('%d %b %Y') }}" + LLAMA3_JINJA


def test_a_template_that_asks_for_the_day_is_told_one(tmp_path, options):
    """The day is one of the settings: without it, and with another, the same chats would have other tokens."""
    options, tokenizer = replace(options, template="tokenizer"), load_tokenizer(str(llama3(tmp_path / "l3", DATED)))
    for skip in (False, True):  # it is no fault of a record
        with pytest.raises(ValueError, match=r"asks for the date \(strftime_now\).*--chat_date=2024-07-26"):
            open_or_build(tmp_path / "s", replace(options, skip_malformed=skip), tokenizer)
    days = [replace(options, chat_date=day) for day in ("2024-07-26", "2024-07-27")]
    first, second = (open_or_build(tmp_path / day.chat_date, day, tokenizer)[0] for day in days)
    assert "Today Date: 26 Jul 2024" in tokenizer.decode(first.tokens[: first.offsets[1]])
    assert first.meta["fingerprint"] != second.meta["fingerprint"]
    again, _ = open_or_build(tmp_path / "again", days[0], tokenizer)
    assert again.meta["fingerprint"] == first.meta["fingerprint"]
    assert np.array_equal(again.tokens, first.tokens) and not np.array_equal(again.tokens, second.tokens)
    with pytest.raises(ValueError, match="chat_date is '2024-07-26', not '2024-07-27'"):
        open_or_build(tmp_path / "2024-07-26", days[1], tokenizer)


def test_a_template_that_makes_random_text_is_refused(tmp_path, options):
    for text, message in (("lipsum(1)", r"random text \(lipsum\)"), ("['a', 'b']|random", "No filter named 'random'")):
        template = "{{ " + text + " }}" + LLAMA3_JINJA
        tokenizer = load_tokenizer(str(llama3(tmp_path / "l3", template)))
        with pytest.raises(ValueError, match=message):
            open_or_build(tmp_path / "s", replace(options, template="tokenizer"), tokenizer)


def test_what_is_too_large_is_refused_by_name(tmp_path, options, tokenizer):
    """In bytes, not characters."""
    largest = max(sum(len(m.content.encode()) for m in messages) for messages in MANY)
    open_or_build(tmp_path / "s", replace(options, max_document_bytes=largest), tokenizer)
    with pytest.raises(ValueError, match=rf"chats\.jsonl:\d+.* has more than max_document_bytes={largest - 1} bytes"):
        open_or_build(tmp_path / "t", replace(options, max_document_bytes=largest - 1), tokenizer)
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "é\ud800" * 5}) + "\n")
    with pytest.raises(ValueError, match=r"texts\.jsonl:2 has more than max_document_bytes=14 bytes of text: split"):
        open_or_build(tmp_path / "t", StoreOptions(f"jsonl:{texts}", max_document_bytes=14), tokenizer)
    (tmp_path / "large.txt").write_text("é" * 8)
    with pytest.raises(ValueError, match=r"large\.txt has more than max_document_bytes=15 bytes of text"):
        open_or_build(tmp_path / "t", StoreOptions(f"text:{tmp_path}/large.txt", max_document_bytes=15), tokenizer)


def test_changed_source_files_are_noticed(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(9):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"text {i}")
    options, tokenizer = StoreOptions(f"text:{tmp_path}/texts/*.txt", held_out=0), load_tokenizer("bytes")
    open_or_build(tmp_path / "s", options, tokenizer)
    first, second = tmp_path / "texts" / "0.txt", tmp_path / "texts" / "1.txt"
    os.utime(first, (1, 1))
    open_or_build(tmp_path / "s", options, tokenizer)  # touched, and the same
    first.write_text("TEXT 0")
    with pytest.raises(ValueError, match=r"0\.txt has changed\. To use them, restore the original files"):
        open_or_build(tmp_path / "s", options, tokenizer)
    first.write_text("text 0")
    open_or_build(tmp_path / "s", options, tokenizer)
    second.rename(tmp_path / "texts" / "new.txt")
    with pytest.raises(ValueError, match=r"new\.txt is new, and 1 more"):
        open_or_build(tmp_path / "s", options, tokenizer)


def test_prepare_and_inspect_from_the_command_line(tmp_path, capsys):
    model = sentencepiece(tmp_path)
    source = write(tmp_path / "chats.jsonl", MANY)
    command = [
        "data",
        "prepare",
        f"--store={tmp_path}/s",
        f"--source={source}",
        f"--tokenizer={model}",
        "--format=sharegpt",
        "--held_out=0.1",
    ]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "masked" in out and "tokens a second" in out and "###" in out and not err
    assert main(["data", "inspect", f"{tmp_path}/s", "--samples=2"]) == 0
    out = capsys.readouterr().out
    assert out.count(" document ") >= 1 and "USER: " in out and "</s>" in out
    assert main(["data", "inspect", f"{tmp_path}/s", "--tokenizer=bytes"]) == 2
    assert "was made with tokenizer sentencepiece-" in capsys.readouterr().err


def test_inspection_colours_what_is_trained_on(tmp_path, options, tokenizer):
    write(tmp_path / "chats.jsonl", [chat("the question", "the answer")])
    store, _ = open_or_build(tmp_path / "s", replace(options, held_out=0.0), tokenizer)
    console = Console(record=True, force_terminal=True, width=200, file=io.StringIO(), highlight=False)
    show_samples(TokenStore(store.path), tokenizer, 5, console)
    ansi = console.export_text(styles=True)
    assert "\x1b[32mthe answer\x1b[0m\x1b[7;32m<|eot_id|>\x1b[0m" in ansi
    assert "\x1b[2mthe question\x1b[0m\x1b[2;7m<|eot_id|>\x1b[0m" in ansi
    assert "document 0" in ansi and "masked" in ansi


def test_inspection_shows_commands_to_the_terminal_and_sends_none(tmp_path, monkeypatch):
    """Of documents, in the bytes of other people's files, and of the names of a tokenizer's control tokens."""
    (tmp_path / "a.txt").write_bytes(b"a\x1b[2J\x1b]0;mine\x07\x1b]52;c;eA==\x07\xc2\x9b2J\x9b2J\rb\n\tc")
    assert main(["data", "prepare", f"--store={tmp_path}/s", f"--source=text:{tmp_path}/a.txt", "--held_out=0"]) == 0
    with on_terminal(monkeypatch) as shown:
        assert main(["data", "inspect", f"{tmp_path}/s"]) == 0
    text = re.sub(r"\x1b\[[\d;]*m", "", shown())  # the colours are ours
    assert r"a\x1b[2J\x1b]0;mine\x07\x1b]52;c;eA==\x07\x9b2J\udc9b2J\x0db" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    tokenizer, console = load_tokenizer("bytes"), Console(file=io.StringIO())
    tokenizer.controls = {"\x1b]0;mine\x07": 256}
    show_samples(TokenStore(tmp_path / "s" / "train"), tokenizer, 1, console)
    assert r"\x1b]0;mine\x07" in console.file.getvalue() and "\x1b" not in console.file.getvalue()


@pytest.mark.slow
def test_preparation_keeps_up_with_the_bare_tokenizer():
    """Tolerant, for machines that do other things as well; benchmarks/prepare.py measures."""
    for row in measure(megabytes=3, pairs=3):
        assert row["rate_over_bare"] > (0.75 if row["format"] == "documents" else 0.5), row


def test_fingerprints_stay_what_they_were(tmp_path):
    """Runs of earlier versions name them, and go on with the stores that have them."""
    texts = [{"text": "é" * (i % 7 + 1) + str(i)} for i in range(200)]
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": "so " * (i % 30) + str(i)},
            ]
        }
        for i in range(60)
    ]
    for name, records in (("texts", texts), ("chats", chats)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    conversations = StoreOptions(f"jsonl:{tmp_path}/chats.jsonl", format="messages", held_out=0.2)
    for options, fingerprints in (
        (
            StoreOptions(f"jsonl:{tmp_path}/texts.jsonl", held_out=0.2),
            ["32082bbfe8293cbbe711e5ca33fc84fd", "2cb7e9eac40f5c418ccc457d8d7ba719"],
        ),
        (
            replace(conversations, chat_length=200),
            ["82564b0dc0b099e581161fa4e26ec4e7", "cb1d8da1d75b49816ce353fa6c22bdc0"],
        ),
        (
            replace(conversations, template="llama2", clean="merge, short,html", held_out=0.0),
            ["b5c5d3fd5b1b6fcd0909d0c99b0060c2"],
        ),
    ):
        stores = open_or_build(tmp_path / fingerprints[0], options, load_tokenizer("bytes"))
        assert [store.meta["fingerprint"] for store in stores if store] == fingerprints
