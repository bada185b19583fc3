"""Chunks of zarr arrays in memory: tensorstore decodes them, or only verifies their checksums.

The file of a chunk ends with the CRC-32C of everything before it, the `crc32c` codec of zarr 3.
"""

from typing import Any

import numpy as np
import tensorstore as ts


def array_metadata(
    shape: tuple[int, ...], chunk: tuple[int, ...], dtype: np.dtype, *, compressed: bool = True
) -> dict[str, Any]:
    """Return the content of an array's zarr.json.

    Args:
      shape, chunk: shapes of the array and of a chunk.
      compressed: True if chunks are compressed with zstd before the checksum is added.
    """
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if compressed:
        codecs.append({"name": "zstd", "configuration": {"level": 1}})
    codecs.append({"name": "crc32c"})
    return {
        "shape": shape,
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "v2"},  # "0.1", beside zarr.json: no folder for each dimension
        "codecs": codecs,
    }


def stored_array(driver: str, metadata: dict[str, Any], chunks: dict[str, bytes]) -> ts.TensorStore:
    """Open an array whose chunks are in memory.

    Args:
      driver: "zarr" for version 2 of the format, "zarr3" for version 3.
      metadata: content of the array's .zarray or zarr.json.
      chunks: contents of the chunks' files, by file name.
    """
    memory = ts.Context()
    files = ts.KvStore.open({"driver": "memory"}, context=memory).result()
    for name, content in chunks.items():
        files[name] = content
    spec = {"driver": driver, "kvstore": {"driver": "memory"}, "metadata": metadata, "fill_missing_data_reads": False}
    return ts.open(spec, open=True, assume_metadata=True, context=memory).result()


def has_valid_crc32c(content: bytes) -> bool:
    """Return True if the last four bytes are the CRC-32C of the others. Nothing is decompressed."""
    size = len(content) - 4
    if size < 1:
        return False
    metadata = array_metadata((size,), (size,), np.dtype(np.uint8), compressed=False)
    try:
        stored_array("zarr3", metadata, {"0": content})[:1].read().result()
    except ValueError:  # tensorstore's error for a wrong checksum
        return False
    return True
