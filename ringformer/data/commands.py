"""`ringformer data prepare | inspect | tokenizer`."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from io import TextIOWrapper
from pathlib import Path

from ringformer.cli.dataclass_flags import add_flags, from_flags
from ringformer.files.json_text import parse_json


def add_prepare(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    """Add the arguments of `ringformer data prepare`."""
    from ringformer.data.stores.options import StoreOptions

    parser.description = (
        "Tokenize documents or conversations once, into a store, and report what was kept and left out."
    )
    parser.add_argument("--store", required=True, help="the folder to write (train/, eval/, report.json)")
    add_flags(parser, StoreOptions)
    return _prepare


def _prepare(args: argparse.Namespace) -> None:
    from ringformer.data.stores.beginning import describe_earlier
    from ringformer.data.stores.options import StoreOptions, rules_of
    from ringformer.data.stores.preparation_report import format_report
    from ringformer.data.stores.prepare import open_or_build
    from ringformer.data.tokenizers.load import load_tokenizer

    options = from_flags(args, StoreOptions)
    directory = Path(args.store)
    if args.clean not in ("", "usual") and not rules_of(args.clean, args.format):
        which = "no rule cleans tokens"
        if args.format == "documents":
            which = "only the rule html cleans documents"
        raise ValueError(f"--clean={args.clean}: {which}: leave out the others")
    tokenizer = load_tokenizer(options.tokenizer)
    for store in open_or_build(directory, options, tokenizer):
        if store is not None:
            store.check.wait(print)
            print(
                f"{store.path}: {store.meta['documents']:,} documents, {store.meta['tokens']:,} tokens, "
                f"fingerprint {store.meta['fingerprint']}"
            )
            if earlier := describe_earlier(store, tokenizer):
                print(earlier)
    print(format_report(parse_json((directory / "report.json").read_text())))


def add_inspect(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    """Add the arguments of `ringformer data inspect`."""
    parser.description = "Show documents of a store: tokens that are trained on in green, masked tokens dimmed."
    parser.add_argument("store", metavar="STORE", help="the folder of the stores, or train/ or eval/ in it")
    parser.add_argument(
        "--tokenizer",
        help="bytes, a SentencePiece .model file, a tokenizer.json, or a folder with one of them; default: the copy in "
        "the store's folder",
    )
    parser.add_argument("--samples", type=int, default=3, help="number of documents to show")
    parser.add_argument("--ring_size", type=int, help="also count the balance of packed documents on so many ranks")
    parser.add_argument("--seq_len", type=int, help="with --ring_size: tokens of a sequence")
    parser.add_argument("--min_length", type=int, default=0, help="with --ring_size: as data.min_length")
    parser.add_argument(
        "--max_length", type=int, default=0, help="with --ring_size: as data.max_length of a run; 0: any"
    )
    return _inspect


def _inspect(args: argparse.Namespace) -> None:
    import numpy as np
    from rich.console import Console

    from ringformer.data.packing.options import PackingOptions
    from ringformer.data.packing.ring_balance import balances, show_balance
    from ringformer.data.packing.stream import DocumentStream
    from ringformer.data.stores.folder import check_all, open_one
    from ringformer.data.stores.inspect_store import show_samples
    from ringformer.data.tokenizers.load import load_tokenizer

    if args.samples < 1:
        raise ValueError(f"--samples={args.samples} must be at least 1")
    ranks = args.ring_size
    if (ranks is None) != (args.seq_len is None) or (ranks is not None and ranks < 1):
        raise ValueError(f"--ring_size={ranks} and --seq_len={args.seq_len}: give both, a ring of at least 1 rank")
    if ranks is None and (args.min_length or args.max_length):
        raise ValueError(
            f"--min_length={args.min_length}, --max_length={args.max_length} need --ring_size and --seq_len"
        )
    store = open_one(args.store, ("train",))
    check_all(Path(args.store), partial(print, file=sys.stderr))
    copied = store.path.parent / "tokenizer"
    usual = str(copied) if copied.is_dir() else "bytes"
    tokenizer = load_tokenizer(args.tokenizer or usual)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # documents may hold bytes that are not UTF-8
    console = Console(highlight=False)
    ways = None
    if ranks is not None:
        options = PackingOptions(min_length=args.min_length, max_length=args.max_length)
        documents = DocumentStream(store, args.seq_len, 0, options).documents
        ways = balances(np.diff(store.offsets)[documents], args.seq_len, ranks)
    show_samples(store, tokenizer, args.samples, console)
    if ways is not None:
        show_balance(ways, args.seq_len, ranks, console)


def add_tokenizer(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    """Add the arguments of `ringformer data tokenizer`."""
    from ringformer.data.stores.options import StoreOptions

    parser.description = "Train a SentencePiece tokenizer on documents."
    names = "source", "field", "split", "skip_empty", "encoding", "skip_malformed", "max_document_bytes"
    add_flags(parser, StoreOptions, names)
    parser.add_argument("--vocab_size", type=int, required=True, help="number of tokens")
    parser.add_argument("--out", required=True, help="the .model file to write")
    return _tokenizer


def _tokenizer(args: argparse.Namespace) -> None:
    from ringformer.data.sources.documents import read_documents
    from ringformer.data.sources.malformed import Malformed
    from ringformer.data.tokenizers.sentencepiece import train_sentencepiece
    from ringformer.files.output_place import check_output

    check_output(args.out, "--out")
    if args.max_document_bytes < 1:
        raise ValueError(f"--max_document_bytes={args.max_document_bytes} must be at least 1")
    documents = read_documents(
        args.source,
        field=args.field,
        split=args.split,
        skip_empty=args.skip_empty,
        max_bytes=args.max_document_bytes,
        encoding=args.encoding,
        any_bytes=False,
        malformed=Malformed(skip=args.skip_malformed),
    )
    texts = (document.text for document in documents)
    train_sentencepiece(texts, args.out, args.vocab_size)
    for reason, count in sorted(documents.left_out.items()):
        print(f"{count:,} {reason}")
    print(f"wrote {args.out}")
