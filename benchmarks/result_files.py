"""Files of results: the day and the code of a measurement, and how a file is written."""

import datetime
import json
from pathlib import Path
from typing import Any

from ringformer.files.atomic import write_whole
from ringformer.processes.software import revision

revision()  # of the code that this process begins with


def made() -> dict[str, str]:
    """Return the date and the commit of ringformer's code, as files of results have them."""
    return {"date": datetime.date.today().isoformat(), "commit": revision()}


def write_results(path: str | Path, content: Any) -> None:
    """Write a file of results, whole: an interruption leaves the file that was there."""
    write_whole(Path(path), (json.dumps(content, indent=1) + "\n").encode())
