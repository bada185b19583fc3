"""Helpers shared by the estimating commands: exit code, progress lines, and the provenance of an estimate."""

import sys
from importlib.metadata import PackageNotFoundError
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringformer.estimate.targets import Target

DOES_NOT_FIT = 3
"""Exit code of `--require_fit` when something does not fit."""


def log(line: str) -> None:
    """Print a progress line to stderr."""
    print(line, file=sys.stderr, flush=True)


def origin(model: str, target: "Target") -> dict[str, Any]:
    """Return the model (a preset or a config's file), the target and the versions behind an estimate."""
    import ringformer
    from ringformer.estimate.targets import compiler_versions

    try:
        own: str | None = ringformer.__version__
    except PackageNotFoundError:  # a clone that is not installed
        own = None
    versions = {"ringformer": own} | compiler_versions(target)
    return {"model": model, "target": target.name, "versions": versions}
