"""Adapters of a run or of PEFT's: added to weights that are converted, or written as a folder of PEFT's."""

import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from ringformer.checkpoints.saved_model import base_of, lora_of, model_of, restore_adapters
from ringformer.convert.hf_weights import ParamPath, Weight, tensors_of
from ringformer.convert.output_folder import output_folder
from ringformer.files.untrusted import contained, read_object
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.registry import check_decoder
from ringformer.parallel.lora import PROJECTIONS
from ringformer.parallel.mesh import make_mesh

Index = tuple[slice, ...]
Factors = dict[ParamPath, list[tuple[float, np.ndarray, np.ndarray]]]
"""Scale, A and B of the adapters of each parameter, stacked over its layers."""

SUPPORTED = {
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
}
"""Values of an adapter_config.json that can be converted, those of a file without the key first."""


def add_adapters(factors: Factors, path: ParamPath, index: Index, block: np.ndarray) -> np.ndarray:
    """Return a block of a parameter, at an index into it, with its adapters added in float32."""
    for scale, a, b in factors.get(path, ()):
        layer, *rest = index
        inputs = a.ndim - 2
        rows, columns = a[layer][0][tuple(rest[:inputs])], b[layer][0][(slice(None), *rest[inputs:])]
        block = block.astype(np.float32) + np.float32(scale) * np.tensordot(rows, columns, 1)[None]
    return block


def adapters_of(run_dir: Path) -> tuple[Path, Factors]:
    """Return the folder of the weights that a run began with, and the adapters to add to them: those of the run and of
    the runs before it that trained adapters, the first one first."""
    factors: Factors = {}
    while (lora := lora_of(run_dir)) is not None:
        layers = read_adapters(run_dir)["layers"]
        for part, weight, _ in (PROJECTIONS[name] for name in lora.names):
            a, b = layers[part][weight]["a"], layers[part][weight]["b"]
            factors.setdefault(("layers", part, weight), []).insert(0, (lora.scale, a, b))
        run_dir = base_of(run_dir)
    return run_dir, factors


def read_adapters(run_dir: Path) -> dict:
    """Return the adapters of a run's latest checkpoint, float32 arrays on the host."""
    mesh = make_mesh("1,1,1,1", jax.devices("cpu")[:1])
    return jax.tree.map(np.asarray, restore_adapters(run_dir, mesh))


def to_peft(run_dir: str | Path, out: str | Path) -> int:
    """Write the adapters of a run's latest checkpoint as PEFT does: adapter_config.json and adapter_model.safetensors,
    float32. Return the number of parameters.

    Raises:
      ValueError: if the run has no adapters, or `out` is not empty.
      FileNotFoundError: if there is no checkpoint.
      DamagedFiles: if files of the checkpoint have changed.
    """
    run_dir, lora, config = Path(run_dir), lora_of(run_dir), model_of(run_dir)
    if lora is None:
        raise ValueError(f"{run_dir} has no adapters: export its weights with ringformer convert to-hf")
    check_decoder(config, run_dir)
    assert isinstance(config, DecoderConfig)
    layers, tensors = read_adapters(run_dir)["layers"], {}
    for part, weight, _ in (PROJECTIONS[name] for name in lora.names):
        name = tensors_of(config)["layers", part, weight][0].removesuffix(".weight")
        for i, (a, b) in enumerate(zip(*(layers[part][weight][key] for key in "ab"), strict=True)):
            prefix = f"base_model.model.{name.format(i)}"
            tensors[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(a.reshape(-1, lora.rank).T)
            tensors[f"{prefix}.lora_B.weight"] = np.ascontiguousarray(b.reshape(lora.rank, -1).T)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base_of(run_dir)),
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "lora_dropout": 0.0,
        "target_modules": list(lora.names),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with output_folder(Path(out), {}) as building:
        save_file(tensors, building / "adapter_model.safetensors", {"format": "pt"})
        (building / "adapter_config.json").write_text(json.dumps(described, indent=2) + "\n")
    return sum(x.size for x in tensors.values())


def from_peft(path: Path, config: DecoderConfig) -> Factors:
    """Return the adapters in a folder of PEFT's, for a model with this configuration.

    Raises:
      FileNotFoundError: if the folder has no adapter_config.json or adapter_model.safetensors.
      ValueError: if they have a feature that ringformer has not, or tensors are missing, left over or misshapen.
    """
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not contained(path, name).is_file():
            raise FileNotFoundError(f"{path} has no {name}: name the folder that PEFT's save_pretrained wrote")
    peft = read_object(path, "adapter_config.json")
    for key, values in SUPPORTED.items():
        if peft.get(key, values[0]) not in values:
            raise ValueError(f"adapter_config.json has {key}={peft[key]!r}: only {values[0]!r} can be converted")
    rank, alpha = peft.get("r"), peft.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float):
        raise ValueError(f"adapter_config.json has r={rank!r} and lora_alpha={alpha!r}, must be numbers, r at least 1")
    scale = alpha / rank**0.5 if peft.get("use_rslora") else alpha / rank
    tensors = load_file(path / "adapter_model.safetensors")
    factors: Factors = {}
    for part, weight, inputs in PROJECTIONS.values():
        place = Weight(("layers", part, weight), config)
        names = [f"base_model.model.{tensor.removesuffix('.weight')}" for tensor in place.names]
        pairs = [[tensors.pop(f"{n}.lora_{x}.weight", None) for n in names] for x in "AB"]
        if all(x is None for pair in pairs for x in pair):
            continue
        _, *shape = place.shape
        outputs, columns = place.tensor_shape
        for x, pair, needed in zip("AB", pairs, ((rank, columns), (outputs, rank)), strict=True):
            for n, tensor in zip(names, pair, strict=True):
                if tensor is None or tensor.shape != needed:
                    actual = "missing" if tensor is None else list(tensor.shape)
                    raise ValueError(
                        f"{n}.lora_{x}.weight is {actual}, must be {list(needed)}: adapters of another base?"
                    )
        a, b = (np.stack([np.asarray(x, np.float32) for x in pair]) for pair in pairs)
        a = a.swapaxes(1, 2).reshape(len(a), *shape[:inputs], rank)
        b = b.swapaxes(1, 2).reshape(len(b), rank, *shape[inputs:])
        factors["layers", part, weight] = [(scale, a, b)]
    if tensors:
        raise ValueError(
            f"{next(iter(sorted(tensors)))} and {len(tensors) - 1} other tensors of {path} belong to no projection"
        )
    if not factors:
        raise ValueError(f"{path} has no adapters")
    return factors
