"""Parameters of a checkpoint as streams: written from blocks, and opened without being read.

Orbax manages the folder, its metadata and its atomicity. The `TypeHandler` in this module stores each leaf of the tree
as a zarr array with one block per chunk (`checkpoints/zarr_files.py`), which `checkpoints/manager.py` reads like any
other checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax.traverse_util import flatten_dict, unflatten_dict

from ringformer.checkpoints.array_folder import PlainFiles, Restore, Save, cause_of, quiet, tree_faults, tree_hashes
from ringformer.checkpoints.zarr_files import Leaf, Place, array_context, open_array, write_arrays
from ringformer.convert.hf_weights import ParamPath, Weight, weights
from ringformer.files.chunks import array_metadata
from ringformer.files.manifest import DamagedFiles, write_part
from ringformer.models.decoder_config import DecoderConfig

CACHE_BYTES = 2**30
"""Size of the cache of decoded chunks while a checkpoint is read. The cache is needed because a run's chunks, unlike
those of a converted model, hold parts of several blocks."""

IndexedBlock = tuple[Place, np.ndarray]
"""Index into a parameter, and the array at that index."""


@dataclass
class BlockStream:
    """Leaf of a checkpoint that arrives in blocks; each block becomes a chunk on disk."""

    weight: Weight
    dtype: np.dtype
    blocks: Iterator[IndexedBlock]


class _StreamHandler(ocp.type_handlers.TypeHandler):
    """Handler that saves each `BlockStream`, and restores a leaf as an open `tensorstore.TensorStore`."""

    def typestr(self) -> str:
        return "jax.Array"  # the type that other readers restore

    async def metadata(self, infos):
        raise NotImplementedError("streams are opened, not described")

    async def serialize(self, values, infos, args=None):
        leaves = []
        for stream, info in zip(values, infos, strict=True):
            metadata = array_metadata(stream.weight.shape, stream.weight.chunk, stream.dtype)
            leaves.append(Leaf(info, metadata, stream.blocks))
        write_part(Path(infos[0].parent_dir), 0, await write_arrays(leaves, create=True))
        return []

    async def deserialize(self, infos, args=None):
        hashes = tree_hashes(Path(infos[0].parent_dir))
        context = array_context(CACHE_BYTES)
        return [await open_array(info, hashes, context) for info in infos]


def save_streams(folder: Path, streams: dict[ParamPath, BlockStream]) -> None:
    """Write a checkpoint of the parameters that the streams contain, by path.

    Raises OSError if it cannot be written, and whatever a stream raises.
    """
    quiet()
    try:
        with ocp.Checkpointer(PlainFiles(BlockStream, _StreamHandler())) as checkpointer:
            checkpointer.save(folder.absolute(), Save({"params": unflatten_dict(streams)}))
    except ValueError as error:
        if "tensorstore_spec=" not in str(error):
            raise
        raise OSError(f"the arrays cannot be written ({cause_of(error)})") from None


def open_streams(folder: Path, config: DecoderConfig) -> dict[ParamPath, ts.TensorStore]:
    """Open the stored parameters of a checkpoint, by path. Each chunk is checked against the manifest when it is read.

    Raises DamagedFiles, which names the files that have changed since they were written. Reading a chunk may raise it
    too.
    """
    if faults := tree_faults(folder, lambda name: name.startswith("params."), chunks=False):
        raise DamagedFiles(f"the checkpoint is damaged: {'; '.join(faults[:3])}")
    arguments = {weight.path: ocp.RestoreArgs(restore_type=BlockStream) for weight in weights(config)}
    tree = {"params": unflatten_dict(arguments)}
    with ocp.Checkpointer(PlainFiles(BlockStream, _StreamHandler())) as checkpointer:
        restored = checkpointer.restore(folder.absolute(), Restore(tree, restore_args=tree, partial_restore=True))
    return flatten_dict(restored["params"])
