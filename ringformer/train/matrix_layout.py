"""Dimensions of a parameter that are the rows of a matrix, and those that are its columns."""

from typing import NamedTuple

HEADS = "HK"
"""Shape letters of query heads and key heads."""

OF_A_HEAD = "d"
"""Shape letter of the features of a head."""


class MatrixLayout(NamedTuple):
    """Dimensions of a parameter as one matrix, counted from the end: dimensions before them stack layers, each of which
    has its own matrix."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    """None for a vector, which is a matrix of one column."""


def is_matrix(letters: str) -> bool:
    """Return True for the shape letters of a matrix, not of a vector: vectors have one letter, or those of heads and
    their features alone (biases, norms over all heads)."""
    return len(letters) > 1 and not set(letters) <= {*HEADS, *OF_A_HEAD}


def matrix_layout(letters: str) -> MatrixLayout:
    """Return the layout of a parameter by its shape letters. The last dimension is the columns; heads and their
    features stay together, so a projection from D to heads, "DHd", has rows D and columns Hd."""
    dims = tuple(range(-len(letters), 0))
    if not is_matrix(letters):
        return MatrixLayout(dims, ())
    columns = 1
    if letters[-1] in OF_A_HEAD and letters[-2] in HEADS:
        columns = 2
    return MatrixLayout(dims[:-columns], dims[-columns:])
