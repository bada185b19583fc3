"""Read folders of safetensors files slice by slice, and write them shard by shard."""

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ringformer.files.untrusted import contained, read_object

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""Supported dtypes, by their code in a file."""
CODES = {dtype.name: name for name, dtype in DTYPES.items()}


class TensorFolder:
    """Tensors of a checkpoint in one file or, with an index, in several. No file stays mapped.

    Raises ValueError for a file that is malformed or outside the folder, FileNotFoundError for one that is missing.
    """

    def __init__(self, folder: Path):
        index, single = (contained(folder, name) for name in ("model.safetensors.index.json", "model.safetensors"))
        if index.is_file():
            places = read_object(folder, index.name).get("weight_map")
            if not places or type(places) is not dict:
                raise ValueError(f"{index} lacks the weight_map that names the file of each tensor: download it again")
            files = sorted({contained(folder, name) for name in places.values()})
        elif single.is_file():
            files = [single]
        else:
            raise FileNotFoundError(
                f"{folder} has neither model.safetensors nor model.safetensors.index.json: save the model with "
                "transformers' save_pretrained(..., safe_serialization=True) first"
            )
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise FileNotFoundError(f"{folder} lacks {', '.join(absent)}, which {index.name} names")
        self._file: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for path in files:
            try:
                self._list(path)
            except SafetensorError as error:
                raise ValueError(
                    f"{path} is not a complete safetensors file ({error}): download it again; if it is a Git LFS "
                    "pointer of a few lines, run git lfs pull"
                ) from None

    def _list(self, path: Path) -> None:
        with safe_open(path, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118, not a dict
                tensor = file.get_slice(key)
                if other := self._file.get(key):
                    raise ValueError(f"{key} is in {other.name} and in {path.name}: remove the wrong one")
                self._file[key] = path
                self.shapes[key] = tuple(tensor.get_shape())
                self.dtypes[key] = tensor.get_dtype()

    def blocks(self, name: str, rows: Iterable[slice]) -> Iterator[np.ndarray]:
        """Yield slices of rows of a tensor without loading the rest."""
        with safe_open(self._file[name], framework="numpy") as file:
            tensor = file.get_slice(name)
            for part in rows:
                yield tensor[part]


class ShardWriter:
    """Writer of tensors, in the order of `plan`, into files of at most `shard_bytes` (or one tensor), with an index.

    Args:
      plan: shape of each tensor by name.
    """

    def __init__(self, folder: Path, plan: dict[str, tuple[int, ...]], dtype: np.dtype, shard_bytes: int):
        self._folder, self._dtype = folder, dtype
        sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, shape in plan.items()}
        shards: list[dict[str, Any]] = []
        filled = shard_bytes
        for name, shape in plan.items():
            if not shards or filled + sizes[name] > shard_bytes:
                shards.append({})
                filled = 0
            offsets = [filled, filled + sizes[name]]
            shards[-1][name] = {"dtype": CODES[dtype.name], "shape": list(shape), "data_offsets": offsets}
            filled += sizes[name]
        n = len(shards)
        files = [f"model-{i + 1:05d}-of-{n:05d}.safetensors" if n > 1 else "model.safetensors" for i in range(n)]
        self._shards = dict(zip(files, shards, strict=True))
        if n > 1:
            index = {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": {name: file for file, shard in self._shards.items() for name in shard},
            }
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    @contextmanager
    def _open(self, file: str, shard: dict[str, Any]):
        header = json.dumps({"__metadata__": {"format": "pt"}, **shard}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)  # align the data
        with (self._folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(header)) + header)
            yield stream

    def write(self, blocks: Callable[[str], Iterable[np.ndarray]]) -> None:
        """Write all tensors; `blocks(name)` yields the rows of one, piece by piece."""
        for file, shard in self._shards.items():
            with self._open(file, shard) as stream:
                for name, entry in shard.items():
                    start = stream.tell()
                    for block in blocks(name):
                        stream.write(np.ascontiguousarray(block, self._dtype).view(np.uint8).data)
                    first, last = entry["data_offsets"]
                    assert stream.tell() - start == last - first, f"{name} has {stream.tell() - start} bytes"


def cast(block: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Convert a block to another dtype. Raises ValueError if it is not finite, or not finite in that dtype."""
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(block, dtype)
    if not np.isfinite(converted).all():
        if not np.isfinite(block).all():
            raise ValueError(
                f"{name} has values that are not finite (NaN or infinity): use an earlier checkpoint, or download it "
                "again"
            )
        others = "bfloat16 or float32" if dtype == np.float16 else "float32"
        raise ValueError(
            f"{name} has values beyond {dtype.name}'s {float(ml_dtypes.finfo(dtype).max):g}: choose --dtype={others}"
        )
    return converted
