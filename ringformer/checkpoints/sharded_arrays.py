"""A sharded array on disk: a zarr array of its logical shape, which every process writes and reads its own shards of.

Padding is cut off on the host after a shard is copied there, and put on before it is copied back: no program runs on a
device, and no device holds more than its shards. A chunk never crosses the border of a shard, so no two processes write
the same one. Each process hashes the chunks that it wrote, before it reads them back. Orbax keeps charge of the folder,
its metadata and its atomicity (`checkpoints/tree.py`); a `TypeHandler` says what a leaf is.
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

from ringformer.checkpoints.tree import PlainFiles
from ringformer.files.manifest import Hashes, hash_of, write_part

CHUNK_BYTES = 64 * 2**20
CHUNKS_AT_ONCE = 8
"""Of a process, in writing: what is encoded takes host memory beside the shards."""


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
class _Writing:
    """What a process writes of an array: its metadata, and chunks on the host by their place in the array."""

    metadata: dict[str, Any]
    chunks: list[tuple[tuple[slice, ...], np.ndarray]]


class _Handler(ocp.type_handlers.TypeHandler):
    """Saves `Saved` and restores `jax.Array`s, whoever wrote them: this handler, Orbax's own, `convert/`."""

    failure: BaseException | None = None
    """Why the writing of this process failed, as soon as it has: Orbax tells when the other processes have waited."""

    def typestr(self) -> str:
        return "jax.Array"  # what others will restore it as

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
        writing = [_writing(value) for value in values]
        return [ocp.future.CommitFutureAwaitingContractedSignals(self._write(writing, infos), name="sharded_arrays")]

    async def _write(self, writing, infos):
        try:
            await _write(writing, infos)
        except BaseException as error:
            self.failure = error
            raise

    async def deserialize(self, infos, args=None):
        return [await _read(info, arg) for info, arg in zip(infos, args, strict=True)]


def checkpoint_handler() -> PlainFiles:
    """The handler of trees whose leaves are `Saved`, and `Restored` in the arguments of a restore."""
    return PlainFiles(Saved, _Handler(), hashing_processes=jax.process_count())


def location(info: ocp.type_handlers.ParamInfo) -> dict[str, Any]:
    """The tensorstore spec of a leaf, to open and read it. A chunk that is missing is an error, not zeros."""
    files: dict[str, Any] = {"driver": "file", "path": f"{info.parent_dir / info.name}/"}
    if info.is_ocdbt_checkpoint:
        base = {"driver": "file", "path": f"{info.parent_dir}/"}
        files = {"driver": "ocdbt", "base": base, "path": f"{info.name}/"}
    return {
        "driver": "zarr3" if info.use_zarr3 else "zarr",
        "kvstore": files,
        "recheck_cached_data": False,
        "fill_missing_data_reads": False,
    }


def array_metadata(shape: tuple[int, ...], chunk: tuple[int, ...], dtype: np.dtype) -> dict[str, Any]:
    """What a new array's spec says beyond `location`. Zeros are written too, so that a missing chunk is one."""
    name = dtype.name if dtype.name == "bfloat16" else dtype.str
    zarr = {"shape": shape, "chunks": chunk, "dtype": name, "compressor": {"id": "zstd", "level": 1}}
    return {"metadata": zarr, "store_data_equal_to_fill_value": True}


def _written(array: jax.Array) -> list[jax.Shard]:
    """The shards that this process writes: of replicas the first."""
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


def _writing(value: Saved) -> _Writing:
    array, shape = value.array, value.shape
    chunk, dim = _chunk(shape, array.sharding.shard_shape(array.shape), array.dtype.itemsize)
    chunks = []
    for shard in _written(array):
        host, place = np.asarray(shard.data), _inside(shard.index, shape)
        if all(p.start < p.stop for p in place):
            host = host[tuple(slice(p.stop - p.start) for p in place)]
            chunks += [(index, host[part]) for index, part in _split(place, chunk, dim)]
    return _Writing(array_metadata(shape, chunk, array.dtype), chunks)


