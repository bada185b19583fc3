"""Encoding of conversations for a store: answers are trained on, long conversations are split between turns, and an
answer that a chat template rewrites later has a sequence of its own."""

import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from ringformer.data.chats.cleaning import Cleaning, messages_digest, split_turns
from ringformer.data.chats.continued_ids import encode_answers
from ringformer.data.chats.conversations import Conversation, Message
from ringformer.data.chats.rendered import Rendered
from ringformer.data.chats.templates import Rewritten, Template
from ringformer.data.sources.malformed import Malformed
from ringformer.data.sources.text_files import check_size
from ringformer.data.stores.encoding import Encoded, copies, in_groups
from ringformer.data.tokenizers.base import Tokenizer

RENDER_CHARACTERS = 2**17
"""Characters of conversations to render at a time; batches save round trips to a template in another process."""

MANY_TIMES = 2.0
"""Growth of the text by sequences of rewritten answers from which on a preparation says so before it tokenizes."""


class TrainedSequence(NamedTuple):
    """Tokens that train on some answers of a conversation."""

    ids: np.ndarray
    trained: np.ndarray
    answers: tuple[int, ...]
    """Numbers of the answers in the conversation, in the order of the stretches that `trained` marks."""

    @property
    def ends(self) -> dict[int, int]:
        """Places behind the answers, by number."""
        return dict(zip(self.answers, _runs(self.trained)[:, 1].tolist(), strict=True))

    def up_to(self, last: int) -> "TrainedSequence | None":
        """Return the beginning, up to the end of its last answer of those up to number `last`; None without any."""
        answers = tuple(number for number in self.answers if number <= last)
        if not answers:
            return None
        end = self.ends[answers[-1]]
        return TrainedSequence(self.ids[:end], self.trained[:end], answers)


class RenderedChat(NamedTuple):
    """A conversation, and the sequences that train on its answers."""

    conversation: Conversation
    sequences: list[Rendered]

    @property
    def characters(self) -> int:
        """Characters of all sequences."""
        return sum(map(_characters, self.sequences))


@dataclass
class ChatEncoder:
    """Encoder of conversations with a template; answers and their end tokens are trained on.

    A conversation longer than `chat_length` tokens (0: no limit) is split between an answer and the next question, and
    each part repeats the system message. If a single question with its answer exceeds the limit, it is cut. Parts
    without a token to train on are left out. All parts are on the same side of the train-eval split, as are the
    sequences of answers that the template rewrites.
    """

    conversations: Cleaning
    tokenizer: Tokenizer
    template: Template
    chat_length: int
    malformed: Malformed
    max_bytes: int
    rewritten: Rewritten = "split"

    def __post_init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._has_warned = False

    def __iter__(self) -> Iterator[tuple[int, RenderedChat]]:
        for group in in_groups(self._sized(), RENDER_CHARACTERS):
            chats = self._rendered(group)
            self._warn_of_growth(chats)
            for chat in chats:
                yield chat.characters, chat

    def _rendered(self, conversations: Sequence[Conversation]) -> list[RenderedChat]:
        """Render the conversations; those that are refused are reported and left out."""
        readable = []
        rendered = self.template.render_all([conversation.messages for conversation in conversations])
        for conversation, sequences in zip(conversations, rendered, strict=True):
            if isinstance(sequences, ValueError):
                self.malformed(f"{conversation.name}: {sequences}", "refused by the chat template")
            elif self.rewritten == "refuse" and len(sequences) > 1:
                self.malformed(f"{conversation.name}: {_rewritten(sequences)}", "an answer is rewritten later")
            else:
                readable.append(RenderedChat(conversation, sequences))
        return readable

    def _warn_of_growth(self, chats: Sequence[RenderedChat]) -> None:
        """Print a line once if sequences of rewritten answers multiply the text."""
        if self.rewritten != "split" or self._has_warned:
            return
        whole = 0
        every = 0
        for chat in chats:
            whole += _characters(chat.sequences[-1])
            every += chat.characters
        if every > MANY_TIMES * whole:
            self._has_warned = True
            print(
                f"the chat template rewrites earlier answers, each of which becomes a sequence of its own: "
                f"{every / whole:.1f} times the text; to train on the last answers alone: --rewritten=last",
                file=sys.stderr,
            )

    def _sized(self) -> Iterator[tuple[int, Conversation]]:
        """Yield the conversations, each with its number of characters plus an allowance for the template's own text."""
        for conversation in self.conversations:
            check_size(conversation.name, conversation.utf8_bytes, self.max_bytes)
            characters = sum(len(message.content) + len(message.extra) for message in conversation.messages)
            yield 1000 + characters, conversation

    @property
    def left_out(self) -> Counter[str]:
        return self.conversations.counts + self.malformed.counts + self._counts

    def _count(self, event: str, number: int = 1) -> None:
        with self._lock:  # groups are encoded in two threads
            self._counts[event] += number

    def encode(self, group: Sequence[RenderedChat]) -> list[Encoded]:
        rendered: list[Rendered] = []
        for chat in group:
            rendered += chat.sequences
        encoded = iter(self._sequences(rendered))
        parts = []
        for conversation, of_chat in group:
            results = list(islice(encoded, len(of_chat)))
            try:
                sequences = _without_errors(results)
            except ValueError as error:
                self.malformed(f"{conversation.name}: {error}", "an answer joined with its prompt")
                continue
            digest = messages_digest(conversation.messages)
            number = copies(conversation.weight, digest)
            if number == 0:
                self._count("conversations dropped: by weight")
                continue
            if number > 1:
                self._count("copies added by weight", number - 1)
            for part in self._fit(conversation, sequences, digest):
                if np.any(part.trained):
                    parts += [part] * number
                else:
                    self._count("parts dropped: no answer within chat_length, or none that is trained on")
        return parts

    def _sequences(self, rendered: Sequence[Rendered]) -> list[TrainedSequence | ValueError]:
        chats = [sequence.segments for sequence in rendered]
        if self.template.own is None:
            encoded: Sequence[tuple[np.ndarray, np.ndarray] | ValueError] = self.tokenizer.encode_chats(chats)
        else:
            encoded = encode_answers(self.tokenizer, chats)
        results: list[TrainedSequence | ValueError] = []
        for result, sequence in zip(encoded, rendered, strict=True):
            if isinstance(result, ValueError):
                results.append(result)
            else:
                results.append(TrainedSequence(*result, sequence.answers))
        return results

    def _fit(self, conversation: Conversation, sequences: list[TrainedSequence], digest: bytes) -> Iterator[Encoded]:
        """Yield the parts of a conversation that is longer than chat_length; yield a shorter conversation whole."""
        before, turns = split_turns(conversation.messages)
        limit = self.chat_length
        if limit and _longest(sequences) > limit:
            self._count("conversations longer than chat_length")
        while limit and _longest(sequences) > limit:
            ends: dict[int, int] = {}
            for sequence in sequences:
                ends |= sequence.ends
            stops = _stops(turns, ends)
            if len(stops) == 1:
                break
            last = _last_fitting(stops, ends, limit)
            self._count("splits between turns")
            part = []
            for sequence in sequences:
                cut = sequence.up_to(last)
                if cut is not None:
                    part.append(cut)
            yield from self._parts(part, turns, digest)
            turns = turns[_answers(turns)[last] + 1 :]
            if not _answers(turns):
                return
            rendered = self.template.sequences([*before, *turns])
            sequences = _without_errors(self._sequences(rendered))  # there are none: all were encoded before
        yield from self._parts(sequences, turns, digest)

    def _parts(self, sequences: list[TrainedSequence], turns: Sequence[Message], digest: bytes) -> Iterator[Encoded]:
        """Make the parts of a store: all sequences, or the last one."""
        rewritten = sequences[:-1]
        if self.rewritten == "last":
            self._count("answers dropped: later turns rewrite them", sum(len(s.answers) for s in rewritten))
            rewritten = []
        added = sum(len(sequence.ids) for sequence in rewritten)
        self._count("tokens added by sequences of answers that later turns rewrite", added)
        for sequence in [*rewritten, sequences[-1]]:
            yield self._part(sequence, turns, digest)

    def _part(self, sequence: TrainedSequence, turns: Sequence[Message], digest: bytes) -> Encoded:
        """Make a part, cut at chat_length, without the answers that are not trained on."""
        ids, trained, numbers = sequence
        limit = self.chat_length
        places = _answers(turns)
        answers = [turns[places[number]] for number in numbers]
        if not all(answer.trained for answer in answers):
            trained = trained.copy()
            for (start, end), answer in zip(_runs(trained), answers, strict=True):
                trained[start:end] = answer.trained
        cut = limit and len(ids) > limit
        if cut:
            self._count("answers cut at chat_length")
            ids = ids[:limit]
            trained = trained[:limit]
        text = _trained_text(answers)
        if cut or text is None:
            text = self.tokenizer.decode(ids[trained])
        size = len(text.encode("utf-8", "surrogateescape"))
        return Encoded(ids, trained, size, digest)


