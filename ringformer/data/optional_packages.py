"""Optional packages of extras: imported where they are used, with a clear error if missing."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed_for(purpose: str, extra: str = "data") -> Iterator[None]:
    """Context for imports that turns a missing package into a ValueError with the command to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"{purpose} needs the package {error.name}: pip install 'ringformer[{extra}]'") from error
