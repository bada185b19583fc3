"""Import of a Hugging Face checkpoint to a folder for `init_from`."""

import dataclasses
import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ringformer.convert.block_streams import BlockStream, IndexedBlock, nested, save_streams
from ringformer.convert.hf_config import from_hf_config
from ringformer.convert.hf_weights import Weight, weights
from ringformer.convert.safetensors_files import CODES, DTYPES, TensorFolder, cast
from ringformer.files.manifest import write_manifest
from ringformer.files.run_layout import CARRIED, CHECKPOINTS, CONFIG, HF_CONFIG
from ringformer.files.untrusted import contained, contained_files, read_object
from ringformer.models.llama_config import LlamaConfig


def from_hf(path: str | Path, out: str | Path, dtype: str = "float32") -> LlamaConfig:
    """Write the model in `path` to the folder `out`: config.json, checkpoints/0 and the tokenizer's files.

    It holds only parameters, stacked [L, ...], and serves as `--config.init_from=OUT`. Needs host memory for a few
    blocks (`hf_weights.BLOCK_BYTES`), independent of the size of the model. `out` appears complete or not at all, with
    hashes that readers compare: those of the arrays in the arrays' folder, those of other files in `out`.

    Args:
      dtype: dtype on disk, float32, bfloat16 or float16. A run trains in float32 in any case.

    Raises:
      ValueError: if ringformer does not support the model, tensors are missing, left over, misshapen or not finite, a
        file lies outside `path` (`files/untrusted.py`), or `out` is not empty.
      FileNotFoundError: if `path` has no config.json or no safetensors files.
    """
    path, out = Path(path), Path(out)
    if dtype not in CODES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(CODES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder: choose another one, or delete it")
    if not contained(path, "config.json").is_file():
        raise FileNotFoundError(f"{path} has no config.json: name the folder of a Hugging Face checkpoint")
    hf = read_object(path, "config.json")
    carried = contained_files(path, CARRIED)
    config, tensors = from_hf_config(hf), TensorFolder(path)
    check_tensors(tensors, config)

    target = DTYPES[CODES[dtype]]
    streams = {w.path: BlockStream(w, target, _blocks(w, tensors, target)) for w in weights(config)}
    out.parent.mkdir(parents=True, exist_ok=True)
    building = out.parent / f"{out.name}.building-{uuid.uuid4().hex[:8]}"
    try:
        save_streams(building / CHECKPOINTS / "0" / "default", nested(streams))
        (building / CONFIG).write_text(json.dumps({"model": dataclasses.asdict(config)}, indent=1) + "\n")
        for file in carried:
            shutil.copyfile(file, building / file.name)
        (building / HF_CONFIG).write_text(json.dumps(hf, indent=1) + "\n")
        write_manifest(building, names=[CONFIG, HF_CONFIG, *(file.name for file in carried)])
        building.rename(out)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return config


def check_tensors(tensors: TensorFolder, config: LlamaConfig) -> None:
    """Raise ValueError naming every tensor that is missing, left over, misshapen or of an unknown dtype.

    Rotary frequencies in old checkpoints are ignored: the config determines them. A tied head is ignored if it equals
    the embedding.
    """
    if config.num_layers > len(tensors.shapes):  # before listing that many names
        raise ValueError(
            f"config.json has {config.num_layers} layers, but the files have {len(tensors.shapes)} tensors"
        )
    expected = {name: w.tensor_shape for w in weights(config) for name in w.names}
    present = {name for name in tensors.shapes if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings and "lm_head.weight" in present:
        present.remove("lm_head.weight")
        _check_tied(tensors, Weight(("embed",), config))
    faults = [f"{name} {list(expected[name])} is missing" for name in expected if name not in present]
    faults += [f"{name} {list(tensors.shapes[name])} is left over" for name in sorted(present - expected.keys())]
    for name in sorted(present & expected.keys()):
        if tensors.shapes[name] != expected[name]:
            faults.append(f"{name} is {list(tensors.shapes[name])}, must be {list(expected[name])}")
        elif tensors.dtypes[name] not in DTYPES:
            faults.append(f"{name} is {tensors.dtypes[name]}, must be one of {', '.join(DTYPES)}")
    if faults:
        more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise ValueError("the tensors do not fit config.json:\n  " + "\n  ".join(faults[:20]) + more)


def _check_tied(tensors: TensorFolder, embed: Weight) -> None:
    names, rows = (embed.names[0], "lm_head.weight"), [block.rows for block in embed.blocks()]
    if len({tensors.shapes.get(name) for name in names}) == 1:
        pairs = zip(*(tensors.blocks(name, rows) for name in names), strict=True)
        if all(np.array_equal(a, b) for a, b in pairs):
            return
    raise ValueError(
        "config.json ties the embeddings, but lm_head.weight differs from model.embed_tokens.weight: if the config is "
        "wrong, set tie_word_embeddings to false"
    )


def _blocks(weight: Weight, tensors: TensorFolder, dtype: np.dtype) -> Iterator[IndexedBlock]:
    """Yield the parameter's blocks, layer by layer, each with its index."""
    for layer, name in enumerate(weight.names):
        blocks = list(weight.blocks(layer))
        rows = tensors.blocks(name, [block.rows for block in blocks])
        for block, part in zip(blocks, rows, strict=True):
            yield block.index, cast(weight.to_parameter(part), dtype, name)
