"""Mixtures: sequences of several stores in fixed shares, each store packed for itself.

Which store sequence `index` comes from is periodic in the index: the shares are w_1 : w_2 : ... in whole numbers, and
w_1 + w_2 + ... sequences make a period. Within it Tijdeman's algorithm (The chairman assignment problem, 1980) keeps
every store within 1 - 1/(2k-2) sequences of its share at any point, for k stores. A window of any length hence differs
from its share by at most 1 sequence with two stores, and by less than 2 with more. The seed says where the period
begins.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from ringformer.data.packing.sequences import Batch, StoreSequences
from ringformer.data.stores.folder import check_folder
from ringformer.data.stores.token_store import TokenStore

LONGEST_PERIOD = 10_000


def parse_mixture(text: str) -> list[tuple[str, int]]:
    """The stores and their shares, in whole numbers, of a mixture such as "stores/chat:7,stores/long:3"."""
    parts = []
    for part in text.split(","):
        path, _, weight = part.strip().rpartition(":")
        try:
            share = Fraction(weight)
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if not path or share <= 0:
            raise ValueError(f"mixture part {part!r} is not STORE:WEIGHT with a weight above 0, as in stores/chat:7")
        parts.append((path, share))
    paths = [path for path, _ in parts]
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        raise ValueError(f"mixture {text!r} names {', '.join(twice)} twice; add the weights up")
    denominator = math.lcm(*(share.denominator for _, share in parts))
    shares = [int(share * denominator) for _, share in parts]
    common = math.gcd(*shares)
    shares = [share // common for share in shares]
    if sum(shares) > LONGEST_PERIOD:
        raise ValueError(
            f"mixture {text!r} has shares {shares}, a period of {sum(shares)} sequences; round the "
            f"weights, so that it is at most {LONGEST_PERIOD}"
        )
    return list(zip(paths, shares, strict=True))


def open_mixture(
    text: str, tokenizer: str, held_out: bool
) -> tuple[list[tuple[TokenStore, int]], list[tuple[TokenStore, int]] | None]:
    """The train and the eval stores of a mixture's folders, as lists of (TokenStore, share).

    Args:
      text: see `parse_mixture`; the folders are those that `build_stores` makes.
      tokenizer: the name that all stores must have been built with.
      held_out: whether eval stores are wanted; the second list is None otherwise.
    """
    parts = parse_mixture(text)
    for path, _ in parts:
        if held_out and not (Path(path) / "eval" / "store.json").is_file():
            raise FileNotFoundError(
                f"{path} has no eval store for the mixture: build it with a held_out share, or set data.held_out=0 to "
                "train without evaluation"
            )
    train = [(TokenStore(Path(path) / "train"), share) for path, share in parts]
    evaluation = [(TokenStore(Path(path) / "eval"), share) for path, share in parts] if held_out else None
    for path, _ in parts:
        check_folder(Path(path))
    for store, _ in train + (evaluation or []):
        if store.meta["tokenizer"] != tokenizer:
            raise ValueError(
                f"{store.path} was built with tokenizer {store.meta['tokenizer']}, not {tokenizer}: "
                "name its tokenizer as data.tokenizer, or rebuild it"
            )
    return train, evaluation


def schedule(shares: Sequence[int]) -> np.ndarray:
    """The part that each sequence of a period comes from, int64 [sum(shares)]."""
    k, total = len(shares), sum(shares)
    slack = max(2 * k - 2, 1)
    counts, order = [0] * k, []
    for n in range(1, total + 1):
        # Those that are due by more than 1/slack of a sequence; first the one that will be overdue soonest.
        due = [c for c in range(k) if slack * (n * shares[c] - counts[c] * total) >= total]
        chosen = min(due, key=lambda c: Fraction(slack * (counts[c] + 1) - 1, shares[c])) if k > 1 else 0
        counts[chosen] += 1
        order.append(chosen)
    return np.array(order)


class Mixture:
    """Packed sequences of several parts in the given shares; a function of (seed, index) like each part's.

    Attributes:
      parts: the sequences that are mixed: all `DocumentStream` or all `WholeDocuments`, of one packed_attention.
      per_epoch: sequences before any part begins anew.
    """

    def __init__(self, parts: Sequence[StoreSequences], shares: Sequence[int], seed: int):
        self.parts = list(parts)
        self.shares = list(shares)
        period = schedule(shares)
        self._period = np.roll(period, -np.random.Generator(np.random.Philox(key=seed)).integers(len(period)))
        self._earlier = np.empty(len(period), np.int64)  # how many of the period's before come from the same part
        for part, share in enumerate(shares):
            self._earlier[self._period == part] = np.arange(share)
        self.per_epoch = min(self._until(part, packed.per_epoch) for part, packed in enumerate(self.parts))

    def source(self, index: int) -> tuple[int, int]:
        """The part that sequence `index` comes from, and its index there."""
        if index < 0:
            raise ValueError(f"sequence {index} does not exist; they are counted from 0")
        periods, at = divmod(index, len(self._period))
        part = int(self._period[at])
        return part, periods * self.shares[part] + int(self._earlier[at])

    def read(self, index: int, positions: np.ndarray) -> Batch:
        """See `StoreSequences.read`."""
        part, index = self.source(index)
        return self.parts[part].read(index, positions)

    @property
    def has_segments(self) -> bool:
        """See `StoreSequences`."""
        return self.parts[0].has_segments

    @property
    def bytes_read(self) -> int:
        return sum(part.bytes_read for part in self.parts)

    @property
    def masked(self) -> bool:
        """Whether all parts have tokens that are not trained on."""
        return all(part.masked for part in self.parts)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text that a token stands for, in the mean over the mixture."""
        return float(np.average([part.bytes_per_token for part in self.parts], weights=self.shares))

    def _until(self, part: int, count: int) -> int:
        """The index of the sequence that would be number `count` of the part."""
        periods, rest = divmod(count, self.shares[part])
        return periods * len(self._period) + int(np.flatnonzero(self._period == part)[rest])
