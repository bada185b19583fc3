"""A sharded array on disk: a zarr array of its logical shape, of which each process writes and reads its own shards.

Padding is cut off on the host after a shard is copied there, and added before it is copied back: no program runs on a
device, and no device holds more than its shards. A chunk never crosses the border of a shard, so no two processes write
the same one. Orbax manages the folder, its metadata and its atomicity (`array_folder.py`); a `TypeHandler` defines what
a leaf is, `zarr_files.py` its files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from ringformer.checkpoints.array_folder import PlainFiles, tree_hashes
from ringformer.checkpoints.zarr_files import (
    Info,
    Leaf,
    Place,
    array_context,
    location,
    open_array,
    write_arrays,
)
from ringformer.files.chunks import array_metadata
from ringformer.files.manifest import DamagedFiles, Hashes, write_part

CHUNK_BYTES = 16 * 2**20
"""Bytes of a chunk's numbers. The allocator maps memory anew for each buffer above 32 MiB: with chunks of 64 MiB a
restore takes twice as long."""


@dataclass
class Saved:
    """A leaf to save: the global array, padded at the end of its dimensions, and the shape without padding."""

    array: jax.Array
    shape: tuple[int, ...]


@dataclass
class Restored(ocp.RestoreArgs):
    """A leaf to restore: shape with padding, dtype and sharding of the array, and the shape without."""

    restore_type: Any = Saved
    array: Any = None  # a jax.ShapeDtypeStruct; the base class makes a default necessary
    logical_shape: tuple[int, ...] = ()


@dataclass
class _Shards:
    """The part of an array that a process writes: its metadata, and chunks on the host by their place in the array."""

    metadata: dict[str, Any]
    chunks: list[tuple[Place, np.ndarray]]

    def taken(self) -> Iterator[tuple[Place, np.ndarray]]:
        """The chunks, each forgotten here as it is taken: its memory is free when it is written."""
        while self.chunks:
            yield self.chunks.pop()


class _Handler(ocp.type_handlers.TypeHandler):
    """Saves `Saved` and restores `jax.Array`s from checkpoints of this handler, of Orbax's own and of `convert/`."""

    failure: BaseException | None = None
    """The error with which this process's write failed, as soon as it has: Orbax raises it after the other processes
    have waited."""
    faults: list[str]
    """Damaged files that a restore met: it goes on, so that no other process waits at Orbax's barriers, and what it
    returns must not be used (`verify.restore_checked`)."""

    def typestr(self) -> str:
        return "jax.Array"  # the type as which others restore it

    async def metadata(self, infos):
        stores = [await ts.open(location(info), open=True) for info in infos]
        return [
            ocp.metadata.ArrayMetadata(info.name, info.parent_dir, store.shape, None, store.dtype.numpy_dtype)
            for info, store in zip(infos, stores, strict=True)
        ]

    async def serialize(self, values, infos, args=None):
        """Copy to the host, and leave the rest to a thread: the arrays may be donated when this returns."""
        for value in values:
            for shard in _written(value.array):
                shard.data.copy_to_host_async()
        shards = [_on_host(value) for value in values]
        return [ocp.future.CommitFutureAwaitingContractedSignals(self._write(shards, infos), name="sharded_arrays")]

    async def _write(self, shards, infos):
        try:
            await _write(shards, infos)
        except BaseException as error:
            self.failure = error
            raise

    async def deserialize(self, infos, args=None):
        self.faults, hashes, arrays = [], None, []
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
    """The handler of trees whose leaves are `Saved`, and `Restored` in the arguments of a restore."""
    return PlainFiles(Saved, _Handler(), jax.process_count())


def _written(array: jax.Array) -> list[jax.Shard]:
    """The shards that this process writes: the first of the replicas."""
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _on_host(value: Saved) -> _Shards:
    array, shape = value.array, value.shape
    chunk, dim = _chunk(shape, array.sharding.shard_shape(array.shape), array.dtype.itemsize)
    chunks = []
    for shard in _written(array):
        host, place = np.asarray(shard.data), _inside(shard.index, shape)
        if all(p.start < p.stop for p in place):
            host = host[tuple(slice(p.stop - p.start) for p in place)]
            chunks += [(index, host[part]) for index, part in _split(place, chunk, dim)]
    return _Shards(array_metadata(shape, chunk, array.dtype), chunks)


