"""Export of a run's checkpoint to a folder that transformers loads."""

import json
import shutil
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringformer.checkpoints.saved_model import latest_checkpoint, model_of
from ringformer.convert.block_streams import open_streams
from ringformer.convert.hf_config import to_hf_config
from ringformer.convert.hf_weights import weights
from ringformer.convert.safetensors_files import CODES, DTYPES, ShardWriter, cast
from ringformer.data.tokenizers.load import load_tokenizer
from ringformer.files.run_layout import CARRIED, CONFIG, HF_CONFIG
from ringformer.files.untrusted import contained, contained_files, read_object
from ringformer.models.llama_config import LlamaConfig

ORIGINAL = "as the Hugging Face model that it came from"


class Exported(NamedTuple):
    """Model that was written, and its dtype."""

    config: LlamaConfig
    dtype: str
    dtype_origin: str
    """Reason for this dtype: "as asked", "as stored" or that of the original model."""


def to_hf(run_dir: str | Path, out: str | Path, dtype: str | None = None, shard_bytes: int = 5 * 10**9) -> Exported:
    """Write the parameters of a run's latest checkpoint to the folder `out`: safetensors, config.json, tokenizer.

    Needs host memory for a few blocks and a cache of one layer's largest matrix (`block_streams.CACHE_BYTES`).

    Args:
      run_dir: the folder of a training run, or one that `from_hf` wrote.
      dtype: float32, bfloat16 or float16; None: that of the Hugging Face model that the run began with (the run itself
        has float32, twice as large), or as stored if there was none.
      shard_bytes: maximum size of a file, unless a single tensor is larger.

    Raises:
      ValueError: if `out` is not empty, or values do not fit the dtype or are not finite.
      FileNotFoundError: if there is no checkpoint.
      DamagedFiles: if files of the checkpoint, or of a converted model, have changed.
    """
    run_dir, out = Path(run_dir), Path(out)
    if dtype is not None and dtype not in CODES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(CODES)}")
    if shard_bytes < 1:
        raise ValueError(f"shard size {shard_bytes} must be at least 1 byte; 5 GB is usual")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder: choose another one, or delete it")
    checkpoint = latest_checkpoint(run_dir)
    carried, _ = contained_files(run_dir, CARRIED), contained_files(run_dir, (CONFIG, HF_CONFIG))
    run, config = read_object(run_dir, CONFIG), model_of(run_dir)
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"{run_dir} holds a {type(config).__name__}: only a LLaMA can be exported")
    stored = open_streams(checkpoint, config)
    original, origin = _original_dtype(run_dir), "as asked"
    if dtype is None:
        dtype, origin = original or stored["embed",].dtype.numpy_dtype.name, ORIGINAL if original else "as stored"
    target = DTYPES[CODES[dtype]]
    hf_config = to_hf_config(
        config, max_position=_max_position(run_dir, run, config), dtype=target.name, token_ids=_token_ids(run_dir, run)
    )

    place = {name: (w, layer) for w in weights(config) for layer, name in enumerate(w.names)}
    names = sorted(place, key=lambda name: (_reading_order(name), place[name][1]))

    def blocks(name: str):
        weight, layer = place[name]
        for block in weight.blocks(layer):
            parameter = stored[weight.path][block.index].read().result()
            yield cast(weight.to_tensor(parameter), target, name)

    out.parent.mkdir(parents=True, exist_ok=True)
    building = out.parent / f"{out.name}.building-{uuid.uuid4().hex[:8]}"
    try:
        building.mkdir()
        plan = {name: place[name][0].tensor_shape for name in names}
        ShardWriter(building, plan, np.dtype(target), shard_bytes).write(blocks)
        for file in carried:
            shutil.copyfile(file, building / file.name)
        (building / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
        building.rename(out)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return Exported(config, target.name, origin)


def _reading_order(name: str) -> int:
    """Rank of a tensor in the order in which the model reads them: embedding, layers, norm, head."""
    return next(
        i for i, start in enumerate(("model.embed", "model.layers", "model.norm", "")) if name.startswith(start)
    )


def _hf_config(run_dir: Path) -> dict[str, Any]:
    return read_object(run_dir, HF_CONFIG) if contained(run_dir, HF_CONFIG).is_file() else {}


def _original_dtype(run_dir: Path) -> str | None:
    """Return the dtype that the imported model's config.json names; None if it names none, or a dtype that exports do
    not support."""
    hf = _hf_config(run_dir)
    named = hf.get("dtype") or hf.get("torch_dtype")  # transformers 5 and 4
    return named if named in tuple(CODES) else None


def _max_position(run_dir: Path, run: dict[str, Any], config: LlamaConfig) -> int:
    """Return the longest context named by the imported model, the run or the scaling."""
    scaling = config.rope_scaling
    scaled = int((scaling.original_max_position or 0) * (scaling.factor or 1))
    return max(_hf_config(run_dir).get("max_position_embeddings", 0), run.get("seq_len", 0), scaled) or 2048


def _token_ids(run_dir: Path, run: dict[str, Any]) -> dict[str, Any]:
    """Return the special ids of the imported model, or else the end-of-document id of the tokenizer."""
    keys, imported = ("bos_token_id", "eos_token_id", "pad_token_id"), _hf_config(run_dir)
    if imported:
        defaults = {"bos_token_id": 1, "eos_token_id": 2}  # transformers'
        return {key: imported.get(key, defaults.get(key)) for key in keys}
    copied = run_dir / "tokenizer.model"
    tokenizer = load_tokenizer(str(copied) if copied.is_file() else run["data"]["tokenizer"])
    return dict.fromkeys(keys) | {"eos_token_id": tokenizer.eos_id}
