"""Sharded arrays on disk: each is a zarr array in its logical shape, and each process writes and reads its own shards
of it.

Padding is cut off on the host after a shard is copied there, and added on the host before a shard is copied back. So no
program runs on a device, and no device holds more than its shards. A chunk never crosses the border of a shard, so no
two processes write the same chunk. Orbax manages the folder, its metadata and its atomicity (`array_folder.py`); a
`TypeHandler` defines what a leaf of the tree is, and `zarr_files.py` defines the leaf's files.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from ringformer.checkpoints.array_folder import PlainFiles, tree_hashes
from ringformer.checkpoints.zarr_files import Info, Leaf, Place, array_context, location, open_array, write_arrays
from ringformer.files.chunks import array_metadata
from ringformer.files.manifest import DamagedFiles, Hashes, write_part
from ringformer.parallel.host_memory import HOST_MEMORY

CHUNK_BYTES = 16 * 2**20
"""Bytes of a chunk before compression. The allocator maps memory anew for each buffer above 32 MiB, so with chunks of
64 MiB a restore takes twice as long."""


@dataclass
class Saved:
    """Leaf to save: the global array, padded at the end of its dimensions, and the shape without padding."""

    array: jax.Array
    shape: tuple[int, ...]
    padded_shards: int | None = None
    """Dimension of which every shard is padded at its end, instead of the last ones; None: there is none."""
    donated: bool = True
    """True if the array may be donated before it is written; all its chunks are then copied to the host at once."""


@dataclass
class Restored(ocp.RestoreArgs):
    """Leaf to restore: the shape with padding, dtype and sharding of its array, and the shape without padding.
    `padded_shards`: see `Saved`."""

    restore_type: Any = Saved
    array: Any = None  # a jax.ShapeDtypeStruct; the base class makes a default necessary
    logical_shape: tuple[int, ...] = ()
    padded_shards: int | None = None


class _Handler(ocp.type_handlers.TypeHandler):
    """Saves `Saved` and restores `jax.Array`s from checkpoints of this handler, of Orbax's own and of `convert/`."""

    failure: BaseException | None = None
    """Error of this process's write, set as soon as the write fails: Orbax raises it only after the other processes
    have waited."""
    faults: list[str]
    """Damaged files that a restore met. The restore continues, so that no other process waits at Orbax's barriers, but
    its result must not be used (`verify.restore_checked`)."""

    def typestr(self) -> str:
        return "jax.Array"  # the type that other readers restore

    async def metadata(self, infos):
        described = []
        for info in infos:
            store = await ts.open(location(info), open=True)
            dtype = store.dtype.numpy_dtype
            described.append(ocp.metadata.ArrayMetadata(info.name, info.parent_dir, store.shape, None, dtype))
        return described

    async def serialize(self, values, infos, args=None):
        """Copy arrays that may be donated when this returns to the host, and leave the rest to a thread."""
        for value in values:
            if value.donated:
                for shard in _written(value.array):
                    shard.data.copy_to_host_async()
        leaves = [_leaf(value, info) for value, info in zip(values, infos, strict=True)]
        return [ocp.future.CommitFutureAwaitingContractedSignals(self._write(leaves), name="sharded_arrays")]

    async def _write(self, leaves):
        try:
            await _write(leaves)
        except BaseException as error:
            self.failure = error
            raise

    async def deserialize(self, infos, args=None):
        self.faults = []
        hashes = None
        arrays = []
        for info, arg in zip(infos, args, strict=True):
            arrays.append(arg.array)
            try:
                if not self.faults:
                    hashes = hashes or tree_hashes(Path(info.parent_dir))
                    arrays[-1] = await _read(info, arg, hashes)
            except DamagedFiles as error:
                self.faults.append(str(error))
        return arrays


def checkpoint_handler() -> PlainFiles:
    """Return the handler of trees whose leaves are `Saved` in a save, and `Restored` in the arguments of a restore."""
    return PlainFiles(Saved, _Handler())


def _written(array: jax.Array) -> list[jax.Shard]:
    """Return the shards that this process writes: the first of the replicas."""
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _leaf(value: Saved, info: Info) -> Leaf:
    """Return the chunks that this process writes."""
    array = value.array
    shard = list(array.sharding.shard_shape(array.shape))
    dim = value.padded_shards
    if dim is not None:
        shard[dim] = shard[dim] * value.shape[dim] // array.shape[dim]
    chunk = _chunk(value.shape, tuple(shard), array.dtype.itemsize)
    blocks = _blocks(value, chunk)
    if value.donated:
        blocks = _taken(list(blocks))
    return Leaf(info, array_metadata(value.shape, chunk, array.dtype), blocks)


