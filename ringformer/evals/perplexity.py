"""Perplexity of a store's documents: by position, and for the same tokens with contexts of several lengths.

A row is a stretch of one document, so it contains no context from other documents.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ringformer.data.stores.token_store import TokenStore
from ringformer.evals.case_file import CaseFile, Row
from ringformer.evals.cases import content_hash

ROUNDING = 1e-3
"""Tolerance, in nats, for sums of the same losses in a different order."""


TokenLosses = Callable[[Sequence[Sequence[int]]], Sequence[np.ndarray]]
"""Function that computes, for each row of tokens, -log p in nats of every token except the first, float [len(row) - 1],
as `ringformer.inference.generator.Generator.token_losses` does."""


class Stretch(NamedTuple):
    """Tokens of a document, and a mask of the tokens that count."""

    length: int
    document: int
    tokens: np.ndarray
    """Token ids, int [length]."""
    counted: np.ndarray
    """Mask of the tokens that the store trains on, bool [length]; the first entry is not used."""

    @property
    def key(self) -> str:
        return json.dumps([self.length, self.document])

    @property
    def prompt_hash(self) -> str:
        return content_hash(self.tokens.astype("<i8").tobytes())


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
    """Raise ValueError if the store has no document as long as the longest context, or if the shortest context has
    fewer than `last` tokens to predict."""
    if not 1 <= last < min(lengths):
        raise ValueError(f"--last={last} tokens must be at least 1, and fewer than the {min(lengths)} of a context")
    choose_documents(store, max(lengths), 1)


def stretches(store: TokenStore, documents: Sequence[int], length: int, longest: int) -> Iterator[Stretch]:
    """Yield, for each document, the `length` tokens that end at its token number `longest`, so that all lengths end at
    the same token."""
    for document in documents:
        end = int(store.offsets[document]) + longest
        tokens = np.asarray(store.tokens[end - length : end]).astype(np.int64)
        counted = np.ones(length, bool) if store.mask is None else np.asarray(store.mask[end - length : end]) > 0
        yield Stretch(length, document, tokens, counted)


def measure(stretch: Stretch, losses: np.ndarray, last: int) -> Row:
    """Make the row of a stretch: summed nats and number of the counted tokens, among its last `last` tokens and by
    position, in powers of two.

    Args:
      losses: float [length - 1], in nats, of every token but the first.

    Raises:
      FloatingPointError: for a loss that is not finite.
    """
    if not np.isfinite(losses).all():
        raise FloatingPointError(f"document {stretch.document}: a loss is not finite at {stretch.length:,} tokens")
    counted = stretch.counted[1:]
    nats = np.where(counted, losses.astype(np.float64), 0.0)
    bins = np.log2(np.arange(1, stretch.length)).astype(int)  # of the token at position i
    return {
        "key": stretch.key,
        "prompt_hash": stretch.prompt_hash,
        "length": stretch.length,
        "document": stretch.document,
        "last_nats": float(nats[-last:].sum()),
        "last_tokens": int(counted[-last:].sum()),
        "bin_nats": np.bincount(bins, nats).tolist(),
        "bin_tokens": np.bincount(bins, counted).astype(int).tolist(),
    }


def check_row(row: Row) -> None:
    """Raise ValueError, KeyError or TypeError for a row whose numbers show that `measure` cannot have written it."""
    length, tokens, nats = row["length"], row["bin_tokens"], row["bin_nats"]
    if row["key"] != json.dumps([length, row["document"]]):
        raise ValueError("the key belongs to another row")
    if not len(tokens) == len(nats) == (length - 1).bit_length() or sum(tokens) > length - 1:
        raise ValueError("the bins do not fit the length")
    if not (0 <= row["last_tokens"] <= sum(tokens) and -ROUNDING <= row["last_nats"] <= sum(nats) + ROUNDING):
        raise ValueError("the last tokens exceed all tokens")


def measure_store(
    token_losses: TokenLosses,
    store: TokenStore,
    lengths: Sequence[int],
    documents: int,
    last: int,
    batch_size: int,
    file: CaseFile,
    say: Callable[[str], None],
) -> None:
    """Measure every document at every length, except the rows that the file already has."""
    longest = max(lengths)
    chosen = choose_documents(store, longest, documents)
    if len(chosen) < documents:
        say(f"{len(chosen)} documents of the store have {longest:,} tokens, not {documents}")

    def rows_of(batch: Sequence[Stretch]) -> Iterator[Row]:
        losses = token_losses([stretch.tokens.tolist() for stretch in batch])
        return (measure(stretch, np.asarray(loss), last) for stretch, loss in zip(batch, losses, strict=True))

    for length in sorted(lengths):
        group = list(stretches(store, chosen, length, longest))
        missing = file.missing(group)
        file.measure(missing, batch_size, rows_of)
        say(f"{length:,} tokens: {len(group)} documents, {len(missing)} of them new")


class Loss(NamedTuple):
    """The mean loss of some tokens."""

    nats: float
    tokens: int
    bits_per_byte: float
    """Bits per byte, from the store's bytes per trained token."""

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats, 700.0))


def by_context(rows: Sequence[Row], bytes_per_token: float) -> dict[int, Loss]:
    """Return the loss of the same last tokens by length of context, without lengths that have no counted token."""
    return _mean_losses([(row["length"], row["last_nats"], row["last_tokens"]) for row in rows], bytes_per_token)


def by_position(rows: Sequence[Row], bytes_per_token: float) -> dict[int, Loss]:
    """Return the loss, at the longest context, of the tokens at positions k to 2k - 1, by k, which is a power of
    two."""
    longest = max(row["length"] for row in rows)
    bins = [enumerate(zip(row["bin_nats"], row["bin_tokens"], strict=True)) for row in rows if row["length"] == longest]
    return _mean_losses([(2**k, *sums) for of_row in bins for k, sums in of_row], bytes_per_token)


def _mean_losses(sums: Sequence[tuple[int, float, int]], bytes_per_token: float) -> dict[int, Loss]:
    """Add up the entries (key, nats, tokens) of each key, and divide nats by tokens; keys without tokens are left
    out."""
    losses = {}
    for key in sorted({key for key, _, _ in sums}):
        nats = sum(nats for other, nats, _ in sums if other == key)
        if tokens := sum(tokens for other, _, tokens in sums if other == key):
            losses[key] = Loss(nats / tokens, tokens, nats / tokens / math.log(2) / bytes_per_token)
    return losses
