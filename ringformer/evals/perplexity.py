"""Perplexity of a store's documents: by the position of a token, and by how much context stands before the same tokens.

A row is a stretch of one document, so that all of its context belongs to it.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ringformer.data.stores.token_store import TokenStore
from ringformer.evals.case_file import CaseFile, Row

ROUNDING = 1e-3
"""Nats by which sums of the same losses in another order may differ."""


class LossModel(Protocol):
    """What says how likely tokens are: `ringformer.inference.generator.Generator` does."""

    def token_losses(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """-log p in nats of every token but the first, float [len(row) - 1] for each row."""
        ...


class Stretch(NamedTuple):
    """Tokens of a document, and which of them count."""

    length: int
    document: int
    tokens: np.ndarray
    """int [length]."""
    counted: np.ndarray
    """bool [length]: trained on by the store; of the first token it does not matter."""

    @property
    def key(self) -> str:
        return json.dumps([self.length, self.document])

    @property
    def tokens_hash(self) -> str:
        return hashlib.blake2b(self.tokens.astype("<i8").tobytes(), digest_size=16).hexdigest()


def choose_documents(store: TokenStore, longest: int, count: int) -> list[int]:
    """The numbers of up to `count` documents of at least `longest` tokens, spread evenly over the store. Raises
    ValueError if it has none."""
    lengths = np.diff(np.asarray(store.offsets))
    enough = np.flatnonzero(lengths >= longest)
    if not enough.size:
        raise ValueError(
            f"{store.path} has no document of {longest:,} tokens, the longest has {lengths.max(initial=0):,}: ask for "
            "shorter --lengths, or name a store of longer documents"
        )
    chosen = np.linspace(0, enough.size - 1, min(count, enough.size)).round().astype(int)
    return enough[chosen].tolist()


def check(store: TokenStore, lengths: Sequence[int], last: int) -> None:
    """Raise ValueError if the store has no documents of the longest context, or the shortest no `last` tokens to
    predict."""
    if not 1 <= last < min(lengths):
        raise ValueError(f"--last={last} tokens must be at least 1, and fewer than the {min(lengths)} of a context")
    choose_documents(store, max(lengths), 1)


def stretches(store: TokenStore, documents: Sequence[int], length: int, longest: int) -> Iterator[Stretch]:
    """Of each document the `length` tokens up to its token `longest`: whatever the length, they end alike."""
    for document in documents:
        end = int(store.offsets[document]) + longest
        tokens = np.asarray(store.tokens[end - length : end]).astype(np.int64)
        counted = np.ones(length, bool) if store.mask is None else np.asarray(store.mask[end - length : end]) > 0
        yield Stretch(length, document, tokens, counted)


def measure(stretch: Stretch, losses: np.ndarray, last: int) -> Row:
    """The row of a stretch: nats and tokens of its last `last` ones, and by position in powers of two.

    Args:
      losses: float [length - 1], in nats, of every token but the first.

    Raises:
      FloatingPointError: for a loss that is not finite.
    """
    if losses.shape != (stretch.length - 1,):
        raise ValueError(f"{losses.shape[0]} losses for the {stretch.length - 1} predicted tokens")
    if not np.isfinite(losses).all():
        raise FloatingPointError(f"document {stretch.document}: a loss is not finite at {stretch.length:,} tokens")
    nats = np.where(stretch.counted[1:], losses.astype(np.float64), 0.0)
    counted = stretch.counted[1:]
    bins = np.log2(np.arange(1, stretch.length)).astype(int)  # of the token behind i others
    return {
        "key": stretch.key,
        "prompt_hash": stretch.tokens_hash,
        "length": stretch.length,
        "document": stretch.document,
        "last_nats": float(nats[-last:].sum()),
        "last_tokens": int(counted[-last:].sum()),
        "bin_nats": np.bincount(bins, nats).tolist(),
        "bin_tokens": np.bincount(bins, counted).astype(int).tolist(),
    }


def check_row(row: Row) -> None:
    """Raise ValueError, KeyError or TypeError for a row that `measure` did not write, as far as its numbers show it."""
    length, tokens, nats = row["length"], row["bin_tokens"], row["bin_nats"]
    if row["key"] != json.dumps([length, row["document"]]):
        raise ValueError("the key is another's")
    if not len(tokens) == len(nats) == (length - 1).bit_length() or sum(tokens) > length - 1:
        raise ValueError("the bins are not of its length")
    if not (0 <= row["last_tokens"] <= sum(tokens) and -ROUNDING <= row["last_nats"] <= sum(nats) + ROUNDING):
        raise ValueError("its last tokens are not among its tokens")


def measure_store(
    model: LossModel,
    store: TokenStore,
    lengths: Sequence[int],
    *,
    documents: int,
    last: int,
    batch_size: int,
    file: CaseFile,
    say: Callable[[str], None],
) -> list[Row]:
    """The rows of every document and length, of which those that the file has are not measured again."""
    longest = max(lengths)
    chosen, rows = choose_documents(store, longest, documents), []
    if len(chosen) < documents:
        say(f"{len(chosen)} documents of the store have {longest:,} tokens, not {documents}")
    for length in sorted(lengths):
        group = list(stretches(store, chosen, length, longest))
        pending = [stretch for stretch in group if not file.done(stretch.key, stretch.tokens_hash)]
        for first in range(0, len(pending), batch_size):
            batch = pending[first : first + batch_size]
            filled = [*batch, *[batch[-1]] * (batch_size - len(batch))]  # so that every batch has the same shape
            losses = model.token_losses([stretch.tokens.tolist() for stretch in filled])
            for stretch, found in zip(batch, losses, strict=False):
                file.add(measure(stretch, np.asarray(found), last))
        rows += [file.rows[stretch.key] for stretch in group]
        say(f"{length:,} tokens: {len(group)} documents, {len(pending)} of them new")
    return rows


class Loss(NamedTuple):
    """The mean loss of some tokens."""

    nats: float
    tokens: int
    bits_per_byte: float
    """By the store's bytes per trained token."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats, 700.0))


def _mean(nats: float, tokens: int, bytes_per_token: float) -> Loss:
    return Loss(nats / tokens, tokens, nats / tokens / math.log(2) / bytes_per_token)


def by_context(rows: Sequence[Row], bytes_per_token: float) -> dict[int, Loss]:
    """For each length of context the loss of the same last tokens; lengths without a counted token are left out."""
    found = {}
    for length in sorted({row["length"] for row in rows}):
        of_length = [row for row in rows if row["length"] == length]
        if tokens := sum(row["last_tokens"] for row in of_length):
            found[length] = _mean(sum(row["last_nats"] for row in of_length), tokens, bytes_per_token)
    return found


def by_position(rows: Sequence[Row], bytes_per_token: float) -> dict[int, Loss]:
    """At the longest context the loss of tokens behind k to 2k - 1 others, k a power of two, by k."""
    longest = max(row["length"] for row in rows)
    of_longest = [row for row in rows if row["length"] == longest]
    found = {}
    for k in range(len(of_longest[0]["bin_nats"])):
        if tokens := sum(row["bin_tokens"][k] for row in of_longest):
            found[2**k] = _mean(sum(row["bin_nats"][k] for row in of_longest), tokens, bytes_per_token)
    return found
