"""Export of a run's checkpoint to a folder that transformers loads."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringformer.checkpoints.saved_model import model_of, run_context
from ringformer.convert.adapters import MergedTensors
from ringformer.convert.hf_config import KEPT, left_out, text_config, to_hf_config
from ringformer.convert.model_card import model_card
from ringformer.convert.output_folder import output_folder
from ringformer.convert.safetensors_files import CODES, cast, supported_dtype, write_tensors
from ringformer.data.tokenizers.load import load_tokenizer
from ringformer.data.tokenizers.special_tokens import MODEL_IDS
from ringformer.files.run_layout import CARD, CARRIED, CONFIG, HF_CONFIG
from ringformer.files.untrusted import contained_files, read_object
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.registry import as_decoder


class Exported(NamedTuple):
    """Exported model and its dtype."""

    config: DecoderConfig
    dtype: str
    dtype_origin: str
    """Reason for this dtype: "as asked", "as stored" or that of the original model."""
    left_out: list[str]
    """Keys of the original config.json that the export lacks."""


def to_hf(run_dir: str | Path, out: str | Path, dtype: str | None = None, shard_bytes: int = 5 * 10**9) -> Exported:
    """Write the parameters of a run's latest checkpoint to the folder `out`: safetensors, config.json, tokenizer, card.

    Needs host memory for a few blocks and a cache of one layer's largest matrix (`block_streams.CACHE_BYTES`). If the
    run trained adapters, they are added to the weights.

    Args:
      run_dir: the folder of a training run, or one that `from_hf` wrote.
      dtype: float32, bfloat16 or float16. None: the dtype of the Hugging Face model that the run began with (the run
        itself may have float32, which is twice as large) or, if there was none, the dtype as stored.
      shard_bytes: maximum size of a file, unless a single tensor is larger.

    Raises:
      ValueError: if `out` is not empty, or values do not fit the dtype or are not finite.
      FileNotFoundError: if there is no checkpoint.
      DamagedFiles: if files of the checkpoint, or of a converted model, have changed.
    """
    run_dir = Path(run_dir)
    if dtype is not None:
        supported_dtype(dtype)
    if shard_bytes < 1:
        raise ValueError(f"shard size {shard_bytes} must be at least 1 byte; 5 GB is usual")
    carried = contained_files(run_dir, CARRIED)
    imported = contained_files(run_dir, [HF_CONFIG])
    config = as_decoder(model_of(run_dir), run_dir)
    run = read_object(run_dir, CONFIG)
    hf: dict[str, Any] = {}
    if imported:
        hf, _ = text_config(read_object(run_dir, HF_CONFIG))
    tensors = MergedTensors(run_dir, config)
    named: Any = dtype or hf.get("dtype") or hf.get("torch_dtype")  # transformers 5 and 4
    origin = "as asked" if dtype else "as the Hugging Face model that it came from"
    if named not in tuple(CODES):  # absent, or a dtype that exports do not support
        named = tensors.dtype
        origin = "as stored"
    target = supported_dtype(named)
    scaling = config.rope_scaling
    scaled = int((scaling.original_max_position or 0) * (scaling.factor or 1))
    hf_config = to_hf_config(
        config,
        max_position=max(hf.get("max_position_embeddings", 0), run_context(run) or 0, scaled) or 2048,
        dtype=named,
        token_ids=_token_ids(run_dir, run, hf),
    )
    for key in KEPT:
        if key in hf:
            hf_config[key] = hf[key]
    card = model_card(run_dir, hf_config, config.num_params, carried)

    def blocks(name: str) -> Iterator[np.ndarray]:
        for block in tensors.blocks(name):
            yield cast(block, target, name)

    with output_folder(Path(out), carried) as building:
        write_tensors(building, tensors.shapes, target, shard_bytes, blocks)
        (building / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
        (building / CARD).write_text(card, encoding="utf-8")
    return Exported(config, named, origin, left_out(hf, hf_config))


def _token_ids(run_dir: Path, run: dict[str, Any], hf: dict[str, Any]) -> dict[str, Any]:
    """Return the special ids of the imported model, or else the end-of-document id of the tokenizer."""
    ids: dict[str, Any] = {key: hf.get(key) for key in MODEL_IDS}
    if hf:
        return ids
    copied = run_dir / "tokenizer.model"
    name = str(copied) if copied.is_file() else run["data"]["tokenizer"]
    return ids | {"eos_token_id": load_tokenizer(name).eos_id}
