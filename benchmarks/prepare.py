"""Does `ringformer data prepare` keep up with its tokenizer?

    python benchmarks/prepare.py --megabytes 20 --pairs 3 --out results/prepare.json

The text is the Python standard library, again and again with other names: in files as documents, and its paragraphs in
JSON lines as the questions and answers of conversations. For a SentencePiece model and a byte-level BPE tokenizer.json
trained on it, one call of the library's own batch encoding on all the text (of conversations: as the template writes
them), which is in memory, alternates with a whole preparation from files to stores in one process. The median of the
ratios of their rates is what counts: times on a shared machine mean little.

    python benchmarks/prepare.py --template_process --megabytes 20 --pairs 5

measures instead what it costs that a tokenizer's own chat template runs in a process of its own: the same preparation
with the template in this process, in turn.

    python benchmarks/prepare.py --token_rows 50 --pairs 3 --out results/prepare_tokens.json

measures rows of tokens in Parquet, 50 million, of several lengths, with and without labels: tokens per second from the
file to the verified store.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import tempfile
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.result_files import made, write_results
from ringformer.cli.parser import output_argument
from ringformer.data import build_stores, load_tokenizer, open_or_build, read_documents, train_sentencepiece
from ringformer.data.chats.cleaning import USUAL_RULES, Cleaning
from ringformer.data.chats.conversations import Message, read_chats
from ringformer.data.chats.rendered import checked_sequences
from ringformer.data.chats.sandboxed_template import ChatTemplate
from ringformer.data.chats.templates import Template, TemplateName, load_template
from ringformer.data.chats.trained_answers import sequences_of
from ringformer.data.sources.malformed import Malformed
from ringformer.data.stores.chat_encoding import ChatEncoder
from ringformer.data.stores.options import StoreOptions
from ringformer.data.tokenizers.byte_level import ByteTokenizer

SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TEMPLATE: dict[str, TemplateName] = {"sentencepiece": "vicuna", "tokenizer.json": "llama3"}
"""The chat template that each tokenizer is used with."""


def write_texts(folder: Path, megabytes: float) -> list[str]:
    """Files of Python source, `megabytes` in all; every round has other names for its functions and classes."""
    sources = [d.text for d in read_documents("stdlib") if d.text.isascii()]
    texts, written, turn = [], 0, 0
    while True:
        for source in sources:
            text = re.sub(r"\b(def|class) (\w+)", rf"\1 \2_{turn}" if turn else r"\1 \2", source)
            (folder / f"{len(texts):06d}.py").write_text(text, newline="")
            texts.append(text)
            written += len(text)
            if written >= megabytes * 1e6:
                return texts
        turn += 1


def write_chats(path: Path, texts: list[str]) -> list[list[Message]]:
    """Conversations of eight messages, each a paragraph or some 500 characters of them, as OpenAI messages."""
    messages, text = [], ""
    for paragraph in (paragraph for text in texts for paragraph in text.split("\n\n") if paragraph.strip()):
        text = f"{text}\n\n{paragraph}" if text else paragraph
        if len(text) > 500:
            messages.append(Message(("user", "assistant")[len(messages) % 2], text))
            text = ""
    chats = [messages[i : i + 8] for i in range(0, len(messages) - 7, 8)]
    with path.open("w") as file:
        for chat in chats:
            turns = [{"role": message.role, "content": message.content} for message in chat]
            file.write(json.dumps({"messages": turns}) + "\n")
    return chats


def train_tokenizers(folder: Path, texts: list[str]) -> dict[str, Path]:
    sample = texts[:150]
    paths = {"sentencepiece": folder / "sp.model", "tokenizer.json": folder / "tokenizer.json"}
    train_sentencepiece(sample, paths["sentencepiece"], vocab_size=8000)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        sample,
        trainers.BpeTrainer(vocab_size=8000, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.save(str(paths["tokenizer.json"]))
    return paths


def measure(megabytes: float, pairs: int) -> list[dict]:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts").mkdir()
        texts = write_texts(folder / "texts", megabytes)
        chats = write_chats(folder / "chats.jsonl", texts)
        for kind, path in train_tokenizers(folder, texts).items():
            if kind == "sentencepiece":
                encode = partial(SentencePieceProcessor(model_file=str(path)).encode, return_type="numpy")
            else:
                encode = partial(Tokenizer.from_file(str(path)).encode_batch_fast, add_special_tokens=False)
            tokenizer = load_tokenizer(str(path))
            template = TEMPLATE[kind]
            render = load_template(template, tokenizer)
            written = ["".join(segment.text for segment in render(chat)) for chat in chats]
            for plain, options in (
                (texts, StoreOptions(f"text:{folder}/texts/*.py")),
                (written, StoreOptions(f"jsonl:{folder}/chats.jsonl", format="messages", template=template)),
            ):
                row = {"tokenizer": kind, "format": options.format, "records": len(plain)}
                row |= {"megabytes": round(sum(map(len, plain)) / 1e6, 1)}
                prepare = partial(open_or_build, folder / "store", options, tokenizer)
                row |= compare(partial(encode, plain), prepare, folder / "store", pairs)
                rows.append(row)
                print(row, flush=True)
    return rows


JINJA = (
    "{{- bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>' }}\n\n"
    "{% if message['role'] == 'assistant' %}GENERATION{{ message['content'] + '<|eot_id|>' }}END"
    "{% else %}{{ message['content'] + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""LLaMA-3's format; with marks in the place of GENERATION and END, or without."""
