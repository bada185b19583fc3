"""The configs and launch scripts shipped with ringformer: `ringformer configs list` and `ringformer configs copy`.

They are folders of the repository; a wheel has them inside the package (setup.py). `copy` keeps the repository's
folders, so that the commands in a config's docstring work in the folder that holds the copies.
"""

import argparse
import ast
import difflib
import filecmp
import shutil
from collections.abc import Callable
from pathlib import Path

from ringformer.cli.parser import Switch
from ringformer.files.output_place import check_output

LAUNCH_SCRIPTS = ("gpu_node.sh", "slurm.sh")
"""Scripts that run wherever ringformer is installed; both source the files SOURCED from their folder."""

SOURCED = ("launch_options.sh", "option_values.sh")


def folder(name: str) -> Path:
    """Return the folder `configs` or `scripts`, inside a wheel's package or beside it in the repository.

    Raises FileNotFoundError if neither exists.
    """
    package = Path(__file__).parents[1]
    places = [package / name, package.parent / name]
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(f"this installation has no {name}: neither {places[0]} nor {places[1]} exists")


def shipped() -> dict[str, Path]:
    """Return the configs by name, without .py, and the launch scripts by file name."""
    configs = {path.stem: path for path in sorted(folder("configs").glob("*.py"))}
    return configs | {name: folder("scripts") / name for name in LAUNCH_SCRIPTS}


def first_line(path: Path) -> str:
    """Return the first line of a config's docstring, or of a script's opening comment."""
    text = path.read_text()
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    for line in text.splitlines():
        if line.startswith("# "):
            return line.removeprefix("# ")
    return ""


def copy(name: str, destination: Path | None = None) -> list[Path]:
    """Copy a config or a launch script, and return the files written.

    Args:
      name: a key of `shipped`; for a config also with .py, or its path in the repository (configs/quickstart.py).
      destination: a folder, created if needed, or a new file name with the original's ending. None: configs or scripts
        in the current folder.

    Raises ValueError for an unknown name, and for a file that exists: nothing is overwritten.
    """
    files = shipped()
    plain = Path(name).name.removesuffix(".py")
    if plain not in files:
        hint = f"there are: {', '.join(files)}"
        near = difflib.get_close_matches(plain, files, 1)
        if near:
            hint = f"did you mean {near[0]!r}?"
        raise ValueError(f"there is no config or launch script {name!r}; {hint}")
    source = files[plain]
    is_config = source.suffix == ".py"
    if destination is None:
        destination = Path("configs" if is_config else "scripts")
    target = destination if destination.suffix == source.suffix else destination / source.name
    wanted = [(source, target)]
    if not is_config:
        for name in SOURCED:
            part = source.with_name(name)
            there = target.with_name(name)
            if not (there.exists() and filecmp.cmp(part, there, shallow=False)):  # another script may have brought it
                wanted.append((part, there))
    for _, there in wanted:
        check_output(there, "destination")
        if there.exists():
            raise ValueError(f"{there} already exists: choose another destination, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    for original, there in wanted:
        shutil.copyfile(original, there)
    return [there for _, there in wanted]


def add_list(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int | None]:
    """Add the arguments of `ringformer configs list`."""
    parser.description = "List the configs and launch scripts shipped with ringformer, with a description of each."
    parser.add_argument("--paths", action=Switch, help="print paths instead of descriptions")

    def run(args: argparse.Namespace) -> None:
        files = shipped()
        width = max(map(len, files))
        for name, path in files.items():
            shown = str(path) if args.paths else first_line(path)
            print(f"{name:<{width}}  {shown}")

    return run


def add_copy(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int | None]:
    """Add the arguments of `ringformer configs copy NAME [DESTINATION]`."""
    parser.description = "Copy a config in order to change it, or a launch script with the files that it sources."
    parser.add_argument("name", help="a name from `ringformer configs list`")
    parser.add_argument(
        "destination",
        nargs="?",
        type=Path,
        help="a folder or a new file name (default: configs/, or scripts/ for a script)",
    )

    def run(args: argparse.Namespace) -> None:
        for path in copy(args.name, args.destination):
            print(path)

    return run
