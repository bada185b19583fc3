"""Mixtures: sequences of several stores in fixed shares; each store is packed separately.

The store of sequence `index` is periodic in the index: for integer shares w_1 : w_2 : ..., a period has w_1 + w_2 + ...
sequences. Within it, Tijdeman's algorithm (The chairman assignment problem, 1980) keeps every one of k stores within
1 - 1/(2k-2) sequences of its share at any point. A window of any length therefore deviates from the shares by at most 1
sequence with two stores, and by less than 2 sequences with more stores. The seed decides where the period begins.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from ringformer.data.packing.sequences import Batch, StoreSequences
from ringformer.data.stores.beginning import check_same_beginning
from ringformer.data.stores.folder import check_folder
from ringformer.data.stores.token_store import TokenStore

LONGEST_PERIOD = 10_000


def parse_mixture(text: str) -> list[tuple[str, int]]:
    """Parse a mixture such as "stores/chat:7,stores/long:3" into stores and integer shares."""
    paths: list[str] = []
    shares: list[Fraction] = []
    multiple = 1
    for part in text.split(","):
        path, _, weight = part.strip().rpartition(":")
        try:
            share = Fraction(weight)
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if not path or share <= 0:
            raise ValueError(f"mixture part {part!r} is not STORE:WEIGHT with a weight above 0, as in stores/chat:7")
        paths.append(path.rstrip("/"))
        shares.append(share)
        multiple = math.lcm(multiple, share.denominator)
    twice = {path for path in paths if paths.count(path) > 1}
    if twice:
        raise ValueError(f"mixture {text!r} names {', '.join(sorted(twice))} twice; add up the weights")
    whole = _in_lowest_terms([int(share * multiple) for share in shares])
    if sum(whole) > LONGEST_PERIOD:
        raise ValueError(
            f"mixture {text!r} has shares {whole}, a period of {sum(whole)} sequences; round the weights to make it "
            f"at most {LONGEST_PERIOD}"
        )
    return list(zip(paths, whole, strict=True))


def _in_lowest_terms(shares: Sequence[int]) -> list[int]:
    """Return the same shares without a common factor."""
    common = math.gcd(*shares)
    return [share // common for share in shares]


def integer_shares(amounts: Sequence[float] | Sequence[Fraction], period: int) -> list[int]:
    """Return whole shares of at least 1 in proportion to the amounts, rounded to 1/`period`."""
    total = sum(amounts)
    return _in_lowest_terms([max(round(period * amount / total), 1) for amount in amounts])


def open_mixture(
    text: str, tokenizer: str, held_out: bool
) -> tuple[list[tuple[TokenStore, int]], list[tuple[TokenStore, int]] | None]:
    """Open the train and eval stores of a mixture's folders, as lists of (TokenStore, share).

    Args:
      text: see `parse_mixture`; `build_stores` makes the folders.
      tokenizer: the name of the tokenizer that all stores must have.
      held_out: True to open eval stores; otherwise the second list is None.
    """
    parts = parse_mixture(text)
    for path, _ in parts:
        if held_out and not (Path(path) / "eval" / "store.json").is_file():
            raise FileNotFoundError(
                f"{path} has no eval store for the mixture: build it with a held_out share, or set data.held_out=0 to "
                "train without evaluation"
            )
    trained = _open_stores(parts, "train")
    evaluated = None
    if held_out:
        evaluated = _open_stores(parts, "eval")
    for path, _ in parts:
        check_folder(Path(path))
    for store, _ in (*trained, *(evaluated or ())):
        if store.meta["tokenizer"] != tokenizer:
            raise ValueError(
                f"{store.path} was built with tokenizer {store.meta['tokenizer']}, not {tokenizer}: "
                "set data.tokenizer to its tokenizer, or rebuild it"
            )
    check_same_beginning([store for store, _ in trained])
    return trained, evaluated


def _open_stores(parts: Sequence[tuple[str, int]], name: str) -> list[tuple[TokenStore, int]]:
    """Open the store `name` of each folder, with the folder's share."""
    return [(TokenStore(Path(path) / name), share) for path, share in parts]


def sequences_for_tokens(shares: Sequence[int], parts: Sequence[StoreSequences]) -> list[int]:
    """Return shares of sequences with which the tokens of text of the parts have the given shares, to 1/10,000."""
    tokens = {part.tokens_per_sequence for part in parts}
    if len(tokens) == 1:
        return _in_lowest_terms(shares)
    sequences = []
    for share, part in zip(shares, parts, strict=True):
        sequences.append(Fraction(share) / Fraction(part.tokens_per_sequence))
    return integer_shares(sequences, LONGEST_PERIOD)


