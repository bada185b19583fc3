"""Long texts in windows: the tokens are those of the text encoded at once, whatever the tokenizer and the text."""

import json
import random
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from ringformer.data import Segment, load_tokenizer
from ringformer.data.tokenizers import hugging_face, long_texts
from ringformer.data.tokenizers.long_texts import encode_long
from tests.data.chat_samples import CORPUS, llama2, llama3, sentencepiece

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
WORDS = (
    "def",
    "return",
    "x",
    "=",
    "123",
    "foo_bar",
    "élan",
    "e\u0301",
    "naïve",
    "日本語",
    "the",
    "\t",
    "...",
    "\u2028",
    "\x00",
    "🦊🦊",
    "ﬁ",
)
ALPHABET = pre_tokenizers.ByteLevel.alphabet()
CORPUS = [*CORPUS, *("abab" * 9, "a" * 30, " " * 40 + "\n", "\n" * 9, "12345 " * 9, "x = {}\n    return x\n" * 5)]


def trained(tokenizer: Tokenizer, trainer, **parts) -> Tokenizer:
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def llama3_bpe() -> Tokenizer:
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=ALPHABET, show_progress=False)
    return trained(Tokenizer(models.BPE()), trainer, pre_tokenizer=pre_tokenizers.Sequence([split, byte_level]))


def gpt2_bpe() -> Tokenizer:
    """With a space before the text, and a token that takes the spaces around it."""
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=ALPHABET, show_progress=False)
    tokenizer = trained(Tokenizer(models.BPE()), trainer, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))
    tokenizer.add_tokens([AddedToken("return", lstrip=True, rstrip=True)])
    return tokenizer


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=200, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    nfkc = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])
    return trained(Tokenizer(models.Unigram()), trainer, normalizer=nfkc, pre_tokenizer=pre_tokenizers.Metaspace())


