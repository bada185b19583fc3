"""Files of zarr chunks that are in memory: tensorstore decodes them, or verifies their checksum alone.

A chunk's file ends with the CRC-32C of everything before it, the `crc32c` codec of zarr 3.
"""

from typing import Any

import tensorstore as ts


def stored_array(driver: str, metadata: dict[str, Any], chunks: dict[str, bytes]) -> ts.TensorStore:
    """An array whose chunks are in memory: the contents of their files, by the names of the files.

    Args:
      driver: "zarr" for version 2 of the format, "zarr3" for version 3.
      metadata: the content of the array's .zarray or zarr.json.
    """
    memory = ts.Context()
    files = ts.KvStore.open({"driver": "memory"}, context=memory).result()
    for name, content in chunks.items():
        files[name] = content
    spec = {"driver": driver, "kvstore": {"driver": "memory"}, "metadata": metadata, "fill_missing_data_reads": False}
    return ts.open(spec, open=True, assume_metadata=True, context=memory).result()


def has_valid_crc32c(content: bytes) -> bool:
    """True if the last four bytes are the CRC-32C of the others, which are not decompressed."""
    size = len(content) - 4
    metadata = {
        "shape": [size],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [size]}},
        "chunk_key_encoding": {"name": "v2"},
        "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
    }
    if size < 1:
        return False
    try:
        stored_array("zarr3", metadata, {"0": content})[:1].read().result()
    except ValueError:  # tensorstore's, of data that are lost
        return False
    return True