def _trained_text(answers: Sequence[Message]) -> str | None:
    """Return the text that is trained on; None if an answer has more than its content."""
    texts = []
    for answer in answers:
        if answer.extra:
            return None
        if answer.trained:
            texts.append(answer.content)
    return "".join(texts)


def _without_errors(results: Iterable[TrainedSequence | ValueError]) -> list[TrainedSequence]:
    """Return the sequences. Raises the first error among them."""
    sequences = []
    for result in results:
        if isinstance(result, ValueError):
            raise result
        sequences.append(result)
    return sequences


def _answers(turns: Sequence[Message]) -> list[int]:
    """Return the places of the answers."""
    return [place for place, message in enumerate(turns) if message.role == "assistant"]


def _stops(turns: Sequence[Message], ends: Mapping[int, int]) -> list[int]:
    """Return the numbers of the answers with which a part may end: a question follows, or it is the last answer. A part
    does not end between a call and its result."""
    places = _answers(turns)
    stops = []
    for number, place in enumerate(places):
        ends_turn = place == places[-1] or turns[place + 1].role == "user"
        if ends_turn and number in ends:
            stops.append(number)
    return stops


def _last_fitting(stops: Sequence[int], ends: Mapping[int, int], limit: int) -> int:
    """Return the last answer of `stops` up to which all answers end within the limit; the first one if none does."""
    last = stops[0]
    for stop in stops:
        if any(number <= stop and end > limit for number, end in ends.items()):
            break
        last = stop
    return last


def _longest(sequences: Sequence[TrainedSequence]) -> int:
    return max(len(sequence.ids) for sequence in sequences)


def _characters(sequence: Rendered) -> int:
    return sum(len(segment.text) for segment in sequence.segments)


def _rewritten(sequences: Sequence[Rendered]) -> str:
    """Return the error of a conversation whose answers need several sequences."""
    first = sequences[0].answers[-1]
    return (
        f"the chat template writes answer {first} in another way once later turns follow: with --rewritten=split it "
        "becomes a sequence of its own, and with --rewritten=last it is not trained on"
    )


def _runs(trained: np.ndarray) -> np.ndarray:
    """Return the start and end of each stretch of tokens that are trained on, int [answers, 2]."""
    return np.flatnonzero(np.diff(trained, prepend=False, append=False)).reshape(-1, 2)