def _chunk(shape: tuple[int, ...], shard: tuple[int, ...], itemsize: int) -> tuple[tuple[int, ...], int | None]:
    """The shape of a chunk, and the dimension along which a shard is cut into chunks: the first that is whole on each
    device, for example the layers of a stacked weight. A chunk has few layers: who reads one need not decode all."""
    dim = next((i for i, (whole, part) in enumerate(zip(shape, shard, strict=True)) if whole == part), None)
    if dim is None:
        return shard, None
    row = itemsize * int(np.prod(shard[:dim] + shard[dim + 1 :]))
    rows = min(max(1, CHUNK_BYTES // row), shape[dim])
    return (*shard[:dim], rows, *shard[dim + 1 :]), dim


def _split(place: Place, chunk: tuple[int, ...], dim: int | None) -> Iterator[tuple[Place, Place]]:
    """Each chunk of a shard at `place`: its place in the array, and in the shard."""
    if dim is None:
        yield place, tuple(slice(None) for _ in place)
        return
    for start in range(0, place[dim].stop, chunk[dim]):
        rows = slice(start, min(start + chunk[dim], place[dim].stop))
        yield (*place[:dim], rows, *place[dim + 1 :]), (*(slice(None) for _ in range(dim)), rows)


def _inside(index: Place, shape: tuple[int, ...]) -> Place:
    """The part of a shard that is not padding; empty if start == stop in some dimension."""
    bounds = [s.indices(max(n, s.stop or 0)) for s, n in zip(index, shape, strict=True)]
    return tuple(slice(min(start, n), min(stop, n)) for (start, stop, _), n in zip(bounds, shape, strict=True))


async def _write(shards: list[_Shards], infos: list[Info]) -> None:
    """Write every chunk and read it back; leave the entries of their files to `tree.PlainFiles.finalize`."""
    leaves = (Leaf(info, part.metadata, part.taken()) for part, info in zip(shards, infos, strict=True))
    hashes = await write_arrays(leaves, create=jax.process_index() == 0)
    write_part(Path(infos[0].parent_dir), jax.process_index(), hashes)


async def _read(info: Info, arg: Restored, hashes: Hashes | None) -> jax.Array:
    """The array; each of its shards is read into host memory of its own, which nothing else keeps."""
    array, shape = arg.array, arg.logical_shape
    local = array.sharding.shard_shape(array.shape)
    indices = array.sharding.addressable_devices_indices_map(array.shape)
    places = {str(index): _inside(index, shape) for index in indices.values()}
    try:
        store = await open_array(info, hashes, array_context())
        if store.shape == shape:
            store = ts.cast(store, array.dtype)
            reads = {index: store[p].read() for index, p in places.items() if all(s.start < s.stop for s in p)}
            parts = {index: await read for index, read in reads.items()}
    except DamagedFiles:
        raise
    except Exception as error:  # tensorstore has no type of its own for files that it cannot read
        raise DamagedFiles(f"{info.parent_dir / info.name} cannot be read: {error}") from error
    if store.shape != shape:
        raise ValueError(
            f"{info.name} is {list(store.shape)} in the checkpoint {info.parent_dir}, this model's is "
            f"{list(shape)}: it is a checkpoint of another model"
        )
    shards = {index: _padded(parts.get(index), local, array.dtype) for index in places}
    return jax.make_array_from_callback(array.shape, array.sharding, lambda index: shards[str(index)])


def _padded(part: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A shard from the part of it that is not padding; None if all of it is."""
    if part is not None and part.shape == shape:
        return part
    shard = np.zeros(shape, dtype)
    if part is not None:
        shard[tuple(map(slice, part.shape))] = part
    return shard
