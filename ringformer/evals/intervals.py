"""95% intervals of means: Wilson's for independent cases, and a bootstrap over documents for cases that share one."""

from collections.abc import Sequence
from math import sqrt

import numpy as np


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95% interval for a share of `count` right or wrong cases: 50 of 50 gives 92.9 to 100%."""
    z = 1.959964  # 97.5% of a normal distribution
    middle = share + z**2 / (2 * count)
    spread = z * sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    whole = 1 + z**2 / count
    return max(0.0, (middle - spread) / whole), min(1.0, (middle + spread) / whole)


def bootstrap(totals: Sequence[float], counts: Sequence[float], resamples: int = 2000) -> tuple[float, float]:
    """Return a 95% interval of sum(totals) / sum(counts) by a bootstrap over documents: the 2.5th and 97.5th percentile
    of this mean over samples of as many documents, drawn with replacement (Efron and Tibshirani 1993, chapter 13).

    It allows for items of one document that are alike, which intervals for independent items do not. The draws are
    always the same.

    Args:
      totals: sum over the items of each document, for example nats. counts: number of its items, at least one in all.

    Raises ValueError for fewer than two documents: they say nothing about the variation between documents.
    """
    if len(totals) < 2:
        raise ValueError("a bootstrap needs at least two documents")
    drawn = np.random.default_rng(0).integers(len(totals), size=(resamples, len(totals)))
    sums, items = (np.asarray(x, np.float64)[drawn].sum(axis=1) for x in (totals, counts))
    low, high = np.percentile(sums[items > 0] / items[items > 0], (2.5, 97.5))
    return float(low), float(high)
