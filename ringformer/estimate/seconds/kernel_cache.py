"""Disk cache of the cycles read from machine code."""

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ringformer.estimate.targets import Target, compiler_versions


@dataclass(frozen=True)
class KernelCache:
    """Cycles by `KernelKeys.key`, for one generation of TPU and one version of its compiler.

    The file is in $XDG_CACHE_HOME/ringformer/kernels, or in ~/.cache; an unreadable file counts as empty. None marks an
    instruction that was looked for and not found.
    """

    path: Path

    @staticmethod
    def of(target: Target) -> "KernelCache":
        """Return the cache for a target's chip and the installed compiler."""
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        versions = compiler_versions(target)
        return KernelCache(home / "ringformer" / "kernels" / f"{target.generation}-libtpu-{versions['libtpu']}.json")

    def read(self) -> dict[str, float | None]:
        """Return all cached cycles."""
        try:
            cached = json.loads(self.path.read_text())
            return {str(key): cycles and float(cycles) for key, cycles in cached.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def add(self, cycles: dict[str, float | None]) -> dict[str, float | None]:
        """Add these cycles and return all; a cache that cannot be written stays as it is."""
        merged = self.read() | cycles
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as part:
                json.dump(merged, part)
            os.replace(part.name, self.path)
        except OSError:
            pass
        return merged