def schedule(shares: Sequence[int]) -> np.ndarray:
    """Assign each sequence of a period to a part, int64 [sum(shares)]."""
    k = len(shares)
    total = sum(shares)
    if k == 1:
        return np.zeros(total, np.int64)
    slack = 2 * k - 2
    counts = [0] * k
    order = []
    for n in range(1, total + 1):
        # Parts that are behind their share by at least 1/slack of a sequence; the part that will be overdue first goes
        # first.
        due = [c for c in range(k) if slack * (n * shares[c] - counts[c] * total) >= total]
        chosen = min(due, key=lambda c: Fraction(slack * (counts[c] + 1) - 1, shares[c]))
        counts[chosen] += 1
        order.append(chosen)
    return np.array(order)


class Turns:
    """Turns of several parts in the given shares, as a function of (seed, index)."""

    def __init__(self, shares: Sequence[int], seed: int):
        self.shares = shares
        period = schedule(shares)
        self._period = np.roll(period, -np.random.Generator(np.random.Philox(key=seed)).integers(len(period)))
        self._earlier = np.empty(len(period), np.int64)  # number of earlier turns of the period of the same part
        for part, share in enumerate(shares):
            self._earlier[self._period == part] = np.arange(share)

    def source(self, index: int) -> tuple[int, int]:
        """Return the part that has turn `index`, and the number of its turns before."""
        if index < 0:
            raise ValueError(f"sequence {index} does not exist; they are counted from 0")
        periods, at = divmod(index, len(self._period))
        part = int(self._period[at])
        return part, periods * self.shares[part] + int(self._earlier[at])

    def until(self, part: int, count: int) -> int:
        """Return the index of the part's turn number `count`."""
        periods, rest = divmod(count, self.shares[part])
        return periods * len(self._period) + int(np.flatnonzero(self._period == part)[rest])

    def until_any(self, counts: Sequence[int]) -> int:
        """Return the first index at which a part has its turn number `counts[part]`."""
        return min(self.until(part, count) for part, count in enumerate(counts))


class Mixture:
    """Packed sequences of several parts in the given shares. Like the sequences of each part, they are a function of
    (seed, index).

    Attributes:
      parts: the sequences to mix: all `DocumentStream` or all `WholeDocuments`, with the same packed_attention.
      per_epoch: number of sequences before any part repeats.
    """

    def __init__(self, parts: Sequence[StoreSequences], shares: Sequence[int], seed: int):
        self.parts = parts
        self.shares = shares
        self._turns = Turns(shares, seed)
        self.per_epoch: int = self._turns.until_any([part.per_epoch for part in parts])

    def source(self, index: int) -> tuple[int, int]:
        """Return the part that sequence `index` comes from, and the sequence's index in that part."""
        return self._turns.source(index)

    def documents_of(self, index: int) -> tuple[TokenStore, np.ndarray]:
        """Return the store of sequence `index`, and the numbers of its documents in the store, in order, int64."""
        part, index = self.source(index)
        return self.parts[part].store, self.parts[part].documents_of(index)

    def passes(self, sequences: int) -> dict[str, float]:
        """Count the passes that so many sequences make through each store's selected documents, by store's folder."""
        parts = zip(self.parts, self.shares, strict=True)
        each = sequences / sum(self.shares)
        return {str(part.store.path): each * own / part.per_epoch for part, own in parts}

    @property
    def selections(self) -> Sequence[StoreSequences]:
        """Sequences of all selected documents of each store."""
        return self.parts

    @property
    def share_by_halvings(self) -> dict[int, float]:
        """Share of the batches by how often their sequences are halved: none is."""
        return {0: 1.0}

    def halvings(self, step: int) -> int:
        """Return how often the sequences of a step are halved: never."""
        return 0

    def read(self, index: int, positions: np.ndarray) -> Batch:
        """See `StoreSequences.read`."""
        part, index = self.source(index)
        return self.parts[part].read(index, positions)

    @property
    def bytes_read(self) -> int:
        return sum(part.bytes_read for part in self.parts)

    @property
    def masked(self) -> bool:
        """True if every part's store has tokens that are not trained on, as in chats."""
        return all(part.store.mask is not None for part in self.parts)

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes of text per token over the mixture."""
        of_parts = [part.bytes_per_token for part in self.parts]
        return float(np.average(of_parts, weights=self.shares))
