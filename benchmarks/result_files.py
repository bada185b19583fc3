"""Files of results: the day of a measurement, and how a file is written."""

import datetime
import json
from pathlib import Path
from typing import Any

from ringformer.files.atomic import write_whole


def today() -> str:
    """Return the date, as files of results have it."""
    return datetime.date.today().isoformat()


def write_results(path: str | Path, content: Any) -> None:
    """Write a file of results, whole: an interruption leaves the file that was there."""
    write_whole(Path(path), (json.dumps(content, indent=1) + "\n").encode())
