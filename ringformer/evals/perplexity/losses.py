"""Losses of stretches of documents: their rows in a file of cases, and their means with intervals over documents."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ringformer.data.stores.token_store import TokenStore
from ringformer.evals.case_file import Row
from ringformer.evals.intervals import bootstrap
from ringformer.evals.tables import grouped
from ringformer.files.hashes import content_hash

ROUNDING = 1e-3
"""Tolerance, in nats, for sums of the same losses in a different order."""
ALL = "all"
"""Name of the sums over all counted tokens of a stretch."""

TokenLosses = Callable[[Sequence[Sequence[int]]], Sequence[np.ndarray]]
"""Function that computes, for each row of tokens, -log p in nats of every token except the first, float [len(row) - 1],
as `ringformer.inference.generator.Generator.token_losses` does."""


class Stretch(NamedTuple):
    """Tokens of a document that are read together, and a mask of the tokens that count."""

    length: int
    """Context in tokens, as in --lengths."""
    document: int
    start: int
    """Number of the first token within its document."""
    tokens: np.ndarray
    """Token ids, int [T] with T <= length: those with which every text of the model begins, and the document's."""
    counted: np.ndarray
    """Mask of the tokens whose loss counts, bool [T]; the first entry is not used."""

    @property
    def key(self) -> str:
        return json.dumps([self.length, self.document, self.start])

    @property
    def prompt_hash(self) -> str:
        return content_hash(self.tokens.astype("<i8").tobytes())


class Documents(NamedTuple):
    """Documents of a store, as a model reads them."""

    store: TokenStore
    begin: list[int]
    """Tokens with which every text of the model begins: a BOS token, or none."""
    byte_lengths: np.ndarray
    """Bytes of the text of each token id."""

    def choose(self, longest: int, count: int, say: Callable[[str], None]) -> list[int]:
        """Return the numbers of up to `count` documents of at least `longest` tokens, spread evenly over the store; say
        if there are fewer. Raises ValueError if there are none."""
        lengths = np.diff(np.asarray(self.store.offsets)) - self._added
        enough = np.flatnonzero(lengths >= longest)
        if not enough.size:
            raise ValueError(
                f"{self.store.path} has no document of {longest:,} tokens, the longest has {lengths.max(initial=0):,}: "
                "choose shorter --lengths, or a store of longer documents"
            )
        if enough.size < count:
            say(f"{enough.size} documents of the store have {longest:,} tokens, not {count}")
        chosen = np.linspace(0, enough.size - 1, min(count, enough.size)).round().astype(int)
        return enough[chosen].tolist()

    def tokens(self, document: int) -> int:
        """Return the number of tokens of a document, without a BOS token that the store's preparation added."""
        return int(self.store.offsets[document + 1] - self.store.offsets[document]) - self._added

    @property
    def _added(self) -> int:
        """Number of tokens that the store's preparation put before each document. The model's own take their place."""
        return int(self.store.begins_documents)

    def stretch(self, length: int, document: int, start: int, end: int, first: int = 0) -> Stretch:
        """Return the tokens from `start` to `end` of a document, after the tokens with which every text begins.

        Args:
          start, end: counted without a BOS token that the store's preparation added, as in `tokens`.
          first: the first token of the document whose loss counts; those that the store does not train on never do.
        """
        offset = int(self.store.offsets[document]) + self._added
        tokens = np.asarray(self.store.tokens[offset + start : offset + end]).astype(np.int64)
        counted = np.arange(start, end) >= first
        if self.store.mask is not None:
            counted &= np.asarray(self.store.mask[offset + start : offset + end]) > 0
        begin = [] if tokens[:1].tolist() == self.begin else self.begin
        return Stretch(
            length,
            document,
            start,
            np.concatenate([np.array(begin, np.int64), tokens]),
            np.concatenate([np.zeros(len(begin), bool), counted]),
        )

    def row(self, stretch: Stretch, losses: np.ndarray, parts: Mapping[str, np.ndarray]) -> Row:
        """Make the row of a stretch: sums of nats, tokens and bytes of its counted tokens and of parts of them.

        Args:
          losses: nats of every token but the first, float [T - 1]. parts: masks of tokens by name, bool [T - 1].

        Raises FloatingPointError for a loss that is not finite.
        """
        if not np.isfinite(losses).all():
            raise FloatingPointError(
                f"document {stretch.document}: a loss is not finite in {len(stretch.tokens):,} tokens from token "
                f"{stretch.start:,}"
            )
        sums = {}
        for name, part in ({ALL: np.ones(len(losses), bool)} | dict(parts)).items():
            chosen = part & stretch.counted[1:]
            text_bytes = int(self.byte_lengths[stretch.tokens[1:][chosen]].sum())
            sums[name] = [float(losses[chosen].sum(dtype=np.float64)), int(chosen.sum()), text_bytes]
        return {
            "key": stretch.key,
            "prompt_hash": stretch.prompt_hash,
            "length": stretch.length,
            "document": stretch.document,
            "start": stretch.start,
            "sums": sums,
        }


