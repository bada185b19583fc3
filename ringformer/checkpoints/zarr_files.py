"""Arrays as folders of zarr files: each chunk is read back after it is written, and compared before it is decoded.

NAME/zarr.json    shape, dtype, chunks, codecs (.zarray in version 2, which was written until 2026-11)
NAME/0.0          a chunk: zstd, then the CRC-32C of the compressed bytes

The file of a chunk is read into memory once; the bytes that are compared with the manifest are the bytes that are
decoded.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from ringformer.files.atomic import read_back
from ringformer.files.chunks import stored_array
from ringformer.files.json_text import parse_json
from ringformer.files.manifest import DIFFERS, DamagedFiles, Hashes, chunk_entry_of, read_verified

CHUNKS_AT_ONCE = 8
"""Chunks that a process encodes or decodes at once; they take host memory in addition to the shards."""

Info: TypeAlias = ocp.type_handlers.ParamInfo
Place = tuple[slice, ...]
"""Place of a block of numbers in its array."""


class Leaf(NamedTuple):
    """Array to write: its location, its metadata, and its chunks with their places."""

    info: Info
    metadata: dict[str, Any]
    blocks: Iterable[tuple[Place, np.ndarray]]


def location(info: Info) -> dict[str, Any]:
    """Return the tensorstore spec that opens a leaf. A missing chunk is an error, not zeros."""
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


async def write_arrays(leaves: Iterable[Leaf], *, create: bool) -> Hashes:
    """Write chunks, read each back from the disk, and return the manifest's entries of their files.

    Args:
      create: True to write the arrays' metadata too, as one of the processes must.

    Raises OSError if the disk refuses a chunk, or does not return exactly the bits that were written.
    """
    hashes: Hashes = {}
    under_way: deque[asyncio.Task[Any]] = deque()

    async def write(store: ts.TensorStore, leaf: Leaf, place: Place, block: np.ndarray) -> None:
        name = leaf.info.name
        key = _key([p.start or 0 for p in place], _chunk(leaf.metadata))
        try:
            await store[place].write(block, can_reference_source_data_indefinitely=True)
            content = await asyncio.to_thread(read_back, Path(leaf.info.parent_dir, name, key))
            stored = await stored_array("zarr3", leaf.metadata, {key: content})[place].read()
        except (ValueError, OSError) as error:  # tensorstore's, for example for a full disk
            raise OSError(f"{name} cannot be written, or not read back: {error}") from error
        bits = f"u{block.dtype.itemsize}"
        if not np.array_equal(stored.view(bits), block.view(bits)):
            raise OSError(f"{name}: the disk does not return what was written to it at {place}")
        hashes[f"{name}/{key}"] = chunk_entry_of(content)

    try:
        for leaf in leaves:
            await leaf.info.await_path_creation()
            # Chunks of zeros are written too, so a missing chunk must have been lost.
            spec = location(leaf.info) | {"metadata": leaf.metadata, "store_data_equal_to_fill_value": True}
            if create:
                await ts.open(spec, create=True)
            store = await ts.open(spec, open=True, assume_metadata=True)
            for place, block in leaf.blocks:
                if len(under_way) == CHUNKS_AT_ONCE:
                    await under_way.popleft()
                under_way.append(asyncio.create_task(write(store, leaf, place, block)))
        while under_way:
            await under_way.popleft()
    finally:  # even after a failure: nothing may be written once the folder is being removed
        await asyncio.gather(*under_way, return_exceptions=True)
    return hashes


def array_context(cache_bytes: int = 0) -> ts.Context:
    """Return a context for opening arrays, which share `CHUNKS_AT_ONCE` and a cache of decoded chunks."""
    return ts.Context(
        {"cache_pool": {"total_bytes_limit": cache_bytes}, "data_copy_concurrency": {"limit": CHUNKS_AT_ONCE}}
    )


async def open_array(info: Info, hashes: Hashes | None, context: ts.Context) -> ts.TensorStore:
    """Open a stored array, whose reads raise DamagedFiles for a file that differs from what was written.

    Args:
      hashes: manifest of the array's folder; None: files are not compared.
      context: from `array_context`.
    """
    if hashes is None:
        return await ts.open(location(info), open=True, context=context)
    driver, metadata_file = ("zarr3", "zarr.json") if info.use_zarr3 else ("zarr", ".zarray")
    folder = Path(info.parent_dir)
    metadata = parse_json(read_verified(folder, f"{info.name}/{metadata_file}", hashes))
    array = stored_array(driver, metadata, {})
    chunk = _chunk(metadata)

    def read(domain: ts.IndexDomain, block: np.ndarray, _) -> None:
        key = _key(domain.inclusive_min, chunk)
        file = f"{info.name}/{key}"
        content = read_verified(folder, file, hashes, verify_crc=False)
        try:
            block[...] = stored_array(driver, metadata, {key: content})[domain].read().result()
        except ValueError as error:  # tensorstore's, for example for a wrong CRC-32C
            raise DamagedFiles(f"{folder / file} {DIFFERS}") from error

    layout = ts.ChunkLayout(read_chunk_shape=chunk)
    return ts.virtual_chunked(read, dtype=array.dtype, domain=array.domain, chunk_layout=layout, context=context)


def _chunk(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of a chunk, from the metadata of either version."""
    grid = metadata.get("chunk_grid")
    return tuple(grid["configuration"]["chunk_shape"] if grid else metadata["chunks"])


def _key(start: Iterable[int], chunk: tuple[int, ...]) -> str:
    """Return the name of the file with the chunk that begins at `start`."""
    return ".".join(str(first // size) for first, size in zip(start, chunk, strict=True)) or "0"
