"""The token store: a folder with the tokens of many documents end to end, read through a memory map.

    store.json    format version, fingerprint, counts, and the settings it was built with
    tokens.bin    little-endian uint16, or uint32 for a vocabulary above 65536
    offsets.npy   int64 [documents + 1]: document i is tokens[offsets[i]:offsets[i + 1]], its end token included
    mask.bin      optional, uint8 per token: 0 for a token that is read but not trained on

`build_stores` makes two of them from one pass over the documents, `train` and `eval`. Which one a document goes
to depends on nothing but its text, so copies of a document never lie on both sides.
"""

import hashlib
import json
import shutil
import sys
import uuid
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ringformer.data.sources import Document, Documents, read_documents
from ringformer.data.tokenizers import Tokenizer

FORMAT = 1

ENCODE_CHARACTERS = 2**22
"""How much text is handed to the tokenizer at once: bounds the memory of a build."""


class TokenStore:
    """A store opened for reading; nothing but store.json is in memory until it is asked for.

    Attributes:
      tokens: uint16 or uint32 [N], memory-mapped.
      offsets: int64 [documents + 1], memory-mapped.
      mask: uint8 [N], memory-mapped, or None: all tokens are trained on.
      meta: what store.json says.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.meta: dict[str, Any] = json.loads((self.path / "store.json").read_text())
        except FileNotFoundError:
            what = "an unfinished token store (no store.json)" if self.path.is_dir() else "no token store"
            raise FileNotFoundError(
                f"there is {what} at {self.path}; build one with ringformer.data.open_or_build"
            ) from None
        if self.meta["format"] != FORMAT:
            raise ValueError(f"{self.path} has store format {self.meta['format']}, this version reads {FORMAT}")
        self.tokens = self._map("tokens.bin", np.dtype(self.meta["dtype"]))
        self.mask = self._map("mask.bin", np.dtype(np.uint8)) if (self.path / "mask.bin").exists() else None
        self.offsets = np.load(self.path / "offsets.npy", mmap_mode="r")
        if len(self.offsets) != self.meta["documents"] + 1 or self.offsets[-1] != len(self.tokens):
            raise ValueError(
                f"{self.path}/offsets.npy ends {len(self.offsets) - 1} documents at token {self.offsets[-1]}, "
                f"store.json says {self.meta['documents']} and {self.meta['tokens']}; delete the store and rebuild it"
            )

    def _map(self, file: str, dtype: np.dtype) -> np.ndarray:
        held, expected = (self.path / file).stat().st_size, self.meta["tokens"] * dtype.itemsize
        if held != expected:
            raise ValueError(
                f"{self.path}/{file} has {held} bytes, store.json says {expected}; delete the store and rebuild it"
            )
        return np.memmap(self.path / file, dtype, mode="r")


def open_or_build(
    directory: str | Path,
    *,
    source: str,
    field: str,
    split: str,
    tokenizer: Tokenizer,
    held_out: float,
    skip_empty: bool,
) -> tuple[TokenStore, TokenStore | None]:
    """The train and eval stores in `directory`, built from `source` if they are not there.

    The eval store is None with held_out=0. See `read_documents` for source, field, split and skip_empty.

    Raises:
      ValueError: if the stores there were built with other settings.
    """
    directory = Path(directory)
    asked = {"source": source, "field": field, "split": split, "skip_empty": skip_empty}
    if not directory.is_dir() or not any(directory.iterdir()):
        documents = read_documents(source, field=field, split=split, skip_empty=skip_empty)
        try:
            return build_stores(directory, documents, tokenizer, held_out=held_out, settings=asked)
        except OSError:
            if not (directory / "train" / "store.json").is_file():
                raise
            # Another process building the same stores was faster: use its.
    train = TokenStore(directory / "train")
    there, asked = train.meta["settings"], asked | {"tokenizer": tokenizer.name, "held_out": held_out}
    differ = [f"{k} is {there.get(k)!r}, not {v!r}" for k, v in asked.items() if there.get(k) != v]
    if differ:
        raise ValueError(
            f"the token stores in {directory} were built otherwise: {'; '.join(differ)}. "
            "Use another directory, or delete this one to rebuild it"
        )
    return train, TokenStore(directory / "eval") if held_out else None


def build_stores(
    directory: str | Path,
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    *,
    held_out: float,
    settings: Mapping[str, Any] | None = None,
) -> tuple[TokenStore, TokenStore | None]:
    """Tokenize `documents` into `directory/train` and, unless held_out=0, `directory/eval`.

    Everything is written beside `directory`, which appears complete or not at all.

    Args:
      held_out: the share of documents that go to eval, in [0, 1).
      settings: how the documents were chosen, for store.json; the tokenizer and `held_out` are added.

    Raises:
      ValueError: if a split gets no document, or a document cannot be encoded.
      FileExistsError: if `directory` holds something.
    """
    directory = Path(directory)
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out={held_out} is not in [0, 1): it is the share of documents kept for evaluation")
    if directory.exists() and any(directory.iterdir()):
        raise FileExistsError(f"{directory} is not empty; build the stores in another directory, or delete this one")
    documents = documents if isinstance(documents, Documents) else Documents(documents)
    settings = {**(settings or {}), "tokenizer": tokenizer.name, "held_out": held_out}
    directory.parent.mkdir(parents=True, exist_ok=True)
    building = directory.parent / f"{directory.name}.building-{uuid.uuid4().hex[:8]}"
    try:
        building.mkdir()
        with ExitStack() as files:
            writers = {
                name: files.enter_context(closing(_Writer(building / name, tokenizer, settings)))
                for name in (("train", "eval") if held_out else ("train",))
            }
            _write(documents, tokenizer, held_out, writers)
            for name, writer in writers.items():
                if not writer.documents:
                    total = sum(writer.documents for writer in writers.values())
                    raise ValueError(
                        f"the {name} store would be empty: of {total} documents, held_out={held_out} sends none to "
                        "it; " + ("choose another held_out, or add documents" if total else "the source has none")
                    )
                writer.finish(skipped_empty=documents.skipped)
        building.rename(directory)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return TokenStore(directory / "train"), TokenStore(directory / "eval") if held_out else None


def _write(documents: Iterable[Document], tokenizer: Tokenizer, held_out: float, writers: dict[str, "_Writer"]):
    columns = SpinnerColumn(), TextColumn("{task.completed:,} documents tokenized"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("tokenize", total=None)
        for group in _groups(documents):
            raw = [_utf8(document) for document in group]
            for text, ids in zip(raw, _encode(tokenizer, group), strict=True):
                digest = hashlib.blake2b(text, digest_size=16).digest()
                held = int.from_bytes(digest[:8], "little") < held_out * 2**64
                writers["eval" if held else "train"].add(ids, len(text), digest)
            progress.update(task, advance=len(group))


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group, characters = [], 0
    for document in documents:
        group.append(document)
        characters += len(document.text)
        if characters >= ENCODE_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _utf8(document: Document) -> bytes:
    try:
        return document.text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(f"{document.name} cannot be written as UTF-8: {error}; repair or remove it") from None


def _encode(tokenizer: Tokenizer, group: list[Document]) -> list[np.ndarray]:
    try:
        return tokenizer.encode_batch([document.text for document in group])
    except UnicodeEncodeError:
        for document in group:  # one of them: name it
            try:
                document.text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{document.name} is not UTF-8, which tokenizer {tokenizer.name} requires: {error}; repair or "
                    "remove it, or use the tokenizer 'bytes', which reads any file"
                ) from None
        raise


class _Writer:
    """Writes one store, document by document; `finish` writes store.json, without which it is no store."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, settings: dict[str, Any]):
        folder.mkdir()
        self._folder = folder
        self._tokenizer = tokenizer
        self._settings = settings
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
        self._tokens = (folder / "tokens.bin").open("wb")
        self._offsets = array("q", [0])
        self._utf8_bytes = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._hash.update(json.dumps([FORMAT, tokenizer.name, settings["held_out"]]).encode())

    @property
    def documents(self) -> int:
        return len(self._offsets) - 1

    def add(self, ids: np.ndarray, utf8_bytes: int, digest: bytes) -> None:
        self._tokens.write(np.append(ids.astype(self._dtype), self._dtype.type(self._tokenizer.eos_id)).tobytes())
        self._offsets.append(self._offsets[-1] + len(ids) + 1)
        self._utf8_bytes += utf8_bytes
        self._hash.update(digest)

    def close(self) -> None:
        self._tokens.close()

    def finish(self, *, skipped_empty: int) -> None:
        self.close()
        np.save(self._folder / "offsets.npy", np.frombuffer(self._offsets, np.int64))
        meta = {
            "format": FORMAT,
            "fingerprint": self._hash.hexdigest(),
            "tokenizer": self._tokenizer.name,
            "vocab_size": self._tokenizer.vocab_size,
            "eos_id": self._tokenizer.eos_id,
            "dtype": self._dtype.str,
            "documents": self.documents,
            "tokens": self._offsets[-1],
            "utf8_bytes": self._utf8_bytes,
            "skipped_empty": skipped_empty,
            "settings": self._settings,
        }
        (self._folder / "store.json").write_text(json.dumps(meta, indent=2) + "\n")