def _chunk(shape: tuple[int, ...], shard: tuple[int, ...], itemsize: int) -> tuple[tuple[int, ...], int | None]:
    """The shape of a chunk, and the dimension along which a shard is cut into them: its first that lies whole on a
    device, the layers of a stacked weight. Few layers: a reader of one need not decode them all."""
    dim = next((i for i, (whole, part) in enumerate(zip(shape, shard, strict=True)) if whole == part), None)
    if dim is None:
        return shard, None
    row = itemsize * int(np.prod(shard[:dim] + shard[dim + 1 :]))
    rows = min(max(1, CHUNK_BYTES // row), shape[dim])
    return (*shard[:dim], rows, *shard[dim + 1 :]), dim


def _split(
    place: tuple[slice, ...], chunk: tuple[int, ...], dim: int | None
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Each chunk of a shard at `place`: where it lies in the array, and in the shard."""
    if dim is None:
        yield place, tuple(slice(None) for _ in place)
        return
    for start in range(0, place[dim].stop, chunk[dim]):
        rows = slice(start, min(start + chunk[dim], place[dim].stop))
        yield (*place[:dim], rows, *place[dim + 1 :]), (*(slice(None) for _ in range(dim)), rows)


def _inside(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The part of a shard that is not padding; empty if start == stop in some dimension."""
    bounds = [s.indices(max(n, s.stop or 0)) for s, n in zip(index, shape, strict=True)]
    return tuple(slice(min(start, n), min(stop, n)) for (start, stop, _), n in zip(bounds, shape, strict=True))


async def _write(writing: list[_Writing], infos) -> None:
    """Write and read back every chunk. Raises OSError if what is read is not what was written, to the bit."""
    under_way: deque = deque()
    hashes: Hashes = {}

    async def read_back():
        write, name, file, reader, index, host = under_way.popleft()
        try:
            await write
            hashes[file] = hash_of(folder / file)  # first: the contents that are compared are these, or later ones
            found, bits = await reader[index].read(), f"u{host.dtype.itemsize}"
        except ValueError as error:  # tensorstore's, of a full disk for example
            raise OSError(f"{name} cannot be written, or not read back: {error}") from error
        if not np.array_equal(found.view(bits), host.view(bits)):
            raise OSError(f"{name}: the disk does not give back what was written to it at {index}")

    for leaf, info in zip(writing, infos, strict=True):
        await info.await_path_creation()
        folder = Path(info.parent_dir)
        spec = location(info) | leaf.metadata
        if jax.process_index() == 0:
            await ts.open(spec, create=True)
        writer = await ts.open(spec, open=True, assume_metadata=True)
        reader = await ts.open(spec, open=True, assume_metadata=True, context=ts.Context())  # with no cache of writer's
        while leaf.chunks:
            index, host = leaf.chunks.pop()
            if len(under_way) == CHUNKS_AT_ONCE:
                await read_back()
            write = writer[index].write(host, can_reference_source_data_indefinitely=True)
            under_way.append((write, info.name, f"{info.name}/{_file(index, leaf)}", reader, index, host))
    while under_way:
        await read_back()
    write_part(folder, jax.process_index(), hashes)


def _file(index: tuple[slice, ...], leaf: _Writing) -> str:
    """The file in which zarr keeps the chunk that stands at `index`."""
    chunk = leaf.metadata["metadata"]["chunks"]
    return ".".join(str(place.start // size) for place, size in zip(index, chunk, strict=True)) or "0"


async def _read(info, arg: Restored) -> jax.Array:
    """The array, each of its shards read into host memory of its own, which nothing else keeps."""
    array, shape = arg.array, arg.logical_shape
    store = await ts.open(location(info), open=True)
    if store.shape != shape:
        raise ValueError(
            f"{info.name} is {list(store.shape)} in the checkpoint {info.parent_dir}, this model's is "
            f"{list(shape)}: it is a checkpoint of another model"
        )
    store = ts.cast(store, array.dtype)
    local = array.sharding.shard_shape(array.shape)

    indices = array.sharding.addressable_devices_indices_map(array.shape)
    places = {str(index): _inside(index, shape) for index in indices.values()}
    reads = {index: store[place].read() for index, place in places.items() if all(p.start < p.stop for p in place)}
    try:
        parts = {index: await read for index, read in reads.items()}
    except Exception as error:  # tensorstore has no type of its own for what it cannot read
        raise OSError(
            f"{info.name} cannot be read in {info.parent_dir} ({error}): this checkpoint is damaged; delete "
            f"{info.parent_dir.parent} to go on from the one before"
        ) from error
    shards = {index: _padded(parts.get(index), local, array.dtype) for index in places}
    return jax.make_array_from_callback(array.shape, array.sharding, lambda index: shards[str(index)])


def _padded(part: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A shard from the part of it that is not padding; None: there is none."""
    if part is not None and part.shape == shape:
        return part
    shard = np.zeros(shape, dtype)
    if part is not None:
        shard[tuple(map(slice, part.shape))] = part
    return shard
