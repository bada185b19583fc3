"""The model to evaluate: the model of a run, a converted model, or a Hugging Face checkpoint, which is converted
temporarily."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ringformer.checkpoints.saved_model import checkpoint_hash, latest_step
from ringformer.convert.import_hf import from_hf
from ringformer.files.hashes import hash_file, hash_object
from ringformer.files.run_layout import CHECKPOINTS
from ringformer.files.untrusted import read_object

STORED = ("float32", "bfloat16", "float16")
"""Dtypes of Hugging Face tensors that a conversion keeps; it converts all others to float32."""


def is_hugging_face(run: str | Path) -> bool:
    """Return True if a folder holds a Hugging Face checkpoint, not a run or a converted model."""
    if not (Path(run) / "config.json").is_file():
        return False
    config = read_object(run, "config.json")
    return "model_type" in config and "model" not in config


@contextmanager
def model_folder(run: str | Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Yield the folder of a run or converted model: `run` itself, or a temporary one for a Hugging Face checkpoint.

    Raises ValueError for a Hugging Face checkpoint that cannot be converted.
    """
    run = Path(run)
    if not is_hugging_face(run):
        yield run
        return
    config = read_object(run, "config.json")
    with tempfile.TemporaryDirectory(prefix="ringformer-eval-") as folder:
        stored = config.get("dtype") or config.get("torch_dtype")
        dtype = stored if stored in STORED else "float32"
        say(f"{run} is a Hugging Face checkpoint: converted in {dtype} to {folder}, which is deleted at the end")
        from_hf(run, Path(folder) / "model", dtype)
        yield Path(folder) / "model"


def identity(run: str | Path) -> dict[str, Any]:
    """Identify the model in a file of cases: its folder, and the step and hash of its checkpoint, or the hash of a
    Hugging Face checkpoint's weights."""
    folder = Path(run).resolve()
    step = latest_step(run)
    if step is not None:
        digest = checkpoint_hash(folder / CHECKPOINTS / str(step))
    else:
        weights = sorted(folder.glob("*.safetensors"))
        digest = hash_object({path.name: hash_file(path) for path in (folder / "config.json", *weights)})
    return {"run": str(folder), "step": step, "checkpoint": digest}
