"""Losses of the same last tokens of documents, with contexts of several lengths, and losses by position."""

from collections.abc import Sequence

import numpy as np

from ringformer.evals.case_file import Row
from ringformer.evals.perplexity import losses
from ringformer.evals.perplexity.losses import Documents, Loss, Stretch, mean_loss
from ringformer.evals.tables import grouped

LAST = "last"
"""Name of the sums over the last tokens."""


def check(lengths: Sequence[int], last: int) -> None:
    """Raise ValueError if the shortest context has fewer than `last` tokens to predict."""
    if not 1 <= last < min(lengths):
        raise ValueError(f"--last={last} tokens must be at least 1, and fewer than the {min(lengths)} of a context")


def stretch(documents: Documents, document: int, length: int, longest: int) -> Stretch:
    """Return the stretch of `length` tokens that ends where one of `longest` tokens from the document's first ends, so
    that all lengths end at the same token."""
    end = longest - len(documents.begin)
    return documents.stretch(length, document, longest - length, end)


def parts(stretch: Stretch, last: int) -> dict[str, np.ndarray]:
    """Return masks of the tokens but the first: the last ones, and those at positions k to 2k - 1, by k, a power of
    two."""
    positions = np.arange(1, len(stretch.tokens))
    powers = np.log2(positions).astype(int)
    at = {str(2**power): powers == power for power in range(powers[-1] + 1)}
    return {LAST: positions >= len(stretch.tokens) - last} | at


def check_row(row: Row) -> None:
    """Raise ValueError, KeyError or TypeError for a row that was not written with these parts."""
    losses.check_row(row, LAST)
    tokens = [part[1] for name, part in row["sums"].items() if name not in (losses.ALL, LAST)]
    if sum(tokens) != row["sums"][losses.ALL][1]:
        raise ValueError("the tokens by position are not all tokens")


def by_position(rows: Sequence[Row]) -> dict[int, Loss]:
    """Return the loss, at the longest context, of the tokens at positions k to 2k - 1, by k, without those that have no
    counted token."""
    by_length = grouped(rows, "length")
    longest = max(by_length)
    means = {}
    for power in range(longest.bit_length()):
        loss = mean_loss(by_length[longest], str(2**power))
        if loss.tokens:
            means[2**power] = loss
    return means
