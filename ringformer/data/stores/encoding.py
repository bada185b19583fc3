"""Encoding of documents and conversations for a store."""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ringformer.data.chats.cleaning import Cleaning, content_digest, split_turns
from ringformer.data.chats.conversations import Conversation, Message
from ringformer.data.chats.templates import Template
from ringformer.data.sources.documents import Document, Documents
from ringformer.data.sources.malformed import Malformed
from ringformer.data.sources.retrieval_tasks import add_tasks
from ringformer.data.sources.text_files import check_size
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
            group, total = [], 0
    if group:
        yield group


def copies(weight: float, digest: bytes) -> int:
    """Return the number of copies of a document: its weight, rounded up or down by chance, which the digest decides."""
    return int(weight) + (int.from_bytes(digest[8:16], "little") < weight % 1 * 2**64)


class DocumentEncoder:
    """Encoder of documents; all tokens are trained on.

    Args:
      documents: to be encoded.
      separator: text that ends each document; without one, the tokenizer's end token does.
      retrieval_tasks: questions to add to each document (`add_tasks`).
    """

    def __init__(
        self, documents: Iterable[Document], tokenizer: Tokenizer, *, separator: str = "", retrieval_tasks: int = 0
    ):
        self._documents = documents if isinstance(documents, Documents) else Documents(documents)
        self.malformed = self._documents.malformed
        self._tokenizer, self._tasks = tokenizer, retrieval_tasks
        self._end = np.array(tokenizer.encode(separator) if separator else [tokenizer.eos_id], np.int32)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[tuple[int, Document]]:
        """Yield the documents to encode, each with its length in characters."""
        return ((len(document.text), document) for document in self._documents)

    @property
    def left_out(self) -> Counter[str]:
        return self._documents.left_out + self._counts

    def encode(self, group: Sequence[Document]) -> list[Encoded]:
        counts: Counter[str] = Counter()
        digests = [hashlib.blake2b(_utf8(document), digest_size=16).digest() for document in group]
        if self._tasks:
            asked = [add_tasks(d.text, self._tasks, digest) for d, digest in zip(group, digests, strict=True)]
            group = [document._replace(text=text) for document, (text, _) in zip(group, asked, strict=True)]
            counts = sum((added for _, added in asked), counts)
        encoded = []
        for document, ids, digest in zip(group, self._ids(group), digests, strict=True):
            number = copies(document.weight, digest)
            counts["copies added by weight"] += max(number - 1, 0)
            counts["documents dropped: by weight"] += number == 0
            ids, size = np.append(ids, self._end), len(_utf8(document))
            encoded += [Encoded(ids, None, size, digest, document.name if document.is_file else "")] * number
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
                    self.malformed(f"{conversation.name}: {segments}", "refused by the chat template")
                else:
                    yield sum(len(segment.text) for segment in segments), (conversation, segments)

    def _sized(self) -> Iterator[tuple[int, Conversation]]:
        """Yield the conversations, each with its number of characters plus an allowance for the template's own text."""
        for conversation in self.conversations:
            texts = [message.content + message.extra for message in conversation.messages]
            check_size(conversation.name, sum(len(text.encode()) for text in texts), self.max_bytes)
            yield 1000 + sum(map(len, texts)), conversation

    @property
    def left_out(self) -> Counter[str]:
        return self.conversations.counts + self.malformed.counts + self._counts

    def _count(self, event: str, number: int = 1) -> None:
        with self._lock:  # groups are encoded in two threads
            self._counts[event] += number

    def encode(self, group: Sequence[tuple[Conversation, list[Segment]]]) -> list[Encoded]:
        encoded = self.tokenizer.encode_chats([segments for _, segments in group])
        parts = []
        for (conversation, _), (ids, trained) in zip(group, encoded, strict=True):
            digest = content_digest(conversation.messages)
            number = copies(conversation.weight, digest)
            if number != 1:
                self._count(
                    "copies added by weight" if number else "conversations dropped: by weight", max(number - 1, 1)
                )
            for part in self._fit(conversation, ids, trained, digest) if number else ():
                if np.any(part.trained):
                    parts += [part] * number
                else:
                    self._count("parts dropped: no answer within chat_length, or none that is trained on")
        return parts

    def _fit(
        self, conversation: Conversation, ids: np.ndarray, trained: np.ndarray, digest: bytes
    ) -> Iterator[Encoded]:
        """Yield the parts of a conversation that is longer than chat_length; yield a shorter conversation whole."""
        before, turns = split_turns(conversation.messages)
        limit = self.chat_length
        if limit and len(ids) > limit:
            self._count("conversations longer than chat_length")
        while limit and len(ids) > limit:
            answers = [i for i, message in enumerate(turns) if message.role == "assistant"]
            # A part ends after an answer that a question follows, or the last one; not between a call and its result.
            stops = [j for j, i in enumerate(answers) if i == answers[-1] or turns[i + 1].role == "user"]
            if len(stops) == 1:
                break
            ends = _runs(trained)[stops, 1]
            fitting = max(int(np.searchsorted(ends, limit, side="right")), 1) - 1
            end, turn = ends[fitting], answers[stops[fitting]] + 1
            self._count("splits between turns")
            yield self._part(ids[:end], trained[:end], turns[:turn], digest)
            turns = turns[turn:]
            if not turns:
                return
            ((ids, trained),) = self.tokenizer.encode_chats([self.template([*before, *turns])])
        yield self._part(ids, trained, turns, digest)

    def _part(self, ids: np.ndarray, trained: np.ndarray, turns: Sequence[Message], digest: bytes) -> Encoded:
        """Make a part of a conversation, cut at chat_length, without the answers that are not trained on."""
        limit, answers = self.chat_length, [message for message in turns if message.role == "assistant"]
        if not all(answer.trained for answer in answers):
            trained = trained.copy()
            for (start, end), answer in zip(_runs(trained), answers, strict=True):
                trained[start:end] = answer.trained
        cut = limit and len(ids) > limit
        if cut:
            self._count("answers cut at chat_length")
            ids, trained = ids[:limit], trained[:limit]
        if not cut and not any(answer.extra for answer in answers):
            size = sum(len(answer.content.encode()) for answer in answers if answer.trained)
        else:
            size = len(self.tokenizer.decode(ids[trained]).encode("utf-8", "surrogateescape"))
        return Encoded(ids, trained, size, digest)


def _runs(trained: np.ndarray) -> np.ndarray:
    """Return the start and end of each stretch of tokens that are trained on, int [answers, 2]."""
    return np.flatnonzero(np.diff(trained, prepend=False, append=False)).reshape(-1, 2)


def _utf8(document: Document) -> bytes:
    try:
        return document.text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(f"{document.name} cannot be written as UTF-8: {error}; repair or remove it") from None
