"""Import of a Hugging Face checkpoint to a folder for `init_from`."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ringformer.checkpoints.rope_change import RopeChange
from ringformer.convert.adapters import Factors, add_adapters
from ringformer.convert.block_streams import BlockStream, IndexedBlock, save_streams
from ringformer.convert.hf_config import from_hf_config, text_config, text_model_config, with_rope
from ringformer.convert.hf_weights import Weight, weights
from ringformer.convert.output_folder import output_folder
from ringformer.convert.peft import check_base_weights, from_peft
from ringformer.convert.safetensors_files import DTYPES, TensorFolder, cast, supported_dtype
from ringformer.data.tokenizers.special_tokens import model_tokens
from ringformer.files.hub import MODEL_FILES, check_download, on_hub, snapshot
from ringformer.files.manifest import write_manifest
from ringformer.files.run_layout import BASE_CARD, CARD, CARRIED, CHECKPOINTS, CONFIG, HF_CONFIG
from ringformer.files.untrusted import contained, contained_files, read_object
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.registry import registered_by


def from_hf(
    path: str | Path,
    out: str | Path,
    dtype: str = "float32",
    adapters: str | Path | None = None,
    rope: RopeChange | None = None,
) -> DecoderConfig:
    """Write the model in `path`, a folder or a name on the hub (`files/hub.py`), to the folder `out`: config.json,
    checkpoints/0 and the tokenizer's files.

    The checkpoint holds only parameters, stacked [L, ...], and serves as `--config.init_from=OUT`. The conversion needs
    host memory for a few blocks (`hf_weights.BLOCK_BYTES`), independent of the size of the model. `out` appears
    complete or not at all. Readers check its files against two manifests: one in the folder of the arrays, and one in
    `out` for all other files.

    Args:
      dtype: dtype on disk, float32, bfloat16 or float16. A run trains in that of `optimizer.params_dtype`.
      adapters: folder of PEFT's with LoRA adapters to add to the weights.
      rope: another rope than the model's, or none, which config.json then has; it is also recorded there.

    Raises:
      ValueError: if ringformer does not support the model, `rope` does not fit it, tensors are missing, left over,
        misshapen or not finite, a file lies outside `path` (`files/untrusted.py`) or is not what the hub has, adapters
        are of other weights, or `out` is not empty.
      FileNotFoundError: if `path` has no config.json or no safetensors files.
    """
    target = supported_dtype(dtype)
    origin = str(Path(path).absolute())
    if on_hub(path):
        path, origin = snapshot(str(path), MODEL_FILES)
    else:
        check_download(Path(path), MODEL_FILES)
    path = Path(path)
    if not contained(path, "config.json").is_file():
        raise FileNotFoundError(f"{path} has no config.json: name the folder of a Hugging Face checkpoint")
    hf = read_object(path, "config.json")
    carried = contained_files(path, CARRIED)
    card = contained_files(path, [CARD])
    tensors = TensorFolder(path, wrapped="text_config" in hf)
    hf = text_model_config(hf)
    if rope is not None:
        if warning := rope.warning(from_hf_config(hf)):
            print(warning, file=sys.stderr)
        hf = with_rope(hf, rope)
    config = from_hf_config(hf)
    table = text_config(hf)[1].hugging_face
    assert table is not None, "text_config finds families that can be converted"
    model_tokens(path, "config.json", config.vocab_size, table.absent)  # refuses wrong ids
    check_tensors(tensors, config)
    factors: Factors = {}
    made_of: dict[str, Any] = {"origin": origin}
    if adapters is not None:
        factors = from_peft(Path(adapters), config, origin)
        check_base_weights(Path(adapters), tensors, config)
        made_of["adapters"] = str(adapters)
    if rope is not None:
        made_of["rope"] = rope.settings

    streams = {}
    for weight in weights(config):
        blocks = _blocks(weight, tensors, target, factors)
        streams[weight.path] = BlockStream(weight, target, blocks)
    described = {"model": dataclasses.asdict(config)} | made_of | registered_by(config)
    with output_folder(Path(out), carried) as building:
        save_streams(building / CHECKPOINTS / "0" / "default", streams)
        (building / CONFIG).write_text(json.dumps(described, indent=1) + "\n")
        (building / HF_CONFIG).write_text(json.dumps(hf, indent=1) + "\n")
        for file in card:
            shutil.copyfile(file, building / BASE_CARD)
        write_manifest(building, names=[file.name for file in building.iterdir() if file.is_file()])
    return config


def check_tensors(tensors: TensorFolder, config: DecoderConfig) -> None:
    """Raise ValueError naming every tensor that is missing, left over, misshapen or of an unknown dtype.

    The rotary frequencies of old checkpoints are ignored, because the config determines them. A tied head is ignored if
    it equals the embedding.
    """
    if config.num_layers > len(tensors.shapes):  # before listing that many names
        raise ValueError(
            f"config.json has {config.num_layers} layers, but the files have {len(tensors.shapes)} tensors"
        )
    expected: dict[str, tuple[int, ...]] = {}
    for weight in weights(config):
        expected |= dict.fromkeys(weight.names, weight.tensor_shape)
    present = {name for name in tensors.shapes if not name.endswith("rotary_emb.inv_freq")}
    if config.tie_embeddings and "lm_head.weight" in present:
        present.remove("lm_head.weight")
        _check_tied(tensors, Weight(("embed",), config))
    faults = []
    for name in sorted(present | expected.keys()):
        shape = tensors.shapes.get(name, ())
        needed = expected.get(name, ())
        if name not in present:
            faults.append(f"{name} {list(needed)} is missing")
        elif name not in expected:
            faults.append(f"{name} {list(shape)} is left over")
        elif shape != needed:
            faults.append(f"{name} is {list(shape)}, must be {list(needed)}")
        elif tensors.dtypes[name] not in DTYPES:
            faults.append(f"{name} is {tensors.dtypes[name]}, must be one of {', '.join(DTYPES)}")
    if faults:
        more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise ValueError("the tensors do not fit config.json:\n  " + "\n  ".join(faults[:20]) + more)


def _check_tied(tensors: TensorFolder, embed: Weight) -> None:
    (embedding,) = embed.names
    head = "lm_head.weight"
    rows = [rows for rows, _ in embed.blocks()]
    if tensors.shapes.get(embedding) == tensors.shapes[head]:
        pairs = zip(tensors.blocks(embedding, rows), tensors.blocks(head, rows), strict=True)
        if all(np.array_equal(a, b) for a, b in pairs):
            return
    raise ValueError(
        "config.json ties the embeddings, but lm_head.weight differs from model.embed_tokens.weight: if the config is "
        "wrong, set tie_word_embeddings to false"
    )


def _blocks(weight: Weight, tensors: TensorFolder, dtype: np.dtype, factors: Factors) -> Iterator[IndexedBlock]:
    """Yield the parameter's blocks, layer by layer, each with its index, with adapters added."""
    for layer, name in enumerate(weight.names):
        rows, indices = zip(*weight.blocks(layer), strict=True)
        for index, part in zip(indices, tensors.blocks(name, rows), strict=True):
            yield index, cast(add_adapters(factors, weight.path, index, weight.to_parameter(part)), dtype, name)
