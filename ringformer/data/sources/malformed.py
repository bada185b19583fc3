"""Records and files that cannot be read: the first is an error or, if asked, all are skipped, counted and named."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SKIP = "--skip_malformed (for a run: --config.data.skip_malformed=True)"
"""Options that skip and count what cannot be read."""


class MalformedRecord(ValueError):
    """Fault of one record. Reports count faults by their `reason`."""

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


@dataclass
class Malformed:
    """Handler of records that cannot be read: raises an error naming the first such record or, with `skip`, counts
    them.
    """

    skip: bool
    suggest: Callable[[dict[str, Any]], str] = lambda record: ""
    """Returns advice on how a record could be read; empty without any."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of records, lines and files left out, by reason."""
    files: dict[str, list[str]] = field(default_factory=dict)
    """Names of the files left out, by reason."""
    first: str = ""
    """Fault of the first record that was skipped."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # rows of tokens are encoded in two threads

    @property
    def count(self) -> int:
        """Number of records skipped."""
        return sum(number for reason, number in self.counts.items() if reason.startswith("records skipped: "))

    def __call__(self, message: str, reason: str, record: dict[str, Any] | None = None) -> None:
        """Raise ValueError for a record that cannot be read; with `skip`, count it by its reason.

        Args:
          record: a record of another shape: the error says how it could be read instead.
        """
        whole = message
        if record is not None and not (self.skip and self.first):
            advice = self.suggest(record)
            if advice:
                whole += f". {advice}"
        if not self.skip:
            raise ValueError(f"{whole}. Repair it, or skip and count such records: {SKIP}")
        with self._lock:
            self.counts[f"records skipped: {reason}"] += 1
            self.first = self.first or whole

    def blank_line(self) -> None:
        """Count a line without a record."""
        self.counts["blank lines skipped"] += 1

    def leave_out_file(self, name: str, reason: str) -> None:
        """Count and name a file that is left out."""
        self.counts[f"files skipped: {reason}"] += 1
        self.files.setdefault(reason, []).append(name)
