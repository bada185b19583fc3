"""Packages of the extra `data`, which the op and the model do without: imported where they are used, or named."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed_for(purpose: str) -> Iterator[None]:
    """Context for imports: a package that is not installed is a ValueError that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{purpose} needs the package {error.name}: pip install -e '.[data]' in the clone of ringformer"
        ) from error
