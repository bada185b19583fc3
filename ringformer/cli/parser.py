"""Types of options that name a file to write."""

import argparse
import os
from pathlib import Path


def output_file(text: str, option: str = "--out") -> Path:
    """Return the path of a file to write after long work, checked in advance without changing the file.

    Raises ValueError if it could not be written.
    """
    if not text:
        raise ValueError(f"{option}= names no file; name one, or omit {option}")
    path, flag = Path(text), f"{option}={text}"
    if path.is_dir():
        raise ValueError(f"{flag} is a folder; name a file in it, e.g. {path / 'out.json'}")
    if not path.parent.is_dir():
        raise ValueError(f"{flag}: there is no folder {path.parent}; create it, or choose another")
    existed = os.path.lexists(path)
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{flag} cannot be written ({error.strerror}); choose another folder") from None
    if not existed:
        path.unlink()
    return path


def output_argument(text: str) -> Path:
    """Call `output_file` as the `type` of an option of a plain argparse parser; also checks the default."""
    try:
        return output_file(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
