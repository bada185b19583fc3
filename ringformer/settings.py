"""Settings from flags, config files and the files of models: their types, and the numbers that devices can count."""

import reprlib
import sys
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

LARGEST = 2**31 - 1
"""Largest whole number of a setting: devices count in 32 bits."""


def whole_number(text: str) -> int:
    """Return the whole number in a text. Raises ValueError for another text, and for a number beyond 64 bits."""
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"invalid int value: {reprlib.repr(text)}") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{reprlib.repr(number)} is beyond 64 bits: give a smaller number")
    return number


def is_number(value: Any) -> bool:
    """Return True for a finite number that a float can hold; a JSON text may have others."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def check_settings(settings: Any, prefix: str = "", largest: int = LARGEST) -> None:
    """Raise ValueError for a field of a dataclass whose value is not of its type, or is a whole number beyond
    `largest`. A field of floats may have a whole number.

    Only fields of booleans, numbers, texts and dataclasses, or of one of these and None, are checked.

    Args:
      prefix: beginning of the fields' names in errors.
    """
    for field in _declared(settings.__class__):
        value = getattr(settings, field.name)
        if value is None and field.optional:
            continue
        wanted = _wanted(value, field.kind, largest)
        if wanted:
            raise ValueError(f"{prefix}{field.name}={reprlib.repr(value)} must be {wanted}")


def _wanted(value: Any, kind: type, largest: int) -> str:
    """Return what a value should be; empty if it is that."""
    if kind is int:
        if not isinstance(value, int) or isinstance(value, bool):
            return "a whole number"
        if abs(value) > largest:
            return f"at most {largest:,}"
    elif kind is float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return "a number"
        if isinstance(value, int) and not is_number(value):
            return "a number that a float can hold"
    elif not isinstance(value, kind):
        return {bool: "true or false", str: "a text"}.get(kind, f"an object with the fields of {kind.__name__}")
    return ""


class _Declared(NamedTuple):
    """A field to check."""

    name: str
    kind: type
    optional: bool
    """True if it may be None."""


@lru_cache
def _declared(cls: type) -> list[_Declared]:
    """Return the fields of a dataclass to check."""
    types = get_type_hints(cls)
    declared = []
    for field in fields(cls):
        alternatives = get_args(types[field.name]) or (types[field.name],)
        kinds = [kind for kind in alternatives if kind is not NoneType]
        is_checked = len(kinds) == 1 and (kinds[0] in (bool, int, float, str) or is_dataclass(kinds[0]))
        if is_checked:
            declared.append(_Declared(field.name, kinds[0], NoneType in alternatives))
    return declared
