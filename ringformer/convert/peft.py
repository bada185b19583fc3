"""Adapters as PEFT writes them: a folder with adapter_config.json and adapter_model.safetensors."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from ringformer.checkpoints.saved_model import base_of, lora_of, model_of, run_context
from ringformer.convert.adapters import Factors, MergedTensors, read_adapters
from ringformer.convert.hf_config import to_hf_config
from ringformer.convert.hf_weights import Weight, weights
from ringformer.convert.model_card import model_card
from ringformer.convert.output_folder import output_folder
from ringformer.convert.safetensors_files import DTYPES, TensorFolder
from ringformer.files.hub import on_hub, repository_of
from ringformer.files.run_layout import CARD, CONFIG, LICENCES
from ringformer.files.untrusted import contained, contained_files, read_object
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.registry import as_decoder
from ringformer.parallel.lora import PROJECTIONS, LoraConfig
from ringformer.settings import is_number

ADAPTERS = "adapter_model.safetensors"
BASE_WEIGHTS = "base_weights_bfloat16_blake2b"
"""Key, in the metadata of `ADAPTERS`, of the hash of the weights that the adapters were trained on."""
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False,),
    "use_rslora": (False, True),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "exclude_modules": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False,),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
"""Values of an adapter_config.json that can be converted, those of a file without the key first. The other ways to
initialize adapters change the base, too."""


def to_peft(run_dir: str | Path, out: str | Path) -> int:
    """Write the adapters of a run's latest checkpoint as PEFT does: adapter_config.json and adapter_model.safetensors,
    float32, with a model card. Return the number of parameters.

    Raises:
      ValueError: if the run has no adapters, or `out` is not empty.
      FileNotFoundError: if there is no checkpoint.
      DamagedFiles: if files of the checkpoint have changed.
    """
    run_dir = Path(run_dir)
    lora = lora_of(run_dir)
    config = as_decoder(model_of(run_dir), run_dir)
    if lora is None:
        raise ValueError(f"{run_dir} has no adapters: export its weights with ringformer convert to-hf")
    tensors = _tensors(read_adapters(run_dir)["layers"], lora, config)
    base = base_of(run_dir)
    context = run_context(read_object(run_dir, CONFIG))
    assert context is not None, "a run with adapters has a length"
    made_of = read_object(base, CONFIG)
    loadable = "origin" in made_of and "adapters" not in made_of
    origin = made_of["origin"] if loadable else str(base)
    name, commit = repository_of(origin)
    hf = to_hf_config(config, max_position=context, dtype="float32", token_ids={})
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name,
        "revision": commit,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "lora_dropout": 0.0,
        "target_modules": list(lora.names),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    count = sum(x.size for x in tensors.values())
    carried = contained_files(run_dir, LICENCES)
    original = as_decoder(model_of(base), base)
    base_weights = hash_weights(original, MergedTensors(base, original).blocks)
    changed = any(getattr(config, field) != getattr(original, field) for field in config.CONTEXT)
    rope = hf["rope_parameters"] if changed else None
    arguments = [repr(name) if loadable else "'BASE'"]
    if commit:
        arguments.append(f"revision={commit!r}")
    if rope:
        arguments.append(f"rope_parameters={rope!r}")
    card = model_card(run_dir, hf, count, carried, ", ".join(arguments))
    with output_folder(Path(out), carried) as building:
        content = save(tensors, {"format": "pt", BASE_WEIGHTS: base_weights})
        (building / ADAPTERS).write_bytes(content)
        (building / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")
        (building / CARD).write_text(card, encoding="utf-8")
    return count


def hash_weights(config: DecoderConfig, blocks: Callable[[str], Iterator[np.ndarray]]) -> str:
    """Return the blake2b of a model's weights, rounded to bfloat16, in hexadecimal digits.

    A model that is stored in float32 and in bfloat16 has the same hash in both. In float16 it has another, if it was
    rounded twice.

    Args:
      blocks: yields the blocks of rows of the tensor of that name.
    """
    total = hashlib.blake2b(digest_size=16)
    for weight in weights(config):
        for name in weight.names:
            for block in blocks(name):
                total.update(block.astype(ml_dtypes.bfloat16).tobytes())
    return total.hexdigest()


def check_base_weights(path: Path, base: TensorFolder, config: DecoderConfig) -> None:
    """Raise ValueError if the adapters in a folder of PEFT's were trained on other weights than those of `base`.

    Only adapters that ringformer exported say which weights these were; for others, a line on stderr says so.
    """
    with safe_open(path / ADAPTERS, framework="numpy") as file:
        expected = (file.metadata() or {}).get(BASE_WEIGHTS)
    if expected is None:
        warning = f"warning: {path} does not say which weights its adapters were trained on: only shapes are compared"
        print(warning, file=sys.stderr)
        return
    places: dict[str, Weight] = {}
    for weight in weights(config):
        places |= dict.fromkeys(weight.names, weight)

    def blocks(name: str) -> Iterator[np.ndarray]:
        rows = [rows for rows, _ in places[name].blocks()]
        return base.blocks(name, rows)

    actual = hash_weights(config, blocks)
    if actual != expected:
        raise ValueError(
            f"{path} has adapters of other weights: of {expected}, not of {actual}, which is the hash in bfloat16 of "
            "the model to convert. Name the folder of their base, which adapter_config.json names"
        )


def _tensors(layers: dict[str, Any], lora: LoraConfig, config: DecoderConfig) -> dict[str, np.ndarray]:
    """Return the tensors of PEFT's file, by name."""
    tensors = {}
    for projection in lora.names:
        part, weight, _ = PROJECTIONS[projection]
        a = layers[part][weight]["a"]
        b = layers[part][weight]["b"]
        place = Weight(("layers", part, weight), config)
        for i, (name_a, name_b) in enumerate(zip(_peft_names(place, "A"), _peft_names(place, "B"), strict=True)):
            tensors[name_a] = np.ascontiguousarray(a[i].reshape(-1, lora.rank).T)
            tensors[name_b] = np.ascontiguousarray(b[i].reshape(lora.rank, -1).T)
    return tensors


