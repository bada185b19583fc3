"""Checkpoints as they were written before: in zarr 2 with xxh3 hashes (until 2026-11), or without hashes."""

import json

import tensorstore as ts

from ringformer.checkpoints.array_folder import WRITTEN_LAST
from ringformer.files.manifest import MANIFEST, write_manifest


def to_zarr2(folder):
    """Rewrite the arrays of a saved tree in version 2 of the format, chunk by chunk, with a manifest of xxh3 hashes."""
    for described in sorted(folder.glob("*/zarr.json")):
        kvstore = {"driver": "file", "path": f"{described.parent}/"}
        array = ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()
        numbers, name = array.read().result(), array.dtype.name
        for file in described.parent.iterdir():
            file.unlink()
        zarr = {
            "shape": array.shape,
            "chunks": array.chunk_layout.read_chunk.shape or (),
            "dtype": name if name == "bfloat16" else array.dtype.numpy_dtype.str,
            "compressor": {"id": "zstd", "level": 1},
        }
        spec = {"driver": "zarr", "kvstore": kvstore, "metadata": zarr, "store_data_equal_to_fill_value": True}
        ts.open(spec, create=True).result().write(numbers).result()
    _describe(folder, use_zarr3=False)
    (folder / MANIFEST).unlink()
    write_manifest(folder, but=WRITTEN_LAST)


def without_hashes(folder):
    """Remove all that a tree has of hashes."""
    (folder / MANIFEST).unlink()
    _describe(folder, custom_metadata=None)


def _describe(folder, **changes):
    tree = folder / "_METADATA"
    tree.write_text(json.dumps(json.loads(tree.read_text()) | changes))
