"""JSON that anybody may have written: it is parsed, or refused with a ValueError."""

import json
from collections.abc import Iterable
from typing import Any

MOST_LEVELS = 200
"""Most levels of arrays and objects in one another. Python reads about 1,000 of them, less wherever functions have
called one another, and then raises RecursionError; so may whatever walks, copies, compares or writes the value."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is not JSON, or has more than MOST_LEVELS levels."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise too_deep() from None
    check_levels(value)
    return value


def check_levels(value: Any) -> None:
    """Raise ValueError if a JSON value has more than MOST_LEVELS levels of arrays and objects."""
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = _containers(level)
        if not level:
            return
    raise too_deep()


def too_deep() -> ValueError:
    """Return the error of a value with too many levels."""
    return ValueError(f"its arrays and objects have more than {MOST_LEVELS} levels: write it with fewer")


def _containers(values: Iterable[Any]) -> list[Any]:
    """Return what the arrays and objects among the values hold."""
    held: list[Any] = []
    for value in values:
        if isinstance(value, dict):
            held += value.values()
        elif isinstance(value, list):
            held += value
    return held
