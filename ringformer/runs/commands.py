"""`ringformer checkpoint list | inspect | verify | copy`."""

import argparse
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from ringformer.cli.visible_text import visible
from ringformer.files.run_layout import CHECKPOINTS


def add_list(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    """Add the arguments of `ringformer checkpoint list`."""
    parser.description = "List the checkpoints of a run: when each was saved, its size, its held-out loss."
    _add_path(parser)
    return _list


def add_inspect(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    """Add the arguments of `ringformer checkpoint inspect`."""
    parser.description = "Show the notes that were saved with a checkpoint, and list its arrays without reading them."
    _add_path(parser)
    parser.add_argument("--step", type=int, help="step of the checkpoint in a run (default: the latest)")
    return _inspect


def add_verify(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the arguments of `ringformer checkpoint verify`."""
    parser.description = (
        "Compare the files of checkpoints with the hashes saved with them. Changes nothing. Exit code 1 if a "
        "checkpoint is damaged or has no hashes to compare with."
    )
    _add_path(parser)
    parser.add_argument("--step", type=int, help="step of the checkpoint in a run (default: all of them)")
    return _verify


def add_copy(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the arguments of `ringformer checkpoint copy`."""
    parser.description = (
        "Copy a run's checkpoints, and the files beside them, to an object store, gs://BUCKET/PATH, or back to a "
        "folder: either FROM or TO is a URL. Every checkpoint is compared with its hashes. All stages of a run are "
        "copied. Exit code 1 if a checkpoint is damaged; it is not copied."
    )
    parser.add_argument("source", metavar="FROM", help="folder of a run, or gs://BUCKET/PATH (file:///PATH)")
    parser.add_argument("target", metavar="TO", help="URL if FROM is a folder, else a folder")
    return _copy


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="folder of a run, of a stage, or of a converted model")


def _list(args: argparse.Namespace) -> None:
    from ringformer.checkpoints.verify import tree_folder
    from ringformer.files.manifest import MANIFEST
    from ringformer.runs.metrics import evaluation_losses

    run_dir = Path(args.path)
    steps = _steps(run_dir)
    losses = evaluation_losses(run_dir)
    print(f"{'step':>10} {'saved':>20} {'size':>10} {'held-out loss':>14}  hashes")
    for step in steps:
        folder = tree_folder(run_dir, step)
        saved = f"{datetime.fromtimestamp(folder.stat().st_mtime):%Y-%m-%d %H:%M:%S}" if folder.is_dir() else "-"
        loss = f"{losses[step]:.4f}" if step in losses else "-"
        hashes = "yes" if (folder / MANIFEST).is_file() else "no"
        print(f"{step:>10} {saved:>20} {_size(_bytes(folder)):>10} {loss:>14}  {hashes}")
    for path in sorted((run_dir / "damaged").glob("*")):
        print(f"set aside as damaged: {path}, {_size(_bytes(path))}")
    for path in sorted((run_dir / CHECKPOINTS).glob("*.orbax-checkpoint-tmp*")):
        print(f"unfinished, the next start removes it: {path}, {_size(_bytes(path))}")


def _inspect(args: argparse.Namespace) -> None:
    import jax

    from ringformer.checkpoints.array_folder import is_chunk, read_about
    from ringformer.checkpoints.sharded_arrays import checkpoint_handler
    from ringformer.checkpoints.verify import UNVERIFIED, tree_folder

    run_dir = Path(args.path)
    step = _steps(run_dir, args.step)[-1]
    folder = tree_folder(run_dir, step)
    about = read_about(folder)
    print(f"{folder}: {_size(_bytes(folder))}")
    if about is None:
        print(f"the checkpoint of step {step} {UNVERIFIED}")
    else:
        print(json.dumps(about, indent=1))
    try:
        arrays = jax.tree.leaves(checkpoint_handler().metadata(folder).tree)
    except (ValueError, FileNotFoundError) as error:  # tensorstore's, and Orbax's
        raise OSError(f"{folder} cannot be read ({error}): run ringformer checkpoint verify {run_dir}") from error
    width = max(len(array.name) for array in arrays)
    for array in arrays:
        files = folder / array.name
        chunks = sum(is_chunk(f"{array.name}/{path.name}") for path in files.glob("*"))
        shape = ", ".join(map(str, array.shape))
        print(
            f"{visible(array.name):{width}}  {array.dtype.name:>8} [{shape}], {chunks} chunks, {_size(_bytes(files))}"
        )


def _verify(args: argparse.Namespace) -> int:
    from ringformer.checkpoints.verify import UNVERIFIED, checkpoint_faults, tree_folder
    from ringformer.files.manifest import DamagedFiles, check_named, read_manifest

    run_dir = Path(args.path)
    whole = True
    for step in _steps(run_dir, args.step):
        faults = checkpoint_faults(run_dir, step)
        if faults == []:
            hashes = read_manifest(tree_folder(run_dir, step)) or {}
            size = sum(size for size, _ in hashes.values())
            print(f"step {step} is whole: {len(hashes)} files, {_size(size)}")
            continue
        whole = False
        if faults is None:
            print(f"step {step} {UNVERIFIED}")
            continue
        print(f"step {step} is damaged:")
        for fault in faults:
            print(f"  {visible(fault)}")
    try:
        check_named(run_dir)
    except DamagedFiles as error:
        whole = False
        print(visible(str(error)))
    return 0 if whole else 1


def _copy(args: argparse.Namespace) -> int:
    from ringformer.checkpoints.copies import parts_of, receive, send
    from ringformer.files.bucket import ObjectStore, is_url

    back = is_url(args.source)
    if back == is_url(args.target):
        raise ValueError(
            f"one of FROM and TO must be a folder, the other a URL such as gs://BUCKET/PATH, not {args.source!r} and "
            f"{args.target!r}"
        )
    if back:
        url = args.source.rstrip("/")
        folder = args.target
        parts = parts_of(ObjectStore(url))
        hint = ", or it does not exist or may not be listed"
    else:
        url = args.target.rstrip("/")
        folder = args.source
        parts = parts_of(Path(folder))
        hint = ""
    whole = True
    if not parts:
        raise ValueError(
            f"{args.source} has no checkpoints{hint}: name the folder of a run, or the URL that one was copied to"
        )
    for part in parts:
        store = ObjectStore(f"{url}/{part}")
        run_dir = Path(folder, part)
        lines = receive(store, run_dir) if back else send(run_dir, store)
        for line, fault in lines:
            whole &= not fault
            print(line, flush=True)
    return 0 if whole else 1


def _steps(run_dir: Path, step: int | None = None) -> list[int]:
    """Return the steps of a run's checkpoints, or `step` alone. Raises ValueError if there is no such checkpoint."""
    from ringformer.checkpoints.verify import saved_steps

    steps = saved_steps(run_dir)
    if not steps:
        stages = [path.name for path in sorted(run_dir.glob("stage-*")) if saved_steps(path)]
        hint = f"; it has {', '.join(stages)}: name one of them" if stages else ": name the folder of a run"
        raise ValueError(f"{run_dir} has no checkpoints{hint}")
    if step is not None and step not in steps:
        raise ValueError(f"{run_dir} has no checkpoint of step {step}: it has {', '.join(map(str, steps))}")
    return steps if step is None else [step]


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
