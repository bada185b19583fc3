"""The verbs `ringformer data ...`."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from ringformer.data.sources import read_documents
from ringformer.data.stores.inspect_store import show_samples
from ringformer.data.stores.options import StoreOptions
from ringformer.data.stores.preparation_report import as_text
from ringformer.data.stores.prepare import open_or_build
from ringformer.data.stores.token_store import TokenStore
from ringformer.data.tokenizers.load import load_tokenizer
from ringformer.data.tokenizers.sentencepiece import train_sentencepiece
from ringformer.dataclass_flags import add_flags, from_flags

TOKENIZER_HELP = "bytes, a SentencePiece .model file, a tokenizer.json, or a folder with one of them"


def prepare(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("ringformer data prepare", description=(
        "Tokenize documents or conversations once, into a store, and report what became of them."))  # fmt: skip
    parser.add_argument("--store", required=True, help="the folder to write (train/, eval/, report.json)")
    add_flags(parser, StoreOptions)
    args = parser.parse_args(argv)
    options, store = from_flags(args, StoreOptions), Path(args.store)
    for part in open_or_build(store, options, load_tokenizer(options.tokenizer)):
        if part is not None:
            print(f"{part.path}: {part.meta['documents']:,} documents, {part.meta['tokens']:,} tokens, "
                  f"fingerprint {part.meta['fingerprint']}")  # fmt: skip
    print(as_text(json.loads((store / "report.json").read_text())))


def inspect(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("ringformer data inspect", description=(
        "Show documents of a store: what is trained on in green, what is masked dim."))  # fmt: skip
    parser.add_argument("store", help="the folder of the stores, or train/ or eval/ in it")
    parser.add_argument("--tokenizer", help=f"{TOKENIZER_HELP}; without: the copy that the store keeps")
    parser.add_argument("--samples", type=int, default=3)
    args = parser.parse_args(argv)
    if args.samples < 1:
        raise ValueError(f"--samples={args.samples} must be at least 1")
    path = Path(args.store)
    store = TokenStore(path / "train" if (path / "train").is_dir() else path)
    kept = store.path.parent / "tokenizer"
    tokenizer = load_tokenizer(args.tokenizer or (str(kept) if kept.is_dir() else "bytes"))
    sys.stdout.reconfigure(errors="replace")  # documents may hold what is not UTF-8
    show_samples(store, tokenizer, args.samples, Console(highlight=False))


def tokenizer(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("ringformer data tokenizer", description="Train a SentencePiece tokenizer.")
    add_flags(parser, StoreOptions, ("source", "field", "split", "skip_empty"))
    parser.add_argument("--vocab_size", type=int, required=True)
    parser.add_argument("--out", required=True, help="the .model file to write")
    args = parser.parse_args(argv)
    documents = read_documents(args.source, field=args.field, split=args.split, skip_empty=args.skip_empty)
    train_sentencepiece((document.text for document in documents), args.out, args.vocab_size)
    print(f"wrote {args.out}")
