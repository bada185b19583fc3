"""Shifted positions: short sequences that show a model the distances of long ones (Zhu et al. 2023, PoSE, section 3).

Each document of a sequence is cut once, and the positions behind the cut are shifted. The cut is uniform over the
document's tokens, and the shift over those that keep the positions below the range. Tokens, order and attention do not
change: only the distance across the cut does, so that a model meets every distance below the range.
"""

from typing import NamedTuple

import numpy as np


def check_range(position_range: int, seq_len: int) -> None:
    """Raise ValueError if positions of sequences of `seq_len` tokens cannot be shifted up to a range other than 0."""
    if 0 < position_range <= seq_len:
        raise ValueError(
            f"data.position_range={position_range} must be above seq_len={seq_len}: positions of a sequence are "
            "shifted up to it; set it to the context to extend to, or to 0"
        )


class Shifts(NamedTuple):
    """Cuts and shifts of some documents of a sequence, int64 [k] each."""

    cuts: np.ndarray
    """Number of the first token, in the document, whose position is shifted."""
    shifts: np.ndarray
    """Positions by which the tokens from the cut on are shifted."""


def draw_shifts(documents: np.ndarray, lengths: np.ndarray, position_range: int, random: np.random.Generator) -> Shifts:
    """Return the cuts and shifts of documents of one sequence.

    Args:
      documents: int [k], numbers of the documents in the sequence, from 0.
      lengths: int64 [k], tokens that each has in the sequence.
      position_range: tokens of the context whose positions are shown.
      random: generator of the sequence, whose numbers have not been drawn from: document n always gets the same ones.
    """
    drawn = random.random((int(documents.max()) + 1, 2))[documents]
    inner = np.maximum(lengths - 1, 0)  # a document of one token has no cut
    cuts = 1 + np.floor(drawn[:, 0] * inner).astype(np.int64)
    shifts = np.floor(drawn[:, 1] * (position_range - lengths + 1)).astype(np.int64)
    return Shifts(cuts, shifts)
