"""A saved model, of a run or converted: its architecture, its newest checkpoint, its parameters on a mesh."""

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from ringformer.checkpoints.array_folder import Restore
from ringformer.checkpoints.sharded_arrays import Restored, checkpoint_handler
from ringformer.checkpoints.verify import refuse_damaged, restore_checked, saved_steps, tree_folder
from ringformer.files.manifest import MANIFEST, check_named
from ringformer.files.run_layout import CONFIG, IDENTITY, METRICS
from ringformer.files.untrusted import read_object
from ringformer.models.interface import ModelConfig
from ringformer.models.registry import FAMILIES, Family, family_of
from ringformer.parallel.parameters import abstract_params


def model_of(run_dir: str | Path) -> ModelConfig:
    """The model of a run's folder, or of a converted model's. Raises FileNotFoundError, ValueError if it is neither,
    DamagedFiles if one of a converted model's files is not as it was written."""
    if not (Path(run_dir) / CONFIG).is_file():
        raise FileNotFoundError(f"{run_dir} has no config.json: name the folder of a run or of a converted model")
    advice = "convert or copy the model again"
    if (Path(run_dir) / METRICS).is_file():  # of a run
        recorded = (Path(run_dir) / IDENTITY).is_file()
        advice = "delete it, and the run's own command writes it again" if recorded else "bring back a copy"
    saved = read_object(run_dir, CONFIG, advice)
    check_named(Path(run_dir))
    if "model" not in saved:
        advice = "convert it first, with ringformer convert from-hf" if "model_type" in saved else "name a run's folder"
        raise ValueError(f"{run_dir}/config.json is not that of a run or of a converted model: {advice}")
    family = _family(run_dir, saved) if saved.get("preset") else FAMILIES["llama"]  # a converted model has no preset
    try:
        return family.config(**saved["model"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{run_dir}/config.json describes no {family.config.__name__} ({error}); {advice}") from None


def _family(run_dir: str | Path, saved: Mapping[str, Any]) -> Family:
    """The family of a run; what its folder names is said, and not executed. Raises ValueError if none here has it."""
    try:
        return family_of(saved["preset"])
    except ValueError as error:
        if "family" not in saved:
            raise ValueError(f"{run_dir}: {error}; a config file registered it: pass --config=FILE") from None
        raise ValueError(
            f"{run_dir} is a run of {saved['preset']!r}, which is registered as {saved['family']!r} by "
            f"{saved['family_file']}: pass the config file that does it, --config=FILE. It is executed"
        ) from None


def latest_step(run_dir: str | Path) -> int | None:
    """The step of a run's latest finished checkpoint; None if it has none."""
    return max(saved_steps(run_dir), default=None)


def latest_checkpoint(run_dir: str | Path) -> Path:
    """The folder of a run's latest checkpoint. Raises FileNotFoundError if there is none."""
    step = latest_step(run_dir)
    if step is None:
        raise FileNotFoundError(f"{run_dir}: there is no checkpoint in this folder")
    return tree_folder(run_dir, step)


def checkpoint_hash(folder: Path) -> str:
    """A hash that tells one save from any other: of its manifest, or else of its time and its files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    named = [path for path in files if path.name == MANIFEST]
    sizes = [] if named else [(_under(folder, path), path.stat().st_size) for path in files]
    named = named or [path for path in files if path.name == "_CHECKPOINT_METADATA"]
    texts = {_under(folder, path): path.read_text(errors="replace") for path in named}
    content = json.dumps([texts, sizes], sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _under(folder: Path, path: Path) -> str:
    return str(path.relative_to(folder))


def restore_arguments(target, shardings):
    """The arguments that restore a tree of abstract arrays."""
    return jax.tree.map(lambda x, w: Restored(array=x, logical_shape=w.shape), target, shardings)


def restore_params(run_dir: str | Path, weights: dict, mesh: Mesh, dtypes: dict | None = None) -> Any:
    """The parameters alone of a run's latest checkpoint, or of a converted model, laid out for this mesh.

    `dtypes` says in which dtype each is read; None: float32. Raises DamagedFiles, naming the files, if they are not as
    they were written.
    """
    folder = latest_checkpoint(run_dir)
    step = int(folder.parent.name)
    abstract = abstract_params(weights, mesh)
    if dtypes is not None:
        abstract = jax.tree.map(lambda x, dtype: x.update(dtype=dtype), abstract, dtypes)
    arguments = {"params": restore_arguments(abstract, weights)}
    handler = checkpoint_handler()
    with ocp.Checkpointer(handler) as checkpointer:
        faults, restored = restore_checked(
            run_dir,
            step,
            handler,
            lambda: checkpointer.restore(folder, Restore(arguments, restore_args=arguments, partial_restore=True)),
            lambda name: name.startswith("params."),
        )
    remark = refuse_damaged(run_dir, step, faults)
    if remark and jax.process_index() == 0:
        print(remark, file=sys.stderr)
    return restored["params"]
