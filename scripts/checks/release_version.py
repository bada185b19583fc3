"""Check that the package, the citation and the changelog name the version of a tag.

    python scripts/checks/release_version.py vX.Y.Z [REPOSITORY]

Prints a line for each file that names another version, and ends with exit code 1 if there is one.
"""

import re
import sys
from pathlib import Path

FORM_OF_TAG = re.compile(r"v(\d+\.\d+\.\d+)")


def lines_of_release(version: str) -> dict[str, str]:
    """Return the pattern of the line that each file needs for a version."""
    number = re.escape(version)
    return {
        "pyproject.toml": rf'^version = "{number}"',
        "CITATION.cff": rf"^version: {number}$",
        "CHANGELOG.md": rf"^## \[{number}\] - \d{{4}}-\d\d-\d\d$",
    }


def mistakes(tag: str, repository: Path) -> list[str]:
    """Return a sentence for everything that does not match the tag; an empty list if all of it does."""
    match = FORM_OF_TAG.fullmatch(tag)
    if match is None:
        return [f"the tag {tag} must have the form vX.Y.Z"]
    sentences = []
    for name, line in lines_of_release(match[1]).items():
        if not re.search(line, (repository / name).read_text(), re.MULTILINE):
            sentences.append(f"{name} has no line of version {match[1]}: {line}")
    return sentences


def main() -> int:
    tag = sys.argv[1]
    repository = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(".")
    sentences = mistakes(tag, repository)
    for sentence in sentences:
        print(f"release_version.py: {sentence}", file=sys.stderr)
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
