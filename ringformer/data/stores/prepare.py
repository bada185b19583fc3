"""Preparation of token stores in a folder (`folder.py`): read a source, tokenize in parallel, split, write, report.

The split depends only on a document's content, so no copy of a training document is held out.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ringformer.data.chats.cleaning import Cleaning
from ringformer.data.chats.conversations import read_chats
from ringformer.data.chats.templates import load_template, template_id
from ringformer.data.chats.web_pages import extracted
from ringformer.data.sources.compressibility import between_tails
from ringformer.data.sources.documents import Document, read_documents
from ringformer.data.sources.malformed import Malformed
from ringformer.data.sources.tables import pinned
from ringformer.data.sources.text_encoding import parse_encodings
from ringformer.data.stores.beginning import begins_documents
from ringformer.data.stores.chat_encoding import ChatEncoder
from ringformer.data.stores.encoding import DocumentEncoder, Encoded, in_groups
from ringformer.data.stores.folder import check_folder, new_stores
from ringformer.data.stores.format_hints import ways_to_read
from ringformer.data.stores.options import OF_DOCUMENTS, REWRITTEN_BEFORE, StoreOptions, rules_of
from ringformer.data.stores.preparation_report import make_report
from ringformer.data.stores.source_changes import changed_files, source_state
from ringformer.data.stores.token_rows import TokenEncoder
from ringformer.data.stores.token_store import StoreWriter, TokenStore
from ringformer.data.tokenizers.base import Tokenizer
from ringformer.data.tokenizers.byte_level import ByteTokenizer
from ringformer.data.tokenizers.load import save_tokenizer
from ringformer.files.json_text import parse_json

ENCODE_CHARACTERS = 2**21
"""Characters of text to tokenize at a time, which bounds the memory of a build."""
IN_FLIGHT = 3
"""Number of groups that are tokenized ahead of writing, so that the tokenizer never waits for reading, hashing and
writing."""
FINGERPRINTED = ("held_out", "format", "template", "chat_length", "clean")
"""Settings that are part of a store's fingerprint. The other settings only locate the documents, or change their text,
which is part of it."""
FINGERPRINTED_IF_SET = ("chat_date", "weight_field", "template_option", "rewritten", *OF_DOCUMENTS)
"""Settings that are part of it unless they are empty or 0."""
LATER: dict[str, Any] = {
    "begin": False,
    "encoding": "",
    "clean": "",
    "skip_malformed": False,
    "rewritten": REWRITTEN_BEFORE,
    "template_option": "",
}
"""Settings that stores of earlier versions do not record, with the values that those stores were built with."""

Encoder = DocumentEncoder | ChatEncoder | TokenEncoder


def open_or_build(
    directory: str | Path,
    options: StoreOptions,
    tokenizer: Tokenizer,
) -> tuple[TokenStore, TokenStore | None]:
    """Open the train and eval stores in `directory`; build them from `options` if they do not exist.

    With held_out=0, the eval store is None. Stores that `build_stores` made without `settings` do not record their
    source.

    Args:
      tokenizer: the result of `load_tokenizer(options.tokenizer)`.

    Raises:
      ValueError: if existing stores were built with other options, or the source's files have changed since.
    """
    directory = Path(directory)
    asked = _settings(options, tokenizer)
    if not directory.is_dir() or not any(directory.iterdir()):
        snapshot = pinned(options.source)
        encoder = _encoder(replace(options, source=snapshot or options.source), tokenizer)
        settings = dict(asked)
        if snapshot:
            settings["snapshot"] = snapshot
        try:
            return build_stores(directory, encoder, tokenizer, held_out=options.held_out, settings=settings)
        except OSError:
            if not (directory / "train" / "store.json").is_file():
                raise
            # Another process built the same stores first: use them.
    train = TokenStore(directory / "train")
    check_folder(directory)
    built = train.meta["settings"]
    if "source" not in built:
        asked = {}
    asked |= {"tokenizer": tokenizer.name, "held_out": options.held_out}
    if options.begin == "tokenizer" and "begin" not in built:
        asked.pop("begin", None)  # of an earlier version: `describe_earlier`
    differ = _differences(asked, built)
    if differ:
        raise ValueError(
            f"the token stores in {directory} were built with other options: {'; '.join(differ)}. "
            "To use them, set the same options (for a run: leave out those beside the store's name); to build others, "
            "choose another directory"
        )
    changed = changed_files(options.source, parse_json((directory / "source.json").read_text()))
    if changed and "source" in built:
        files = changed[0]
        if len(changed) > 1:
            files += f", and {len(changed) - 1} more"
        raise ValueError(
            f"{options.source} is not what the token stores in {directory} were built from: {files}. "
            "To use them, restore the original files, or move the files away; to build others, choose another directory"
        )
    return train, _open_eval(directory, options.held_out)


def _differences(asked: Mapping[str, Any], built: Mapping[str, Any]) -> list[str]:
    """Describe the settings that differ from those that stores were built with."""
    differ = []
    for key, value in asked.items():
        default: Any = None
        if key in FINGERPRINTED_IF_SET:
            default = "" if type(value) is str else 0
        present = built.get(key, LATER.get(key, default))
        if present != value:
            differ.append(f"{key} is {present!r}, not {value!r}")
    return differ


def _open_eval(directory: Path, held_out: float) -> TokenStore | None:
    """Open the eval store, which there is unless held_out=0."""
    return TokenStore(directory / "eval") if held_out else None


def build_stores(
    directory: str | Path,
    documents: Iterable[Document] | Encoder,
    tokenizer: Tokenizer,
    *,
    held_out: float,
    settings: Mapping[str, Any] | None = None,
) -> tuple[TokenStore, TokenStore | None]:
    """Tokenize `documents`, or conversations, into `directory/train` and, unless held_out=0, `directory/eval`.

    `directory` appears only once it is complete, synced to disk and verified; after a failure, it does not appear at
    all.

    Args:
      held_out: share of documents that go to eval, in [0, 1).
      settings: settings that selected the documents, for store.json; the tokenizer and `held_out` are added to them.

    Raises:
      ValueError: if a split gets no document, if a document cannot be encoded, or if none or all of the conversations'
        tokens are trained on.
      FileExistsError: if `directory` is not empty.
    """
    directory = Path(directory)
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out={held_out} is not in [0, 1): it is the share of documents kept for evaluation")
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty; build the stores in another directory, or delete this one")
    encoder = documents if isinstance(documents, Encoder) else DocumentEncoder(documents, tokenizer)
    settings = {**(settings or {}), "tokenizer": tokenizer.name, "held_out": held_out}
    if isinstance(encoder, DocumentEncoder):
        settings["begin"] = encoder.begins
    fingerprinted = _fingerprinted(settings)
    names = ("train", "eval") if held_out else ("train",)
    start = time.perf_counter()
    with new_stores(directory) as building:
        files = source_state(settings["source"]) if "source" in settings else {}
        with ExitStack() as stack:
            writers: dict[str, StoreWriter] = {}
            for name in names:
                writer = StoreWriter(building / name, tokenizer, fingerprinted)
                writers[name] = stack.enter_context(closing(writer))
            _write(encoder, held_out, writers)
            total = sum(writer.documents for writer in writers.values())
            left_out = encoder.left_out
            for name, writer in writers.items():
                if not writer.documents:
                    cause = _cause_of_no_document(total, encoder)
                    raise ValueError(
                        f"the {name} store would be empty: of {total} documents, held_out={held_out} sends none to "
                        f"it; {cause}"
                    )
                writer.finish(skipped_empty=left_out["empty documents skipped"], settings=settings)
        stores = {name: TokenStore(building / name) for name in names}
        for store in stores.values():
            store.check.wait()
        report = make_report(stores, tokenizer, left_out, encoder.malformed.files, time.perf_counter() - start)
        (building / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (building / "source.json").write_text(json.dumps(files) + "\n")
        if tokenizer.files:
            (building / "tokenizer").mkdir()
            save_tokenizer(tokenizer, building / "tokenizer")
    return TokenStore(directory / "train"), _open_eval(directory, held_out)


def _fingerprinted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Select the settings that are part of a store's fingerprint."""
    fingerprinted = {}
    for key in FINGERPRINTED:
        if key in settings:
            fingerprinted[key] = settings[key]
    if settings.get("format") == "documents":
        fingerprinted.pop("clean", None)
    for key in FINGERPRINTED_IF_SET:
        if settings.get(key):
            fingerprinted[key] = settings[key]
    return fingerprinted


