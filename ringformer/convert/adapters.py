"""Adapters of a run or of PEFT's: added to weights that are converted, or written as a folder of PEFT's."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from ringformer.checkpoints.saved_model import base_of, lora_of, model_of, restore_adapters, run_context
from ringformer.convert.hf_config import to_hf_config
from ringformer.convert.hf_weights import ParamPath, Weight
from ringformer.convert.model_card import model_card
from ringformer.convert.output_folder import output_folder
from ringformer.convert.safetensors_files import DTYPES, TensorFolder
from ringformer.files.hub import on_hub, repository_of
from ringformer.files.run_layout import CARD, CONFIG, LICENCES
from ringformer.files.untrusted import contained, contained_files, read_object
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.registry import as_decoder
from ringformer.parallel.lora import PROJECTIONS, LoraConfig
from ringformer.parallel.mesh import make_mesh

Index = tuple[slice, ...]
Factors = dict[ParamPath, list[tuple[float, np.ndarray, np.ndarray]]]
"""Scale, A and B of the adapters of each parameter, stacked over its layers."""

ADAPTERS = "adapter_model.safetensors"
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


def add_adapters(factors: Factors, path: ParamPath, index: Index, block: np.ndarray) -> np.ndarray:
    """Return a block of a parameter, at an index into it, with its adapters added in float32."""
    for scale, a, b in factors.get(path, ()):
        layer, *rest = index
        inputs = a.ndim - 2
        rows = a[layer][0][tuple(rest[:inputs])]
        columns = b[layer][0][(slice(None), *rest[inputs:])]
        block = block.astype(np.float32) + np.float32(scale) * np.tensordot(rows, columns, 1)[None]
    return block


def adapters_of(run_dir: Path) -> tuple[Path, Factors]:
    """Return the folder of the weights that a run began with, and the adapters to add to them: those of the run and of
    the runs before it that trained adapters, the first one first."""
    factors: Factors = {}
    while (lora := lora_of(run_dir)) is not None:
        layers = read_adapters(run_dir)["layers"]
        for name in lora.names:
            part, weight, _ = PROJECTIONS[name]
            a = layers[part][weight]["a"]
            b = layers[part][weight]["b"]
            factors.setdefault(("layers", part, weight), []).insert(0, (lora.scale, a, b))
        run_dir = base_of(run_dir)
    return run_dir, factors


def read_adapters(run_dir: Path) -> dict[str, Any]:
    """Return the adapters of a run's latest checkpoint, float32 arrays on the host."""
    mesh = make_mesh("1,1,1,1", jax.devices("cpu")[:1])
    return jax.tree.map(np.asarray, restore_adapters(run_dir, mesh))


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
    original = model_of(base)
    changed = any(getattr(config, field) != getattr(original, field) for field in config.CONTEXT)
    rope = hf["rope_parameters"] if changed else None
    arguments = [repr(name) if loadable else "'BASE'"]
    if commit:
        arguments.append(f"revision={commit!r}")
    if rope:
        arguments.append(f"rope_parameters={rope!r}")
    card = model_card(run_dir, hf, count, carried, ", ".join(arguments))
    with output_folder(Path(out), carried) as building:
        save_file(tensors, building / ADAPTERS, {"format": "pt"})
        (building / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")
        (building / CARD).write_text(card, encoding="utf-8")
    return count


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
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not 0 < alpha < float("inf"):
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
