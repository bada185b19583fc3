"""The cycles of machine code that was read once, kept on disk for the estimates that follow."""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ringformer.estimate.targets import Target, compiler_versions


@dataclass(frozen=True)
class KernelCache:
    """Cycles by `KernelKeys.key`, of one generation of TPU and one version of its compiler.

    In $XDG_CACHE_HOME/ringformer/kernels, or ~/.cache; a file that cannot be read is one that knows nothing. None
    stands for an instruction that was looked for and not found.
    """

    path: Path

    @staticmethod
    def of(target: Target) -> "KernelCache":
        """The cache for a target's chip and the installed compiler."""
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        versions = compiler_versions(target)
        return KernelCache(home / "ringformer" / "kernels" / f"{target.generation}-libtpu-{versions['libtpu']}.json")

    def read(self) -> dict[str, float | None]:
        """All that is known."""
        try:
            known = json.loads(self.path.read_text())
            return {str(key): cycles and float(cycles) for key, cycles in known.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def add(self, cycles: dict[str, float | None]) -> dict[str, float | None]:
        """All that is known with these; a cache that cannot be written stays as it is."""
        known = self.read() | cycles
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as part:
                json.dump(known, part)
            os.replace(part.name, self.path)
        except OSError:
            pass
        return known