def check_row(row: Row, *parts: str) -> None:
    """Raise ValueError, KeyError or TypeError for a row whose numbers show that `Documents.row` cannot have written it
    with these parts."""
    if row["key"] != json.dumps([row["length"], row["document"], row["start"]]):
        raise ValueError("the key belongs to another row")
    if not {ALL, *parts} <= row["sums"].keys():
        raise ValueError("a part is missing")
    nats, tokens, text_bytes = row["sums"][ALL]
    if tokens > row["length"] or not math.isfinite(nats):
        raise ValueError("more tokens than the context has, or a loss that is not finite")
    for part_nats, part_tokens, part_bytes in row["sums"].values():
        if not -ROUNDING <= part_nats <= nats + ROUNDING:
            raise ValueError("the nats of a part exceed those of all tokens")
        if not (0 <= part_tokens <= tokens and 0 <= part_bytes <= text_bytes):
            raise ValueError("a part has more tokens or bytes than all")


class Loss(NamedTuple):
    """Mean loss of some tokens of some documents."""

    nats: float
    """NaN if there is no such token."""
    tokens: int
    share: float
    """Share of these tokens among all counted ones."""
    bits_per_byte: float
    """Bits per byte of the text of these tokens; NaN if they have no text."""
    documents: int
    interval: tuple[float, float] | None
    """95% interval of the nats by a bootstrap over documents; None if there are fewer than two."""

    @property
    def perplexity(self) -> float:
        return _exp(self.nats)


def mean_loss(rows: Sequence[Row], part: str) -> Loss:
    """Return the mean loss, over all rows, of the tokens of a part."""
    by_document = []
    for of_document in grouped(rows, "document").values():
        of_part = [row["sums"].get(part, (0, 0, 0)) for row in of_document]
        by_document.append(np.sum(of_part, axis=0))
    sums = np.array(by_document)
    nats, tokens, text_bytes = sums[sums[:, 1] > 0].T
    whole = sum(row["sums"][ALL][1] for row in rows)
    share = tokens.sum() / whole if whole else 0.0
    mean = _ratio(nats.sum(), tokens.sum())
    bits = _ratio(nats.sum(), text_bytes.sum() * math.log(2))
    interval = bootstrap(nats, tokens) if len(tokens) > 1 else None
    return Loss(mean, int(tokens.sum()), share, bits, len(tokens), interval)


def _ratio(nats: float, number: float) -> float:
    """Return the nats per unit; NaN if there is none."""
    return float(nats / number) if number else math.nan


def losses_by_context(rows: Sequence[Row], part: str) -> dict[int, Loss]:
    """Return the mean loss of a part by context."""
    return {length: mean_loss(group, part) for length, group in grouped(rows, "length").items()}


def loss_table(losses: Mapping[int, Loss]) -> str:
    """Tabulate losses by a number of tokens, with 95% intervals of the perplexity."""
    text = [f"{'':>12} documents       tokens    share     nats  bits/byte  perplexity  95% interval"]
    for key, loss in losses.items():
        ends = "-"
        if loss.interval is not None:
            low, high = loss.interval
            ends = f"{_exp(low):,.3f}-{_exp(high):,.3f}"
        text.append(
            f"{key:>12,} {loss.documents:>9} {loss.tokens:>12,} {loss.share:>8.2%} {loss.nats:>8.4f} "
            f"{loss.bits_per_byte:>10.4f} {loss.perplexity:>11,.3f}  {ends:>12}"
        )
    return "\n".join(text)


def _exp(nats: float) -> float:
    return math.exp(min(nats, 700.0))
