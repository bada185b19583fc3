"""A run's checkpoint to a folder that transformers loads."""

import json
import shutil
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringformer.convert.block_streams import open_streams
from ringformer.convert.hf_config import to_hf_config
from ringformer.convert.hf_weights import weights
from ringformer.convert.safetensors_files import DTYPES, NAMES, ShardWriter, cast
from ringformer.data import load_tokenizer
from ringformer.models.llama_config import LlamaConfig
from ringformer.train.checkpoints import CARRIED, HF_CONFIG, latest_checkpoint
from ringformer.untrusted_files import contained, contained_files, read_object

ORIGINAL = "as the Hugging Face model that it came from"


class Exported(NamedTuple):
    """What was written."""

    config: LlamaConfig
    dtype: str
    why: str
    """Of the dtype: "as asked", "as stored" or that of the model it came from."""


def to_hf(run_dir: str | Path, out: str | Path, dtype: str | None = None, shard_bytes: int = 5 * 10**9) -> Exported:
    """Write the parameters of a run's latest checkpoint to the folder `out`: safetensors, config.json, tokenizer.

    Needs host memory for a few blocks and a cache of one layer's largest matrix (`streams.CACHE_BYTES`).

    Args:
      run_dir: of a training run or of `from_hf`.
      dtype: float32, bfloat16 or float16; None: that of the Hugging Face model that the run began with (a run's own is
        float32, twice as large), or as stored if there was none.
      shard_bytes: the largest file, unless one tensor alone is larger.

    Raises:
      ValueError: if `out` holds something, or the numbers do not fit the dtype or are not finite.
      FileNotFoundError: if there is no checkpoint.
    """
    run_dir, out = Path(run_dir), Path(out)
    if dtype is not None and dtype not in NAMES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(NAMES)}")
    if shard_bytes < 1:
        raise ValueError(f"shards of {shard_bytes} bytes hold nothing: 5 GB is usual")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder: choose another one, or delete it")
    checkpoint = latest_checkpoint(run_dir)
    run, carried = read_object(run_dir, "config.json"), contained_files(run_dir, CARRIED)
    config = LlamaConfig(**run["model"])
    stored = open_streams(checkpoint, config)
    original, why = _original_dtype(run_dir), "as asked"
    if dtype is None:
        dtype, why = original or stored["embed",].dtype.numpy_dtype.name, ORIGINAL if original else "as stored"
    target = DTYPES[NAMES[dtype]]
    described = to_hf_config(
        config, max_position=_max_position(run_dir, run, config), dtype=target.name, token_ids=_token_ids(run_dir, run)
    )

    place = {name: (w, layer) for w in weights(config) for layer, name in enumerate(w.names)}
    names = sorted(place, key=lambda name: (_floor(name), place[name][1]))

    def blocks(name: str):
        weight, layer = place[name]
        for block in weight.blocks(layer):
            found = stored[weight.path][block.index].read().result()
            yield cast(weight.to_tensor(found), target, name)

    out.parent.mkdir(parents=True, exist_ok=True)
    building = out.parent / f"{out.name}.building-{uuid.uuid4().hex[:8]}"
    try:
        building.mkdir()
        plan = {name: place[name][0].tensor_shape for name in names}
        ShardWriter(building, plan, np.dtype(target), shard_bytes).write(blocks)
        for file in carried:
            shutil.copyfile(file, building / file.name)
        (building / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        building.rename(out)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return Exported(config, target.name, why)


def _floor(name: str) -> int:
    """Embedding, layers, norm, head: the order in which the model reads its tensors."""
    return next(
        i for i, start in enumerate(("model.embed", "model.layers", "model.norm", "")) if name.startswith(start)
    )


def _hf_config(run_dir: Path) -> dict[str, Any]:
    return read_object(run_dir, HF_CONFIG) if contained(run_dir, HF_CONFIG).is_file() else {}


def _original_dtype(run_dir: Path) -> str | None:
    """That of the imported model, as its config.json says; None if it does not, or one that no export has."""
    hf = _hf_config(run_dir)
    named = hf.get("dtype") or hf.get("torch_dtype")  # transformers 5 and 4
    return named if named in tuple(NAMES) else None


def _max_position(run_dir: Path, run: dict[str, Any], config: LlamaConfig) -> int:
    """The longest context known: of the imported model, of the run, of the scaling."""
    scaling = config.rope_scaling
    scaled = int((scaling.original_max_position or 0) * (scaling.factor or 1))
    return max(_hf_config(run_dir).get("max_position_embeddings", 0), run.get("seq_len", 0), scaled) or 2048


def _token_ids(run_dir: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Those of the imported model, or else the tokenizer's end of a document."""
    keys, imported = ("bos_token_id", "eos_token_id", "pad_token_id"), _hf_config(run_dir)
    if imported:
        defaults = {"bos_token_id": 1, "eos_token_id": 2}  # transformers'
        return {key: imported.get(key, defaults.get(key)) for key in keys}
    kept = run_dir / "tokenizer.model"
    tokenizer = load_tokenizer(str(kept) if kept.is_file() else run["data"]["tokenizer"])
    return dict.fromkeys(keys) | {"eos_token_id": tokenizer.eos_id}
