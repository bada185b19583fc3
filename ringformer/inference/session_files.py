"""Sessions on disk: the cache and the logits of a session, as sharded arrays with hashes (`checkpoints/`).

FOLDER/keys/..., values/..., positions/..., logits/...    the first slots of each rank, up to the last in use
FOLDER/_METADATA                                          the settings of the model, and what the caller adds
FOLDER/manifest.json                                      the size and hash of each file

A folder appears whole or not at all. Each device's share is copied in chunks, and read back onto the same mesh.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ringformer.checkpoints.array_folder import (
    TREE,
    Restore,
    Save,
    cause_of,
    quiet,
    read_about,
    tree_faults,
    tree_hashes,
)
from ringformer.checkpoints.sharded_arrays import Restored, Saved, checkpoint_handler
from ringformer.checkpoints.verify import restore_compared, shared_faults
from ringformer.files.hashes import hash_object
from ringformer.files.manifest import DamagedFiles, read_manifest
from ringformer.files.output_place import check_output
from ringformer.inference.cache.arrays import Cache, Entries
from ringformer.inference.cache.slots import Slots
from ringformer.inference.program_sizes import ProgramSizes
from ringformer.inference.programs import Programs
from ringformer.inference.session_arrays import State, as_global

FORMAT = 1
"""Number of this layout of keys, values and positions; a change of what they mean needs another."""
SLOTS = {"keys": 3, "values": 3, "key_scales": 3, "value_scales": 3, "positions": 1}
"""Dimension of the slots of each array that has one."""


def settings_of(programs: Programs, sizes: ProgramSizes, checkpoint: str) -> dict[str, Any]:
    """Return the settings, JSON values, in which a session's model and that of its file must agree."""
    config = programs.config
    fields = {name: value for name, value in asdict(config).items() if name not in (*config.EXECUTION, "compute_dtype")}
    return {
        "format": FORMAT,
        "checkpoint": checkpoint,
        "architecture": hash_object(fields | {"family": type(config).__name__, "attention": config.attention}),
        "mesh_dim": ",".join(map(str, programs.mesh.shape.values())),
        "layout": config.layout,
        "compute_dtype": config.compute_dtype,
        "cache_dtype": programs.cache_dtype,
        "max_length": sizes.max_length,
        "prefill_chunk": sizes.prefill_chunk,
    }


def check_settings(folder: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise ValueError, with the names and values, if settings differ from those of a saved session."""
    if other := [name for name in here if here[name] != saved.get(name)]:
        each = ", ".join(f"{name}={saved.get(name)} (here {here[name]})" for name in other)
        raise ValueError(
            f"the session in {folder} was saved with {each}: load the model as it was then, or read the text again"
        )


def save_state(folder: Path, state: State, slots: Slots, settings: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write a session's arrays, only the slots of each rank up to the last in use. All processes call this function.

    Args:
      settings: from `settings_of`. about: further JSON values for `read_session`.

    Raises ValueError if there is something at `folder`, and OSError if the disk refuses it.
    """
    check_output(folder, "session")
    if folder.exists():
        raise ValueError(f"{folder} exists: choose another folder for the session, or delete it")
    leaves = {
        name: Saved(array, _shape(name, array, slots.top * slots.ranks), SLOTS.get(name), donated=False)
        for name, array in _arrays(state).items()
    }
    described = {"session": settings, "rows": len(slots.lengths), "used": slots.top, "about": about}
    quiet()
    try:
        with ocp.Checkpointer(checkpoint_handler()) as checkpointer:
            checkpointer.save(folder.absolute(), Save(leaves, described))
    except Exception as error:
        if jax.process_index() == 0:
            shutil.rmtree(f"{folder}{ocp.utils.TMP_DIR_SUFFIX}", ignore_errors=True)
        raise OSError(f"the session cannot be saved in {folder} ({cause_of(error)})") from error


def read_session(folder: Path) -> dict[str, Any]:
    """Return the description of a saved session: its settings (`session`), `rows`, slots in use (`used`), and `about`.

    Raises FileNotFoundError if there is no folder, ValueError if it holds no session, and DamagedFiles if the
    description differs from what was written.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no session in {folder}: name a folder that a session was saved to")
    with _advising(folder):
        hashes = tree_hashes(folder) if (folder / TREE).is_file() else read_manifest(folder)
        described: dict[str, Any] = {}
        if hashes is not None and TREE in hashes:
            described = read_about(folder) or {}
    if "session" not in described:
        raise ValueError(f"{folder} holds no session: name a folder that a session was saved to")
    return described


def restore_state(
    folder: Path, programs: Programs, sizes: ProgramSizes, settings: Mapping[str, Any]
) -> tuple[State, Slots]:
    """Return a saved session's arrays on the mesh, and its slots. All processes call this function.

    Raises ValueError, naming what differs, for a session of another model, mesh, dtype or size, DamagedFiles if a file
    differs from what was written, and as `read_session`.
    """
    described = read_session(folder)
    check_settings(folder, described["session"], settings)
    rows = described["rows"]
    used = described["used"]
    abstract = programs.state(rows, sizes.capacity)
    arguments = {}
    for name, array in _arrays(abstract).items():
        shape = _shape(name, array, used * sizes.ranks)
        dim = SLOTS.get(name)
        if name == "positions":  # whole, for the host's account
            array = jax.ShapeDtypeStruct(shape, array.dtype, sharding=NamedSharding(programs.mesh, P()))
            dim = None
        arguments[name] = Restored(array=array, logical_shape=shape, padded_shards=dim)
    args = Restore(arguments, restore_args=arguments)
    handler = checkpoint_handler()
    share = jax.process_index(), jax.process_count()
    with ocp.Checkpointer(handler) as checkpointer, _advising(folder):
        restored = restore_compared(
            lambda: shared_faults(tree_faults(folder, share=share, chunks=False)),
            handler,
            lambda: checkpointer.restore(folder.absolute(), args),
        )
    slots = Slots.holding(np.asarray(restored["positions"]).reshape(rows, sizes.ranks, used), sizes.capacity)
    positions, lengths = (
        as_global(x, programs.mesh, like.sharding.spec)
        for x, like in ((slots.positions, abstract.cache.positions), (slots.lengths, abstract.lengths))
    )
    keys, values = (Entries(restored[f"{x}s"], restored.get(f"{x}_scales")) for x in ("key", "value"))
    return State(Cache(keys, values, positions), restored["logits"], lengths), slots


def _arrays(state: State) -> dict[str, Any]:
    """Return the arrays of a state by their names on disk; its lengths follow from the positions."""
    (k, v, positions), logits, _ = state
    arrays = {"keys": k.values, "values": v.values, "key_scales": k.scales, "value_scales": v.scales}
    return {name: x for name, x in arrays.items() if x is not None} | {"positions": positions, "logits": logits}


def _shape(name: str, array: Any, slots: int) -> tuple[int, ...]:
    """Return the shape of an array on disk, with so many slots in all."""
    dim = SLOTS.get(name)
    return array.shape if dim is None else (*array.shape[:dim], slots, *array.shape[dim + 1 :])


@contextmanager
def _advising(folder: Path) -> Iterator[None]:
    """Context that adds the session, and what to do, to a DamagedFiles error."""
    try:
        yield
    except DamagedFiles as error:
        raise DamagedFiles(f"the session in {folder} is damaged ({error}): read its text again") from error
