"""Files joined into long documents, as their folder or package has them.

Much of what is long in reality is in several files: the modules of a package, the chapters of a book. Joined in the
order of their paths they are one document, in which a line may depend on another file (as in StarCoder 2, section 4.2,
and Qwen2.5-Coder, section 3.2, which pack the files of a repository).
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path, PurePath

from ringformer.data.sources.source_files import INSTALLED

JOINS = ("folder", "package")
"""Joins: the files of one folder become one document; or those of a package, a folder at the top of the source, with
all folders in it."""
OF_FILES = ("text", "stdlib", INSTALLED)
"""Kinds of source whose documents are files."""
WILDCARDS = "*?["


def check_join(join: str, source: str, key: str) -> None:
    """Raise ValueError for a value of the option `join` that is not known, or for a source without files of text."""
    if join and join not in JOINS:
        raise ValueError(f"unknown {key}join {join!r}; known: {', '.join(JOINS)}")
    if join and source.partition(":")[0] not in OF_FILES:
        raise ValueError(f"{key}join={join!r} needs a source of files, {', '.join(OF_FILES)}, not {source}")


def group_of(name: str, source: str, join: str) -> str:
    """Return the name of the document that a file belongs to.

    A file at the top of the source is in no package: it is its own document.
    """
    folder = PurePath(name).parent
    if join == "folder":
        return str(folder)
    top = _top(name, source)
    inside = folder.relative_to(top).parts
    return str(top / inside[0]) if inside else name


def _top(name: str, source: str) -> PurePath:
    """Return the folder of the source that a file is in: what its pattern names before the first wildcard."""
    kind, _, where = source.partition(":")
    if kind == INSTALLED:
        return PurePath(PurePath(name).parts[0])
    if kind != "text":
        return PurePath()
    if Path(where).is_dir():
        return PurePath(where)
    top = PurePath()
    for part in PurePath(where).parts[:-1]:
        if any(wildcard in part for wildcard in WILDCARDS):
            break
        top /= part
    return top


def in_groups(files: Mapping[str, Path], source: str, join: str) -> Mapping[str, Path]:
    """Return the files with those of each document together, and else in their order."""
    if not join:
        return files
    groups: dict[str, dict[str, Path]] = {}
    for name, path in files.items():
        groups.setdefault(group_of(name, source, join), {})[name] = path
    ordered: dict[str, Path] = {}
    for group in groups.values():
        ordered |= group
    return ordered


def joined(texts: Iterable[tuple[str, str]], source: str, join: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each document.

    Args:
      texts: names and texts of files, in the order of `in_groups`. Empty files add nothing.
    """
    for group, files in groupby(texts, key=lambda file: group_of(file[0], source, join)):
        yield group, "\n".join(text for _, text in files if text)