def from_peft(path: Path, config: DecoderConfig, origin: str) -> Factors:
    """Return the adapters in a folder of PEFT's, for a model with this configuration that came from `origin`.

    Raises:
      FileNotFoundError: if the folder has no adapter_config.json or adapter_model.safetensors.
      ValueError: if they have a feature that ringformer has not, name another repository of the hub or another commit
        as their base, a file is not whole, or tensors are missing, left over, misshapen or of another dtype.
    """
    for name in ("adapter_config.json", ADAPTERS):
        if not contained(path, name).is_file():
            raise FileNotFoundError(f"{path} has no {name}: name the folder that PEFT's save_pretrained wrote")
    peft = read_object(path, "adapter_config.json")
    for key, values in SUPPORTED.items():
        if peft.get(key, values[0]) not in values:
            raise ValueError(f"adapter_config.json has {key}={peft[key]!r}: only {values[0]!r} can be converted")
    _check_base(path, peft, origin)
    rank: Any = peft.get("r")
    alpha: Any = peft.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not is_number(alpha) or alpha <= 0:
        raise ValueError(f"adapter_config.json has r={rank!r} and lora_alpha={alpha!r}, must be numbers above 0")
    scale = alpha / rank**0.5 if peft.get("use_rslora") else alpha / rank
    tensors = TensorFolder(path, ADAPTERS)
    factors: Factors = {}
    present = set()
    left = set(tensors.shapes)
    for projection, (part, weight, inputs) in PROJECTIONS.items():
        place = Weight(("layers", part, weight), config)
        names_a = _peft_names(place, "A")
        names_b = _peft_names(place, "B")
        if left.isdisjoint(names_a + names_b):
            continue
        outputs, columns = place.tensor_shape
        shape = place.shape[1:]
        a = _stacked(tensors, names_a, (rank, columns))
        b = _stacked(tensors, names_b, (outputs, rank))
        a = a.reshape(len(a), *shape[:inputs], rank)
        b = b.reshape(len(b), rank, *shape[inputs:])
        factors["layers", part, weight] = [(scale, a, b)]
        present.add(projection)
        left.difference_update(names_a, names_b)
    listed = peft.get("target_modules")
    if isinstance(listed, list):
        targets = {str(module).rpartition(".")[2] for module in listed}
        if differ := present ^ targets:
            raise ValueError(f"{path}: target_modules and the tensors differ in {min(differ)}")
    if left:
        raise ValueError(f"{path / ADAPTERS}: {min(left)} belongs to no projection of the model")
    if not factors:
        raise ValueError(f"{path / ADAPTERS}: there are no adapters")
    return factors


def _check_base(path: Path, peft: dict[str, Any], origin: str) -> None:
    """Raise ValueError if PEFT's adapters name another repository of the hub, or another commit, than `origin`."""
    base = peft.get("base_model_name_or_path")
    revision = peft.get("revision")
    name, commit = repository_of(origin)
    if commit and on_hub(str(base)) and (base != name or revision not in (None, "main", commit)):
        raise ValueError(
            f"{path} has adapters of {base}@{revision or 'main'}, not of {origin}: name the folder of their base"
        )


def _stacked(tensors: TensorFolder, names: list[str], needed: tuple[int, ...]) -> np.ndarray:
    """Return PEFT's tensors of these names, transposed, in float32, [L, ...]. Raises ValueError if one is missing,
    or of another shape or dtype."""
    for name in names:
        shape = tensors.shapes.get(name)
        if shape != needed or tensors.dtypes[name] not in DTYPES:
            actual = "missing" if shape is None else f"{tensors.dtypes[name]} {list(shape)}"
            raise ValueError(f"{name} is {actual}, must be {list(needed)}: adapters of another base?")
    return np.stack([np.asarray(tensors.read(name), np.float32).T for name in names])


def _peft_names(place: Weight, factor: str) -> list[str]:
    """Return PEFT's names of a factor, A or B, of the adapters of a weight, by layer."""
    return [f"base_model.model.{name.removesuffix('.weight')}.lora_{factor}.weight" for name in place.names]