def _blocks(value: Saved, chunk: tuple[int, ...]) -> Iterator[tuple[Place, np.ndarray]]:
    """Yield chunks, each of which is copied to the host when it is due, unless its shard is there already."""
    for shard in _written(value.array):
        data = shard.data
        if value.donated:
            # An array of host memory may be seen through numpy without a copy, and is then overwritten in place.
            in_host = value.array.sharding.memory_kind == HOST_MEMORY
            data = np.array(data) if in_host else np.asarray(data)
        place = _inside(shard.index, value.array.shape, value.shape, value.padded_shards)
        for part in _split(place, chunk):
            yield part, np.asarray(data[_relative(part, place)])


def _relative(part: Place, place: Place) -> Place:
    """Return the place of a part within the block at `place`."""
    inside = []
    for along, whole in zip(part, place, strict=True):
        inside.append(slice(along.start - whole.start, along.stop - whole.start))
    return tuple(inside)


def _chunk(shape: tuple[int, ...], shard: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the shape of a chunk: a shard, cut along the first dimension that is whole on each device, for example the
    layers of a stacked weight. A chunk has only few layers, so reading one layer decodes little else."""
    for dim, (whole, part) in enumerate(zip(shape, shard, strict=True)):
        if whole == part:
            row = itemsize * int(np.prod(shard[:dim] + shard[dim + 1 :]))
            rows = min(max(1, CHUNK_BYTES // row), whole)
            return (*shard[:dim], rows, *shard[dim + 1 :])
    return shard


def _split(place: Place, chunk: tuple[int, ...]) -> Iterator[Place]:
    """Yield the places of a shard's chunks; none for a shard of padding."""
    cuts = []
    for along, size in zip(place, chunk, strict=True):
        starts = range(along.start, along.stop, size)
        cuts.append([slice(start, min(start + size, along.stop)) for start in starts])
    return itertools.product(*cuts)


def _taken(chunks: list[tuple[Place, np.ndarray]]) -> Iterator[tuple[Place, np.ndarray]]:
    """Yield the chunks, and drop each from the list as it is taken, so that its memory is free once it is written."""
    while chunks:
        yield chunks.pop()


def _inside(index: Place, padded: tuple[int, ...], shape: tuple[int, ...], padded_shards: int | None) -> Place:
    """Return the place of a shard without its padding; start == stop in some dimension if all of it is padding.

    Args:
      padded, shape: shapes of the array with and without padding. padded_shards: see `Saved`.
    """
    place = []
    for along, size in zip(index, shape, strict=True):
        start, stop, _ = along.indices(size)
        place.append(slice(start, stop))
    dim = padded_shards
    if dim is not None:
        start, stop, _ = index[dim].indices(padded[dim])
        place[dim] = slice(start * shape[dim] // padded[dim], stop * shape[dim] // padded[dim])
    return tuple(place)


async def _write(leaves: list[Leaf]) -> None:
    """Write every chunk and read it back; leave the entries of the files to `PlainFiles.finalize`."""
    hashes = await write_arrays(leaves, create=jax.process_index() == 0)
    write_part(Path(leaves[0].info.parent_dir), jax.process_index(), hashes)


async def _read(info: Info, arg: Restored, hashes: Hashes | None) -> jax.Array:
    """Return the array. Each of its shards is read into host memory that nothing else refers to."""
    array = arg.array
    shape = arg.logical_shape
    local = array.sharding.shard_shape(array.shape)
    indices = array.sharding.addressable_devices_indices_map(array.shape)
    try:
        store = await open_array(info, hashes, array_context())
        if store.shape == shape:
            numbers = ts.cast(store, array.dtype)
            reads = {}
            for index in indices.values():
                if str(index) not in reads:  # only one of the replicas
                    place = _inside(index, array.shape, shape, arg.padded_shards)
                    reads[str(index)] = numbers[place].read()
            shards = {index: _padded(await read, local) for index, read in reads.items()}
    except DamagedFiles:
        raise
    except Exception as error:  # tensorstore has no error type of its own for files that it cannot read
        raise DamagedFiles(f"{info.parent_dir / info.name} cannot be read: {error}") from error
    if store.shape != shape:
        raise ValueError(
            f"{info.name} is {list(store.shape)} in the checkpoint {info.parent_dir}, this model's is "
            f"{list(shape)}: it is a checkpoint of another model"
        )
    return jax.make_array_from_callback(array.shape, array.sharding, lambda index: shards[str(index)])


def _padded(part: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a shard from the part of it that is not padding."""
    if part.shape == shape:
        return part
    padding = [(0, size - inside) for size, inside in zip(shape, part.shape, strict=True)]
    return np.pad(part, padding)
