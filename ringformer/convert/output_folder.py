"""Creation of a converted model's folder, which appears complete or not at all."""

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ringformer.files.new_folder import new_folder


@contextmanager
def output_folder(out: Path, carried: Iterable[Path]) -> Iterator[Path]:
    """Yield a folder to build `out` in, with copies of the files `carried`; as `new_folder`.

    Raises ValueError if `out` is a file or a folder that is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder: choose another one, or delete it")
    with new_folder(out, "OUT") as building:
        for file in carried:
            shutil.copyfile(file, building / file.name)
        yield building
