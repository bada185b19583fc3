"""Filter of documents by how far gzip compresses them: tables and boilerplate compress far, noise hardly.

OLMo 3 leaves both 20% tails of its long PDFs out (arXiv:2512.13961).
"""

import gzip
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class Between(NamedTuple):
    """Choice of the documents between two tails of a distribution."""

    keep: np.ndarray
    """bool [documents], in the order of the source."""
    low: float
    high: float
    """Smallest and largest ratio of the documents kept."""


def gzip_ratio(text: str) -> float:
    """Return the bytes of a text over its bytes compressed by gzip at level 6."""
    content = text.encode("utf-8", "surrogateescape")
    return len(content) / len(gzip.compress(content, 6))


def between_tails(texts: Iterable[str], tails: float) -> Between:
    """Choose the texts that are not among the share `tails` with the lowest ratio, nor among as many with the
    highest.

    Raises ValueError if none is left.
    """
    ratios = np.array([gzip_ratio(text) for text in texts])
    each = int(tails * len(ratios))
    order = np.argsort(ratios, kind="stable")[each : len(ratios) - each]
    if not each or not len(order):
        what = "drops none" if len(order) else "leaves none"
        raise ValueError(f"compressibility_tails={tails} {what} of {len(ratios)} documents: change it")
    keep = np.zeros(len(ratios), bool)
    keep[order] = True
    return Between(keep, ratios[order[0]], ratios[order[-1]])