MARKS = {"marked": ("{% generation %}", "{% endgeneration %}"), "by prefixes": ("", "")}


def measure_template_process(megabytes: float, pairs: int) -> list[dict]:
    """The preparation of conversations with the template in this process ("bare") and in its own."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts").mkdir()
        texts = write_texts(folder / "texts", megabytes)
        chats = write_chats(folder / "chats.jsonl", texts)
        train_tokenizers(folder, texts)
        for answers, (begin, end) in MARKS.items():
            source = JINJA.replace("GENERATION", begin).replace("END", end)
            config = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[4], "chat_template": source}
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
            tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
            own = load_template("tokenizer", tokenizer)
            inside = ChatTemplate(source, {"bos_token": SPECIAL[0]}, list(tokenizer.controls), None, 10**6)

            def render_here(conversations, inside=inside, tokenizer=tokenizer):
                return [
                    checked_sequences(sequences_of(inside, messages), messages, tokenizer) for messages in conversations
                ]

            def prepare(template, tokenizer=tokenizer):
                malformed = Malformed(skip=False)
                found = read_chats(f"jsonl:{folder}/chats.jsonl", "messages", split="train", malformed=malformed)
                cleaning = Cleaning(found, USUAL_RULES)
                encoder = ChatEncoder(cleaning, tokenizer, template, 0, malformed, 2**28)
                build_stores(folder / "store", encoder, tokenizer, held_out=0.05)

            here = Template(render_here)
            assert here(chats[0]) == own(chats[0])
            row = {"answers": answers, "records": len(chats), "megabytes": round(sum(map(len, texts)) / 1e6, 1)}
            row |= compare(partial(prepare, here), partial(prepare, own), folder / "store", pairs)
            rows.append(row)
            print(row, flush=True)
    return rows


def measure_token_rows(millions: float, pairs: int) -> list[dict]:
    """Tokens per second of rows that are tokens already, with a vocabulary of 128,000."""
    rows, count = [], int(millions * 1e6)
    ids = pa.array(np.random.default_rng(0).integers(0, 128_000, count, dtype=np.int32))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for length, labels in itertools.product((100, 1000, 10_000, 100_000), (False, True)):
            lists = pa.ListArray.from_arrays(pa.array(np.arange(0, count + 1, length, dtype=np.int32)), ids)
            parquet.write_table(pa.table({"input_ids": lists} | ({"labels": lists} if labels else {})), folder / "a")
            options = StoreOptions(f"parquet:{folder}/a", format="tokens", held_out=0.01)
            rates = []
            for _ in range(pairs):
                shutil.rmtree(folder / "store", ignore_errors=True)
                start = time.perf_counter()
                open_or_build(folder / "store", options, LargeVocabulary())
                rates.append(round(count / (time.perf_counter() - start)))
            row = {"row_tokens": length, "labels": labels, "tokens_per_second": statistics.median(rates)}
            rows.append(row | {"rates": rates})
            print(rows[-1], flush=True)
    return rows


class LargeVocabulary(ByteTokenizer):
    """Numbers of the size that Llama 3's tokens have; they are not decoded here."""

    name = "large"
    vocab_size, eos_id = 128_000, 127_999
    byte_lengths = np.full(128_000, 4, np.int32)


def compare(bare, prepare, store: Path, pairs: int) -> dict:
    """Seconds of the tokenizer alone and of a preparation, in turn."""
    seconds = {"bare": [], "prepare": []}
    for _ in range(pairs):
        for label, run in (("bare", bare), ("prepare", prepare)):
            shutil.rmtree(store, ignore_errors=True)
            start = time.perf_counter()
            run()
            seconds[label].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds["bare"], seconds["prepare"], strict=True)]
    times = {f"{label}_seconds": [round(s, 2) for s in each] for label, each in seconds.items()}
    return {"rate_over_bare": round(statistics.median(ratios), 3), "ratios": [round(r, 3) for r in ratios]} | times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=20)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--template_process", action="store_true", help="what a process of its own costs a template")
    parser.add_argument("--token_rows", type=float, help="millions of tokens: instead, rows that are tokens already")
    parser.add_argument("--out", type=output_argument, help="a JSON file")
    args = parser.parse_args()
    if args.token_rows:
        rows = measure_token_rows(args.token_rows, args.pairs)
        flags, what = f"--token_rows {args.token_rows:g}", "tokens a second of `data prepare --format=tokens`"
    else:
        rows = (measure_template_process if args.template_process else measure)(args.megabytes, args.pairs)
        flags = f"{'--template_process ' if args.template_process else ''}--megabytes {args.megabytes:g}"
        bare = (
            "the same with the template in its process" if args.template_process else "the bare tokenizer's batch call"
        )
        what = f"tokens a second of `data prepare` over those of {bare}"
    if args.out:
        result = {
            "what": f"measured: {what}",
            "command": f"python benchmarks/prepare.py {flags} --pairs {args.pairs}",
            **made(),
            "cores": len(os.sched_getaffinity(0)),
            "versions": {p: version(p) for p in ("tokenizers", "sentencepiece", "pyarrow")},
            "rows": rows,
        }
        write_results(args.out, result)


if __name__ == "__main__":
    main()
