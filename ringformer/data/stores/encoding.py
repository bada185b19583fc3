"""Encoding of documents for a store; conversations are encoded in `chat_encoding.py`."""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringformer.data.sources.documents import Document, Documents
from ringformer.data.sources.malformed import Malformed
from ringformer.data.sources.retrieval_tasks import add_tasks
from ringformer.data.stores.beginning import begins_documents
from ringformer.data.stores.options import Begin
from ringformer.data.tokenizers.base import Tokenizer
from ringformer.files.hashes import content_digest


class Encoded(NamedTuple):
    """One document of a store."""

    ids: np.ndarray
    trained: np.ndarray | None
    """Mask of the tokens trained on, bool; None if all tokens are."""
    utf8_bytes: int
    """Size of the text that is trained on."""
    digest: bytes
    """Identifier of the document, which also decides whether the document is held out."""
    name: str = ""
    """Path of the file that the document is; empty for others."""


def in_groups(items: Iterable[tuple[int, Any]], characters: int) -> Iterator[list[Any]]:
    """Collect items, given as (length, item), into groups of at least `characters` in total; the last group may be
    smaller."""
    group: list[Any] = []
    total = 0
    for length, item in items:
        group.append(item)
        total += length
        if total >= characters:
            yield group
            group = []
            total = 0
    if group:
        yield group


def copies(weight: float, digest: bytes) -> int:
    """Return the number of copies of a document: its weight, rounded up or down by chance, which the digest decides."""
    return int(weight) + (int.from_bytes(digest[8:16], "little") < weight % 1 * 2**64)


class DocumentEncoder:
    """Encoder of documents; all tokens are trained on.

    Args:
      documents: to be encoded.
      begin: the token that begins each document: the tokenizer's BOS token, or none (`begins_documents`).
      separator: text that ends each document; without one, the tokenizer's end token does.
      retrieval_tasks: questions to add to each document (`add_tasks`).
    """

    def __init__(
        self,
        documents: Iterable[Document],
        tokenizer: Tokenizer,
        *,
        begin: Begin = "tokenizer",
        separator: str = "",
        retrieval_tasks: int = 0,
    ):
        self._documents = documents if isinstance(documents, Documents) else Documents(documents)
        self.malformed: Malformed = self._documents.malformed
        self._tokenizer = tokenizer
        self._tasks = retrieval_tasks
        self.begins: bool = begins_documents(begin, tokenizer)
        """True if documents begin with the BOS token."""
        begin_ids = [tokenizer.bos_id] if self.begins else []
        end_ids = tokenizer.encode(separator) if separator else [tokenizer.eos_id]
        self._begin = np.array(begin_ids, np.int32)
        self._end = np.array(end_ids, np.int32)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[tuple[int, Document]]:
        """Yield the documents to encode, each with its length in characters."""
        for document in self._documents:
            yield len(document.text), document

    @property
    def left_out(self) -> Counter[str]:
        return self._documents.left_out + self._counts

    def encode(self, group: Sequence[Document]) -> list[Encoded]:
        counts: Counter[str] = Counter()
        digests = [content_digest(_utf8(document)) for document in group]
        if self._tasks:
            asked = []
            for document, digest in zip(group, digests, strict=True):
                text, added = add_tasks(document.text, self._tasks, digest)
                counts += added
                asked.append(document._replace(text=text))
            group = asked
        encoded = []
        for document, ids, digest in zip(group, self._ids(group), digests, strict=True):
            number = copies(document.weight, digest)
            counts["copies added by weight"] += max(number - 1, 0)
            counts["documents dropped: by weight"] += number == 0
            whole = np.concatenate([self._begin, ids, self._end])
            size = len(_utf8(document))
            name = document.name if document.is_file else ""
            encoded += [Encoded(whole, None, size, digest, name)] * number
        with self._lock:  # groups are encoded in two threads
            self._counts += counts
        return encoded

    def _ids(self, group: Sequence[Document]) -> list[np.ndarray]:
        try:
            return self._tokenizer.encode_batch([document.text for document in group])
        except UnicodeEncodeError:
            for document in group:  # find the document to name
                try:
                    document.text.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise ValueError(
                        f"{document.name} is not UTF-8, which tokenizer {self._tokenizer.name} requires: {error}; "
                        "repair or remove it, or use the tokenizer 'bytes', which reads any file"
                    ) from None
            raise


def _utf8(document: Document) -> bytes:
    try:
        return document.text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(f"{document.name} cannot be written as UTF-8: {error}; repair or remove it") from None
