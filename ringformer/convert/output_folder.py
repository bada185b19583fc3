"""Creation of a converted model's folder, which appears complete or not at all."""

import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ringformer.files.output_place import check_output


@contextmanager
def output_folder(out: Path, carried: Iterable[Path]) -> Iterator[Path]:
    """Yield a temporary folder beside `out`, with copies of the files `carried`. It is renamed to `out` at the end, or
    removed after an error.

    Raises ValueError if `out` is a file or a folder that is not empty.
    """
    check_output(out, "OUT")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder: choose another one, or delete it")
    building = out.parent / f"{out.name}.building-{uuid.uuid4().hex[:8]}"
    try:
        building.mkdir(parents=True)
        for file in carried:
            shutil.copyfile(file, building / file.name)
        yield building
        building.rename(out)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
