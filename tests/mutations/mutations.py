"""Read the list of mutations: `mutations.diff`.

Each hunk is a piece of the package's text, and the text that replaces it. Its head gives the mutation's name and the
test that must not pass then. A piece need not be a whole line, and may be several:

    +++ a file in ringformer/
    @@ the mutation's name @@ a node id in tests/
    -the old text
    +the new text

The old text must occur once in its file. Keep it short, so that the list outlives edits around it. A hunk that no
longer applies fails the suite, and is then mended together with what moved.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Mutation(NamedTuple):
    """One wrong ringformer."""

    name: str
    file: str
    """In ringformer/."""
    old: str
    new: str
    test: str
    """A node id in tests/."""


def read_mutations(diff: str) -> Iterator[Mutation]:
    """Read the hunks of all files. Raises ValueError for a line that belongs to none."""
    for of_file in diff.strip().split("\n\n"):
        first, *hunks = re.split(r"^@@ ", of_file, flags=re.MULTILINE)
        marker, _, file = first.strip().partition(" ")
        if marker != "+++":
            raise ValueError(f"mutations.diff: {first!r} is not +++ and a file")
        for hunk in hunks:
            head, *lines = hunk.rstrip("\n").split("\n")
            name, _, test = head.partition(" @@ ")
            strange = [line for line in lines if line[:1] not in ("-", "+")]
            if strange or not test:
                raise ValueError(f"mutations.diff: the hunk {head!r} has no test, or strange lines {strange}")
            old = "\n".join(line[1:] for line in lines if line[0] == "-")
            new = "\n".join(line[1:] for line in lines if line[0] == "+")
            yield Mutation(name, file, old, new, test)


MUTATIONS = list(read_mutations(Path(__file__).with_name("mutations.diff").read_text()))
