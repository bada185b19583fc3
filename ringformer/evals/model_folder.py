"""The model that is evaluated: a run's, a converted one, or a Hugging Face checkpoint, converted for the while."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ringformer.checkpoints.saved_model import checkpoint_hash, latest_step
from ringformer.convert.import_hf import from_hf
from ringformer.files.hashes import hash_file, hash_object
from ringformer.files.run_layout import CHECKPOINTS
from ringformer.files.untrusted import read_object

STORED = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
"""The dtypes of Hugging Face that a conversion keeps as they are; of others it makes float32."""


def is_hugging_face(run: str | Path) -> bool:
    """Whether a folder holds a Hugging Face checkpoint, and no run or converted model."""
    config = read_object(run, "config.json") if (Path(run) / "config.json").is_file() else {}
    return "model_type" in config and "model" not in config


@contextmanager
def model_folder(run: str | Path, say: Callable[[str], None]) -> Iterator[Path]:
    """The folder of a run or of a converted model: `run` itself, or a temporary one if it is a Hugging Face checkpoint.

    Raises ValueError for a Hugging Face checkpoint that cannot be converted.
    """
    run = Path(run)
    if not is_hugging_face(run):
        yield run
        return
    config = read_object(run, "config.json")
    with tempfile.TemporaryDirectory(prefix="ringformer-eval-") as folder:
        dtype = STORED.get(str(config.get("dtype") or config.get("torch_dtype")), "float32")
        say(f"{run} is of Hugging Face: converted in {dtype} to {folder}, which is deleted at the end")
        from_hf(run, Path(folder) / "model", dtype)
        yield Path(folder) / "model"


def identity(run: str | Path) -> dict[str, Any]:
    """What a file of cases says of the model: the folder that was named, and of its checkpoint the step and the hash;
    of a Hugging Face checkpoint the hash of its weights."""
    folder, step = Path(run).resolve(), latest_step(run)
    if step is not None:
        found = checkpoint_hash(folder / CHECKPOINTS / str(step))
    else:
        weights = sorted(folder.glob("*.safetensors"))
        found = hash_object({path.name: hash_file(path) for path in (folder / "config.json", *weights)})
    return {"run": str(folder), "step": step, "checkpoint": found}


def check_lengths(lengths: Sequence[int], context: int | None, *, allow_longer: bool) -> None:
    """Raise ValueError for lengths that are none, or beyond the context that the model was configured for."""
    if wrong := [length for length in lengths if length < 2]:
        raise ValueError(f"--lengths: {wrong[0]} tokens are no context")
    if context is not None and max(lengths) > context and not allow_longer:
        raise ValueError(
            f"--lengths: {max(lengths):,} tokens are more than the {context:,} that the model was configured for: "
            "--allow_longer, to see where it breaks"
        )
