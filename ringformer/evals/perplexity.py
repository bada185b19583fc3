"""Perplexity of a store's documents, by the position of a token and by the length of the context of the same tokens.

A row is a stretch of one document, so it contains no context from other documents.
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
"""Tolerance, in nats, for sums of the same losses in another order."""


class LossModel(Protocol):
    """Model that computes losses of tokens; `ringformer.inference.generator.Generator` is one."""

    def token_losses(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Compute -log p in nats of every token but the first, float [len(row) - 1] for each row."""
        ...


class Stretch(NamedTuple):
    """Tokens of a document, and a mask of those that count."""

    length: int
    document: int
    tokens: np.ndarray
    """Token ids, int [length]."""
    counted: np.ndarray
    """Mask of tokens trained on by the store, bool [length]; the first entry is not used."""

    @property
    def key(self) -> str:
        return json.dumps([self.length, self.document])

    @property
    def tokens_hash(self) -> str:
        return hashlib.blake2b(self.tokens.astype("<i8").tobytes(), digest_size=16).hexdigest()


def choose_documents(store: TokenStore, longest: int, count: int) -> list[int]:
    """Return the numbers of up to `count` documents of at least `longest` tokens, spread evenly over the store. Raises
    ValueError if there are none."""
    lengths = np.diff(np.asarray(store.offsets))
    enough = np.flatnonzero(lengths >= longest)
    if not enough.size:
        raise ValueError(
            f"{store.path} has no document of {longest:,} tokens, the longest has {lengths.max(initial=0):,}: choose "
            "shorter --lengths, or a store of longer documents"
        )
    chosen = np.linspace(0, enough.size - 1, min(count, enough.size)).round().astype(int)
    return enough[chosen].tolist()


def check(store: TokenStore, lengths: Sequence[int], last: int) -> None:
    """Raise ValueError if the store has no document as long as the longest context, or the shortest context has fewer
    than `last` tokens to predict."""
    if not 1 <= last < min(lengths):
        raise ValueError(f"--last={last} tokens must be at least 1, and fewer than the {min(lengths)} of a context")
    choose_documents(store, max(lengths), 1)


def stretches(store: TokenStore, documents: Sequence[int], length: int, longest: int) -> Iterator[Stretch]:
    """Yield from each document the `length` tokens that end at its token `longest`, the same end for every length."""
    for document in documents:
        end = int(store.offsets[document]) + longest
        tokens = np.asarray(store.tokens[end - length : end]).astype(np.int64)
        counted = np.ones(length, bool) if store.mask is None else np.asarray(store.mask[end - length : end]) > 0
        yield Stretch(length, document, tokens, counted)


def measure(stretch: Stretch, losses: np.ndarray, last: int) -> Row:
    """Make the row of a stretch: nats and tokens of its last `last` tokens, and by position in powers of two.

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
    bins = np.log2(np.arange(1, stretch.length)).astype(int)  # of the token at position i
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
    """Raise ValueError, KeyError or TypeError for a row that `measure` cannot have written, judging by its numbers."""
    length, tokens, nats = row["length"], row["bin_tokens"], row["bin_nats"]
    if row["key"] != json.dumps([length, row["document"]]):
        raise ValueError("the key belongs to another row")
    if not len(tokens) == len(nats) == (length - 1).bit_length() or sum(tokens) > length - 1:
        raise ValueError("the bins do not fit the length")
    if not (0 <= row["last_tokens"] <= sum(tokens) and -ROUNDING <= row["last_nats"] <= sum(nats) + ROUNDING):
        raise ValueError("the last tokens exceed all tokens")


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
    """Return the rows of every document and length, measuring only those that are not yet in the file."""
    longest = max(lengths)
    chosen, rows = choose_documents(store, longest, documents), []
    if len(chosen) < documents:
        say(f"{len(chosen)} documents of the store have {longest:,} tokens, not {documents}")
    for length in sorted(lengths):
        group = list(stretches(store, chosen, length, longest))
        pending = [stretch for stretch in group if not file.done(stretch.key, stretch.tokens_hash)]
        for first in range(0, len(pending), batch_size):
            batch = pending[first : first + batch_size]
            filled = [*batch, *[batch[-1]] * (batch_size - len(batch))]  # every batch has the same shape
            losses = model.token_losses([stretch.tokens.tolist() for stretch in filled])
            for stretch, loss in zip(batch, losses, strict=False):
                file.add(measure(stretch, np.asarray(loss), last))
        rows += [file.rows[stretch.key] for stretch in group]
        say(f"{length:,} tokens: {len(group)} documents, {len(pending)} of them new")
    return rows


class Loss(NamedTuple):
    """The mean loss of some tokens."""

    nats: float
    tokens: int
    bits_per_byte: float
    """Bits per byte, from the store's bytes per trained token."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats, 700.0))


def _mean(nats: float, tokens: int, bytes_per_token: float) -> Loss:
    return Loss(nats / tokens, tokens, nats / tokens / math.log(2) / bytes_per_token)


def by_context(rows: Sequence[Row], bytes_per_token: float) -> dict[int, Loss]:
    """Loss of the same last tokens by length of context, without lengths that have no counted token."""
    losses = {}
    for length in sorted({row["length"] for row in rows}):
        of_length = [row for row in rows if row["length"] == length]
        if tokens := sum(row["last_tokens"] for row in of_length):
            losses[length] = _mean(sum(row["last_nats"] for row in of_length), tokens, bytes_per_token)
    return losses


def by_position(rows: Sequence[Row], bytes_per_token: float) -> dict[int, Loss]:
    """Loss at the longest context of tokens at positions k to 2k - 1, by k, a power of two."""
    longest = max(row["length"] for row in rows)
    of_longest = [row for row in rows if row["length"] == longest]
    losses = {}
    for k in range(len(of_longest[0]["bin_nats"])):
        if tokens := sum(row["bin_tokens"][k] for row in of_longest):
            losses[2**k] = _mean(sum(row["bin_nats"][k] for row in of_longest), tokens, bytes_per_token)
    return losses
