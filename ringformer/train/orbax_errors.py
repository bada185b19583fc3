"""What Orbax and tensorstore say of a save that failed: once, in one line, where it is raised."""

import logging
import os
import re
import warnings


def quiet() -> None:
    """Keep Orbax from printing the stacks of what it raises: of one failed save several, from several threads.
    And Python from telling what it left undone."""
    logger = logging.getLogger("absl")
    if _is_no_stack not in logger.filters:
        logger.addFilter(_is_no_stack)
        left = "coroutine '.*(_create_paths|_write|_write_metadata_after_commits)' was never awaited"
        warnings.filterwarnings("ignore", left, RuntimeWarning)


def cause(error: BaseException) -> str:
    """The cause of an exception in one line: of what an operating system refused its words for it, and the file."""
    text = " ".join(str(error).split()) or type(error).__name__
    code, file = re.search(r"os_error_code='(\d+)'", text), re.search(r'local file "([^"]+)"', text)
    if code and file:
        return f"{os.strerror(int(code[1]))}: {file[1]}"
    return text.split(" [tensorstore_spec=")[0].split(" [source locations")[0]


def _is_no_stack(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)