def word_piece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    return trained(
        Tokenizer(models.WordPiece(unk_token="[UNK]")),
        trainer,
        normalizer=normalizers.BertNormalizer(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )


KINDS = {"llama3": llama3_bpe, "gpt2": gpt2_bpe, "unigram": unigram, "wordpiece": word_piece}


@pytest.fixture(scope="module", params=["llama2", *KINDS])
def library(request, tmp_path_factory):
    if request.param == "llama2":  # BPE over all of the text, which is one word to it
        return Tokenizer.from_file(str(llama2(tmp_path_factory.mktemp("l2")) / "tokenizer.json"))
    return KINDS[request.param]()


def is_unigram(library) -> bool:
    return isinstance(library.model, models.Unigram)


def lines(rng, count):
    return [
        "".join(rng.choice(WORDS) + rng.choice(["", " ", " ", "  "]) for _ in range(rng.randrange(20)))
        for _ in range(count)
    ]


def texts():
    rng = random.Random(0)
    code = "\n".join(lines(rng, 900))
    runs = "".join(rng.choice("a \nb1é") * rng.randrange(1, 900) for _ in range(60))
    return {
        "code": code,
        "runs of one character": runs,
        "runs longer than any window": code[:3000] + " " * 4000 + "\n" + "a" * 5001 + "\n" * 3000 + code[:3000],
        "spaces to a far newline": "\n".join(line + " " * 700 for line in lines(rng, 30)),
        "one long word": "".join(rng.choice("abcdefgh") for _ in range(12_000)),
        "no space": "".join(rng.choice("日本語の文章、。はな1") for _ in range(9000)),
        "periodic": "ab" * 6001,
        "all spaces": " " * 9001,
        "combining": "e" + "\u0301\u0323" * 4000,
    }


def small_windows(monkeypatch, window, margin):
    monkeypatch.setattr(long_texts, "WINDOW", window)
    monkeypatch.setattr(long_texts, "MARGIN", margin)


@pytest.mark.parametrize("name", texts())
@pytest.mark.parametrize(("window", "margin"), [(1000, 200), (700, 350)])
def test_windows_give_the_tokens_of_the_whole(library, name, window, margin, monkeypatch):
    small_windows(monkeypatch, window, margin)
    text = texts()[name]
    encode = partial(library.encode_batch, add_special_tokens=False)
    (whole,) = encode([text])
    found = encode_long(encode, text, lambda tokens: np.stack(tokens[:3], 1), whole_words=is_unigram(library))
    assert found[:, 0].tolist() == whole.ids
    assert list(map(tuple, found[:, 1:].tolist())) == whole.offsets


def test_usual_texts_never_need_more_than_a_window(library, monkeypatch):
    """Else memory would grow with the text after all."""
    small_windows(monkeypatch, 1000, 200)
    longest = 0

    def encode(seen):
        nonlocal longest
        longest = max(longest, *map(len, seen))
        return library.encode_batch(seen, add_special_tokens=False)

    encode_long(encode, texts()["code"] * 3, lambda tokens: tokens.ids, whole_words=is_unigram(library))
    assert longest == 1400


@pytest.mark.parametrize("make", [llama3, llama2])
def test_a_tokenizer_encodes_long_texts_so(tmp_path, monkeypatch, make):
    """Documents and conversations, beside short ones; a tokenizer that normalizes is asked for offsets."""
    tokenizer, text = load_tokenizer(str(make(tmp_path / "t"))), texts()["code"]
    long = [Segment("q"), Segment(text, True), Segment("end", control=tokenizer.eos_id), Segment(text)]
    batch, chats = ["a b", text, "", "c"], [long, [Segment("short"), Segment("one", True)]]
    expected = tokenizer.encode_batch(batch), tokenizer.encode_chats(chats)
    small_windows(monkeypatch, 1000, 200)
    monkeypatch.setattr(hugging_face, "LONG_TEXT", 1000)
    monkeypatch.setattr(tokenizer, "_encoder", only := OnlyShort(tokenizer._encoder))
    found = tokenizer.encode_batch(batch), tokenizer.encode_chats(chats)
    assert only.longest == 1400
    for a, b in zip(expected[0], found[0], strict=True):
        np.testing.assert_array_equal(a, b)
    for (ids, trained), (found_ids, found_trained) in zip(expected[1], found[1], strict=True):
        np.testing.assert_array_equal(ids, found_ids)
        np.testing.assert_array_equal(trained, found_trained)


class OnlyShort:
    """An encoder that knows the longest text it was given."""

    def __init__(self, encoder):
        self._encoder, self.longest = encoder, 0

    def encode_batch(self, texts, **options):
        self.longest = max(self.longest, *map(len, texts))
        return self._encoder.encode_batch(texts, **options)

    def encode_batch_fast(self, texts, **options):
        self.longest = max(self.longest, *map(len, texts), 0)
        return self._encoder.encode_batch_fast(texts, **options)


PEAK = """
import resource, sys
from ringformer.cli import main
from ringformer.data import load_tokenizer
load_tokenizer(sys.argv[1]).encode_batch(["a text"])
def prepare(source, store):
    assert main(["data", "prepare", f"--source=jsonl:{source}", f"--store={store}", f"--tokenizer={sys.argv[1]}",
                 "--held_out=0", *sys.argv[5:]]) == 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
base = prepare(sys.argv[2], sys.argv[4] + "/a")
print("PEAK", prepare(sys.argv[3], sys.argv[4] + "/b") - base)
"""


def conversation(text):
    messages = [("user", "a question"), ("assistant", text)]
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


SHAPES = {"document": (lambda text: {"text": text}, []), "conversation": (conversation, ["--format=messages"])}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["llama3", "llama2", "sentencepiece"])
def test_a_document_takes_at_most_50_bytes_a_byte(tmp_path, kind, shape):
    """Beyond what a preparation takes anyway, measured from outside by a process's peak."""
    make = {"llama3": llama3, "llama2": llama2, "sentencepiece": lambda folder: folder.mkdir() or sentencepiece(folder)}
    tokenizer, (record, options) = make[kind](tmp_path / "t"), SHAPES[shape]
    size, text = 20_000_000, texts()["code"].replace("\x00", "")  # of which a conversation may have but few
    for name, content in (("short", "a text"), ("long", (text * (size // len(text.encode()) + 1)))):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record(content)) + "\n")
    arguments = [*map(str, (tokenizer, tmp_path / "short.jsonl", tmp_path / "long.jsonl", tmp_path)), *options]
    out = subprocess.run([sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, check=True).stdout
    print(f"{int(out.split('PEAK')[1]) / size:.1f} bytes a byte")
    assert int(out.split("PEAK")[1]) < 50 * size
