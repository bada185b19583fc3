"""Parameters of a checkpoint as streams: written from blocks, and opened without being read.

Orbax manages the folder, its metadata and its atomicity; a `TypeHandler` here defines what a leaf of the tree is on
disk: a zarr array with one block per chunk (`checkpoints/zarr_files.py`). `checkpoints/manager.py` reads it like any
other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from ringformer.checkpoints.array_folder import PlainFiles, Restore, Save, tree_faults, tree_hashes
from ringformer.checkpoints.zarr_files import Leaf, Place, array_context, open_array, write_arrays
from ringformer.convert.hf_weights import Weight, weights
from ringformer.files.chunks import array_metadata
from ringformer.files.manifest import DamagedFiles, write_part
from ringformer.models.llama_config import LlamaConfig

CACHE_BYTES = 2**30
"""Bytes of decoded chunks that are kept while a checkpoint is read: a run's chunks, unlike a converted model's, hold
parts of several blocks."""

IndexedBlock = tuple[Place, np.ndarray]
"""An index into the parameter, and the array at that index."""


@dataclass
class BlockStream:
    """A leaf of a checkpoint that arrives in blocks, each a chunk on disk."""

    weight: Weight
    dtype: np.dtype
    blocks: Iterator[IndexedBlock]


class _StreamHandler(ocp.type_handlers.TypeHandler):
    """Saves `BlockStream`s; restores `tensorstore.TensorStore`s, opened."""

    def typestr(self) -> str:
        return "jax.Array"  # what others will restore it as

    async def metadata(self, infos):
        raise NotImplementedError("streams are opened, not described")

    async def serialize(self, values, infos, args=None):
        leaves = (
            Leaf(info, array_metadata(stream.weight.shape, stream.weight.chunk, stream.dtype), stream.blocks)
            for stream, info in zip(values, infos, strict=True)
        )
        write_part(Path(infos[0].parent_dir), 0, await write_arrays(leaves, create=True))
        return []

    async def deserialize(self, infos, args=None):
        hashes = tree_hashes(Path(infos[0].parent_dir))
        context = array_context(CACHE_BYTES)
        return [await open_array(info, hashes, context) for info in infos]


def save_streams(folder: Path, streams: dict[str, Any]) -> None:
    """Write a checkpoint whose parameters are a nested dict of `BlockStream`."""
    with ocp.Checkpointer(PlainFiles(BlockStream, _StreamHandler())) as checkpointer:
        checkpointer.save(folder.absolute(), Save({"params": streams}))


def open_streams(folder: Path, config: LlamaConfig) -> dict[tuple[str, ...], ts.TensorStore]:
    """The stored parameters of a checkpoint, by path, not read yet: each chunk is compared as it is read.

    Raises DamagedFiles, naming the files that are not as they were written; so does reading.
    """
    if faults := tree_faults(folder, lambda name: name.startswith("params."), chunks=False):
        raise DamagedFiles(f"the checkpoint is damaged: {'; '.join(faults[:3])}")
    tree = {"params": nested({w.path: w for w in weights(config)})}
    restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=BlockStream), tree)
    with ocp.Checkpointer(PlainFiles(BlockStream, _StreamHandler())) as checkpointer:
        restored = checkpointer.restore(
            folder.absolute(), Restore(tree, restore_args=restore_args, partial_restore=True)
        )
    return {w.path: _leaf(restored["params"], w.path) for w in weights(config)}


def nested(flat: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    """A nested dict from one whose keys are paths."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def _leaf(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree
