"""Parameters of a checkpoint as streams: written from blocks, and opened without being read.

Orbax keeps charge of the folder, its metadata and its atomicity; what a leaf of the tree is on disk is said here, by a
`TypeHandler`: a zarr array, one block to a chunk. `ringformer.checkpoints.manager` reads it like any other.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from ringformer.checkpoints.sharded_arrays import array_metadata, location
from ringformer.checkpoints.tree import PlainFiles, Restore, Save, tree_faults
from ringformer.convert.hf_weights import Weight, weights
from ringformer.files.manifest import DamagedFiles
from ringformer.models.llama_config import LlamaConfig

WRITES_AT_ONCE = 4
CACHE_BYTES = 2**30
"""Decoded chunks that are kept while a checkpoint is read: those of one layer's matrix, for chunks not our own."""


IndexedBlock = tuple[tuple[slice, ...], np.ndarray]
"""An index into the parameter, and the array that stands there."""


@dataclass
class BlockStream:
    """A leaf of a checkpoint that arrives in blocks."""

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
        for stream, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            store = await ts.open(
                location(info) | array_metadata(stream.weight.shape, stream.weight.chunk, stream.dtype), create=True
            )
            writing: deque[ts.WriteFutures] = deque()
            try:
                for index, block in stream.blocks:
                    if len(writing) == WRITES_AT_ONCE:
                        await writing.popleft()
                    writing.append(store[index].write(block, can_reference_source_data_indefinitely=True))
            finally:  # of a failure too: who removes the folder must be the last one to touch it
                for write in writing:
                    await write
        return []

    async def deserialize(self, infos, args=None):
        context, opened = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}}), []
        for info in infos:
            opened.append(await ts.open(location(info), open=True, context=context))
        return opened


def save_streams(folder: Path, streams: dict[str, Any]) -> None:
    """Write a checkpoint whose parameters are a nested dict of `BlockStream`."""
    with ocp.Checkpointer(PlainFiles(BlockStream, _StreamHandler())) as checkpointer:
        checkpointer.save(folder.absolute(), Save({"params": streams}))


def open_streams(folder: Path, config: LlamaConfig) -> dict[tuple[str, ...], ts.TensorStore]:
    """The stored parameters of a checkpoint, by path; their files were read once, to compare their hashes.

    Raises DamagedFiles, naming the files that are not as they were written.
    """
    if faults := tree_faults(folder, lambda name: name.startswith("params.")):
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
