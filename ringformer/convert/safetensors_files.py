"""Read folders of safetensors files slice by slice, and write them shard by shard."""

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ringformer.files.untrusted import contained, read_object

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Supported dtypes, by their code in a file."""
CODES: dict[str, str] = {dtype.name: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"


def supported_dtype(name: str) -> np.dtype:
    """Return the dtype of that name. Raises ValueError, naming the supported dtypes, for any other name."""
    if name not in CODES:
        raise ValueError(f"unknown dtype {name!r}; known: {', '.join(CODES)}")
    return DTYPES[CODES[name]]


class TensorFolder:
    """Tensors of a checkpoint in one safetensors file or, with an index, in several. Files are mapped only while read.

    Args:
      file: name of the file if there is one.
      wrapped: the checkpoint is that of a vision model; only the tensors of its text model are used, under the names
        that they have in the text model alone.

    Raises ValueError for a file that is malformed or outside the folder, FileNotFoundError for one that is missing.
    """

    def __init__(self, folder: Path, file: str = "model.safetensors", wrapped: bool = False):
        index = contained(folder, INDEX)
        single = contained(folder, file)
        if index.is_file():
            places = read_object(folder, INDEX).get("weight_map")
            if not places or type(places) is not dict:
                raise ValueError(f"{index} lacks the weight_map that names the file of each tensor: download it again")
            files = sorted({contained(folder, name) for name in places.values()})
        elif single.is_file():
            files = [single]
        else:
            raise FileNotFoundError(
                f"{folder} has neither {single.name} nor {INDEX}: save the model with "
                "transformers' save_pretrained(..., safe_serialization=True) first"
            )
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise FileNotFoundError(f"{folder} lacks {', '.join(absent)}, which {INDEX} names")
        self._place: dict[str, tuple[Path, str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for path in files:
            try:
                self._add(path, wrapped)
            except SafetensorError as error:
                raise ValueError(
                    f"{path} is not a complete safetensors file ({error}): download it again; if it is a Git LFS "
                    "pointer of a few lines, run git lfs pull"
                ) from None

    def _add(self, path: Path, wrapped: bool) -> None:
        """Add the tensors of a file. Raises ValueError if another file has one of them, too."""
        with safe_open(path, framework="numpy") as opened:
            for key in opened.keys():  # noqa: SIM118, not a dict
                name = _text_name(key) if wrapped else key
                if name is None:
                    continue
                if other := self._place.get(name):
                    raise ValueError(f"{key} is in {other[0].name} and in {path.name}: remove the wrong one")
                tensor = opened.get_slice(key)
                self._place[name] = (path, key)
                self.shapes[name] = tuple(tensor.get_shape())
                self.dtypes[name] = tensor.get_dtype()

    def read(self, name: str) -> np.ndarray:
        """Read a tensor whole."""
        (tensor,) = self.blocks(name, [slice(None)])
        return tensor

    def blocks(self, name: str, rows: Iterable[slice]) -> Iterator[np.ndarray]:
        """Yield slices of rows of a tensor without loading the rest."""
        path, key = self._place[name]
        with safe_open(path, framework="numpy") as file:
            tensor = file.get_slice(key)
            for part in rows:
                yield tensor[part]


def _text_name(key: str) -> str | None:
    """Return the name that a tensor of a vision model has in its text model alone; None if it is not in it."""
    if key.startswith(
        ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
    ):
        return None
    if key.startswith("model.language_model."):
        return key.replace("model.language_model.", "model.", 1)
    return key.removeprefix("language_model.")


def write_tensors(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    dtype: np.dtype,
    file_bytes: int,
    blocks: Callable[[str], Iterable[np.ndarray]],
) -> None:
    """Write tensors, in the order of `shapes`, to safetensors files, with an index if there are several files.

    Args:
      shapes: shape of each tensor, by name.
      file_bytes: maximum size of a file's tensors, unless a single tensor is larger.
      blocks: function from a tensor's name to its rows, piece by piece.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    shards: list[dict[str, Any]] = []
    end = file_bytes
    for name, shape in shapes.items():
        if not shards or end + sizes[name] > file_bytes:
            shards.append({})
            end = 0
        start = end
        end = end + sizes[name]
        shards[-1][name] = {"dtype": CODES[dtype.name], "shape": list(shape), "data_offsets": [start, end]}
    n = len(shards)
    files = ["model.safetensors"]
    if n > 1:
        files = [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
        places: dict[str, str] = {}
        for file, shard in zip(files, shards, strict=True):
            places |= dict.fromkeys(shard, file)
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for file, shard in zip(files, shards, strict=True):
        header = json.dumps({"__metadata__": {"format": "pt"}, **shard}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)  # align the data
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(header)) + header)
            for name, entry in shard.items():
                for block in blocks(name):
                    stream.write(np.ascontiguousarray(block, dtype).view(np.uint8).data)
                written = stream.tell() - 8 - len(header)
                assert written == entry["data_offsets"][1], f"{name} ends at byte {written}, not as in the header"


def cast(block: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Convert a block of the tensor `name` to another dtype. Raises ValueError if a value is not finite in either
    dtype."""
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
