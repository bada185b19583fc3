"""The configs and launch scripts that come with ringformer: `ringformer configs list` and `ringformer configs copy`.

They are folders of the repository; in a wheel they lie inside the package (setup.py). `copy` lays them out as in the
repository, so that the commands in a config's docstring work from the folder that holds the copies.
"""

import argparse
import ast
import difflib
import shutil
from collections.abc import Callable
from pathlib import Path

LAUNCH_SCRIPTS = ("gpu_node.sh", "slurm.sh")
"""Scripts that run wherever ringformer is installed; both source SHARED_OPTIONS, which lies beside them."""

SHARED_OPTIONS = "launch_options.sh"


def folder(name: str) -> Path:
    """`configs` or `scripts`: inside the package if it was built with them, else beside it, in the repository.

    Raises FileNotFoundError if neither is there.
    """
    package = Path(__file__).parents[1]
    places = [package / name, package.parent / name]
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(f"this installation has no {name}: neither {places[0]} nor {places[1]} is a folder")


def shipped() -> dict[str, Path]:
    """The configs by name, without .py, and the launch scripts by file name."""
    configs = {path.stem: path for path in sorted(folder("configs").glob("*.py"))}
    return configs | {name: folder("scripts") / name for name in LAUNCH_SCRIPTS}


def first_line(path: Path) -> str:
    """The first line of a config's docstring, or of the comment that a script opens with."""
    text = path.read_text()
    if path.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    comments = (line[2:] for line in text.splitlines() if line.startswith("# "))
    return next(comments, "")


def copy(name: str, destination: Path | None = None) -> list[Path]:
    """Copy a config or a launch script, and return the files written.

    Args:
      name: as `shipped` has it; a config's also with its ending, or as in the repository (configs/quickstart.py).
      destination: a folder, made if it is not there, or a new file's name ending like the original's. None: the folder
        configs or scripts of the current one.

    Raises ValueError for an unknown name, and for a file that is there already: nothing is overwritten.
    """
    known = shipped()
    plain = Path(name).name.removesuffix(".py")
    if plain not in known:
        near = difflib.get_close_matches(plain, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
        raise ValueError(f"there is no config or launch script {name!r}; {hint}")
    source = known[plain]
    is_config = source.suffix == ".py"
    if destination is None:
        destination = Path("configs" if is_config else "scripts")
    target = destination if destination.suffix == source.suffix else destination / source.name
    pairs = [(source, target)]
    if not is_config:  # sourced from beside the script
        pairs.append((source.with_name(SHARED_OPTIONS), target.with_name(SHARED_OPTIONS)))
    # the second script finds the first one's options there already
    wanted = [(a, b) for a, b in pairs if not (b.name == SHARED_OPTIONS and b.exists() and _same(a, b))]
    for _, there in wanted:
        if there.exists():
            raise ValueError(f"{there} is there already: name another destination, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copyfile(a, b)) for a, b in wanted]


def _same(a: Path, b: Path) -> bool:
    return a.read_bytes() == b.read_bytes()


def add_list(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int | None]:
    """`ringformer configs list`: names, and what each is for."""
    parser.description = "The configs and launch scripts that come with ringformer, each with its first line."
    parser.add_argument("--paths", action="store_true", help="the files instead of what they are for")

    def run(args: argparse.Namespace) -> None:
        known = shipped()
        width = max(map(len, known))
        for name, path in known.items():
            print(f"{name:<{width}}  {path if args.paths else first_line(path)}")

    return run


def add_copy(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int | None]:
    """`ringformer configs copy NAME [DESTINATION]`."""
    parser.description = "Copy a config, to change it, or a launch script with what it sources."
    parser.add_argument("name", help="a name of `ringformer configs list`")
    parser.add_argument(
        "destination",
        nargs="?",
        type=Path,
        help="a folder, or a new file's name (default: configs/, for a script scripts/)",
    )

    def run(args: argparse.Namespace) -> None:
        for path in copy(args.name, args.destination):
            print(path)

    return run
