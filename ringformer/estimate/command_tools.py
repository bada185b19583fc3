"""What the verbs of estimates share: an exit code, lines for a waiting person, what an answer is of."""

import sys
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringformer.estimate.targets import Target

DOES_NOT_FIT = 3
"""The exit code of `--require_fit`."""


def log(line: str) -> None:
    """Say what is being done, on stderr."""
    print(line, file=sys.stderr, flush=True)


def origin(model: str, target: "Target") -> dict[str, Any]:
    """What an estimate is of, a preset or a config's file, and what it was made with."""
    import ringformer
    from ringformer.estimate.targets import compiler_versions

    try:
        own: str | None = ringformer.__version__
    except PackageNotFoundError:  # a clone that is not installed
        own = None
    versions = {"ringformer": own} | compiler_versions(target)
    return {"model": model, "target": target.name, "versions": versions}
