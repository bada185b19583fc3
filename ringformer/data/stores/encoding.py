"""Encoding of documents and conversations for a store."""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ringformer.data.chats.cleaning import Cleaning, content_digest
from ringformer.data.chats.conversations import Conversation, Message
from ringformer.data.chats.templates import Template
from ringformer.data.sources import Document, Documents, Malformed, check_size
from ringformer.data.tokenizers.base import Segment, Tokenizer

RENDER_CHARACTERS = 2**17
"""Characters of conversations to render at a time; batches save round trips to a template in another process."""


class Encoded(NamedTuple):
    """One document of a store."""

    ids: np.ndarray
    trained: np.ndarray | None
    """Mask of the tokens trained on, bool; None if all tokens are."""
    utf8_bytes: int
    """Size of the text that is trained on."""
    digest: bytes
    """Identifier of the document, which also decides whether the document is held out."""


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
            group, total = [], 0
    if group:
        yield group


class DocumentEncoder:
    """Encoder of documents, each followed by the end token; all tokens are trained on."""

    def __init__(self, documents: Iterable[Document], tokenizer: Tokenizer):
        self._documents = documents if isinstance(documents, Documents) else Documents(documents)
        self._tokenizer = tokenizer

    def __iter__(self) -> Iterator[tuple[int, Document]]:
        """Yield the documents to encode, each with its length in characters."""
        return ((len(document.text), document) for document in self._documents)

    @property
    def left_out(self) -> Counter[str]:
        return Counter({"empty documents skipped": self._documents.skipped})

    def encode(self, group: Sequence[Document]) -> list[Encoded]:
        texts = [_utf8(document) for document in group]
        end = np.int32(self._tokenizer.eos_id)
        return [
            Encoded(np.append(ids, end), None, len(text), hashlib.blake2b(text, digest_size=16).digest())
            for text, ids in zip(texts, self._ids(group), strict=True)
        ]

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


@dataclass
class ChatEncoder:
    """Encoder of conversations with a template; answers and their end tokens are trained on.

    A conversation longer than `chat_length` tokens (0: no limit) is split between an answer and the next question, and
    each part repeats the system message. If a single question with its answer exceeds the limit, it is cut. Parts
    without a token to train on are left out. All parts are on the same side of the train-eval split.
    """

    conversations: Cleaning
    tokenizer: Tokenizer
    template: Template
    chat_length: int
    malformed: Malformed
    max_bytes: int

    def __post_init__(self):
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[tuple[int, tuple[Conversation, list[Segment]]]]:
        for group in in_groups(self._sized(), RENDER_CHARACTERS):
            rendered = self.template.render_all([conversation.messages for conversation in group])
            for conversation, segments in zip(group, rendered, strict=True):
                if isinstance(segments, ValueError):
                    self.malformed(f"{conversation.name}: {segments}")
                else:
                    yield sum(len(segment.text) for segment in segments), (conversation, segments)

    def _sized(self) -> Iterator[tuple[int, Conversation]]:
        """Yield the conversations, each with its number of characters plus an allowance for the template's own text."""
        for conversation in self.conversations:
            texts = [message.content for message in conversation.messages]
            check_size(conversation.name, sum(len(text.encode()) for text in texts), self.max_bytes)
            yield 1000 + sum(map(len, texts)), conversation

    @property
    def left_out(self) -> Counter[str]:
        malformed = Counter({"malformed records skipped": self.malformed.count})
        return self.conversations.counts + malformed + self._counts

    def _count(self, event: str) -> None:
        with self._lock:  # groups are encoded in two threads
            self._counts[event] += 1

    def encode(self, group: Sequence[tuple[Conversation, list[Segment]]]) -> list[Encoded]:
        encoded = self.tokenizer.encode_chats([segments for _, segments in group])
        parts = []
        for (conversation, _), (ids, trained) in zip(group, encoded, strict=True):
            digest = content_digest(conversation.messages)
            for part in self._fit(conversation, ids, trained, digest):
                if np.any(part.trained):
                    parts.append(part)
                else:
                    self._count("parts dropped: no answer within chat_length")
        return parts

    def _fit(
        self, conversation: Conversation, ids: np.ndarray, trained: np.ndarray, digest: bytes
    ) -> Iterator[Encoded]:
        """Yield the parts of a conversation that is longer than chat_length; yield a shorter conversation whole."""
        messages, limit = list(conversation.messages), self.chat_length
        system = [message for message in messages[:1] if message.role == "system"]
        turns = messages[len(system) :]
        if limit and len(ids) > limit:
            self._count("conversations longer than chat_length")
        while limit and len(ids) > limit and len(turns) > 2:
            # Each answer ends where a run of trained tokens ends.
            ends = np.flatnonzero(trained & ~np.append(trained[1:], False)) + 1
            pairs = max(int(np.searchsorted(ends, limit, side="right")), 1)  # questions with answers that fit
            end = ends[pairs - 1]
            self._count("splits between turns")
            yield self._part(ids[:end], trained[:end], turns[: 2 * pairs], digest)
            turns = turns[2 * pairs :]
            if not turns:
                return
            ((ids, trained),) = self.tokenizer.encode_chats([self.template([*system, *turns])])
        yield self._part(ids, trained, turns, digest)

    def _part(self, ids: np.ndarray, trained: np.ndarray, turns: Sequence[Message], digest: bytes) -> Encoded:
        """Make a part of a conversation, cut at chat_length."""
        limit = self.chat_length
        if not limit or len(ids) <= limit:
            answers = sum(len(message.content.encode()) for message in turns if message.role == "assistant")
            return Encoded(ids, trained, answers, digest)
        self._count("answers cut at chat_length")
        ids, trained = ids[:limit], trained[:limit]
        text = self.tokenizer.decode(ids[trained]).encode("utf-8", "surrogateescape")
        return Encoded(ids, trained, len(text), digest)


def _utf8(document: Document) -> bytes:
    try:
        return document.text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(f"{document.name} cannot be written as UTF-8: {error}; repair or remove it") from None