def _cause_of_no_document(total: int, encoder: Encoder) -> str:
    """Return the cause of an empty store, of `total` documents in all stores, or a way to fill it."""
    if total:
        return "choose another --held_out (for a run: --config.data.held_out), or add documents"
    left_out = encoder.left_out
    if not left_out.total():
        return "the source has none"
    cause = f"left out: {dict(left_out)}"
    if encoder.malformed.first:
        cause += f"; the first that was skipped is {encoder.malformed.first}"
    return cause


def _settings(options: StoreOptions, tokenizer: Tokenizer) -> dict[str, Any]:
    """Select the settings that store.json records: the options that apply to the documents' format."""
    common: dict[str, Any] = {"source": options.source, "split": options.split, "format": options.format}
    common["skip_malformed"] = options.skip_malformed
    if options.format == "tokens":
        return common | {"skip_empty": options.skip_empty}
    common |= {"weight_field": options.weight_field, "encoding": options.encoding}
    common |= {"clean": ",".join(sorted(rules_of(options.clean, options.format)))}
    if options.format == "documents":
        for key in ("field", "skip_empty", *OF_DOCUMENTS):
            common[key] = getattr(options, key)
        return common | {"begin": begins_documents(options.begin, tokenizer)}
    common |= {"template": template_id(options.template, tokenizer)}
    common |= {"chat_date": "", "chat_length": options.chat_length}
    if options.template == "tokenizer":
        for key in ("chat_date", "template_option", "rewritten"):
            common[key] = getattr(options, key)
    return common


def _encoder(options: StoreOptions, tokenizer: Tokenizer) -> Encoder:
    """Read the documents, tokens or conversations that the options name, for `build_stores`."""
    malformed = _malformed(options)
    if options.format == "tokens":
        return TokenEncoder(
            options.source,
            options.split,
            tokenizer,
            options.skip_empty,
            malformed,
            options.max_document_bytes,
        )
    if options.format == "documents":
        change = None
        if "html" in rules_of(options.clean, options.format):
            change = extracted
        read = partial(
            read_documents,
            options.source,
            field=options.field,
            split=options.split,
            skip_empty=options.skip_empty,
            max_bytes=options.max_document_bytes,
            weight_field=options.weight_field,
            encoding=options.encoding,
            any_bytes=isinstance(tokenizer, ByteTokenizer),
            join=options.join,
            change=change,
        )
        documents = read(malformed=malformed)
        if options.compressibility_tails:
            texts = (document.text for document in read(malformed=_malformed(options)))
            documents.between = between_tails(texts, options.compressibility_tails)
        return DocumentEncoder(
            documents,
            tokenizer,
            begin=options.begin,
            separator=options.separator,
            retrieval_tasks=options.retrieval_tasks,
        )
    chats = read_chats(
        options.source,
        options.format,
        split=options.split,
        malformed=malformed,
        weight_field=options.weight_field,
        encodings=parse_encodings(options.encoding),
        max_bytes=options.max_document_bytes,
    )
    template = load_template(
        options.template, tokenizer, chat_date=options.chat_date, template_option=options.template_option
    )
    cleaning = Cleaning(chats, ",".join(rules_of(options.clean, options.format)))
    return ChatEncoder(
        cleaning, tokenizer, template, options.chat_length, malformed, options.max_document_bytes, options.rewritten
    )


def _malformed(options: StoreOptions) -> Malformed:
    """Return the handler of records that cannot be read, which knows the other formats."""
    return Malformed(skip=options.skip_malformed, suggest=partial(ways_to_read, but=options.format))


def _write(encoder: Encoder, held_out: float, writers: dict[str, StoreWriter]) -> None:
    """Write every document to its store."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed:,} tokens of {task.fields[documents]:,} documents"),
        BarColumn(20),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("tokenize", total=None, documents=0)
        done = 0
        for encoded in _in_parallel(encoder):
            tokens = 0
            for document in encoded:
                is_held_out = int.from_bytes(document.digest[:8], "little") < held_out * 2**64
                name = "eval" if is_held_out else "train"
                writers[name].add(*document)
                tokens += len(document.ids)
            done += len(encoded)
            progress.update(task, advance=tokens, documents=done)


def _in_parallel(encoder: Encoder) -> Iterator[list[Encoded]]:
    """Encode groups in two threads, and yield them in order.

    While one thread turns results into arrays, the tokenizer's own threads process the other thread's text.
    """
    with ThreadPoolExecutor(2, thread_name_prefix="encode") as threads:
        coming: deque[Future[list[Encoded]]] = deque()
        try:
            for group in in_groups(encoder, ENCODE_CHARACTERS):
                coming.append(threads.submit(encoder.encode, group))
                if len(coming) == IN_FLIGHT:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            for future in coming:
                future.cancel()
