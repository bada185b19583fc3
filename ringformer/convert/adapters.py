"""Adapters of a run, for exports: added to the weights that they belong to, or as a folder of PEFT."""

import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from ringformer.checkpoints.saved_model import base_of, lora_of, model_of, restore_adapters
from ringformer.convert.hf_weights import ParamPath, tensors_of
from ringformer.convert.output_folder import output_folder
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.registry import check_decoder
from ringformer.parallel.lora import PROJECTIONS
from ringformer.parallel.mesh import make_mesh

Index = tuple[slice, ...]


class AddedAdapters:
    """The adapters that are added to weights, of one run or of several that follow one another.

    Attributes:
      base: folder of the weights.
    """

    def __init__(self, run_dir: Path):
        self.base = run_dir
        self._factors: dict[ParamPath, list[tuple[float, np.ndarray, np.ndarray]]] = {}
        while (lora := lora_of(self.base)) is not None:
            layers = read_adapters(self.base)["layers"]
            for part, weight, _ in (PROJECTIONS[name] for name in lora.names):
                a, b = layers[part][weight]["a"], layers[part][weight]["b"]
                self._factors.setdefault(("layers", part, weight), []).insert(0, (lora.scale, a, b))
            self.base = base_of(self.base)

    def add(self, path: ParamPath, index: Index, block: np.ndarray) -> np.ndarray:
        """Return a block of a parameter, at an index into it, with the adapters added in float32."""
        for scale, a, b in self._factors.get(path, ()):
            layer, *rest = index
            inputs = a.ndim - 2
            rows, columns = a[layer][0][tuple(rest[:inputs])], b[layer][0][(slice(None), *rest[inputs:])]
            block = block.astype(np.float32) + np.float32(scale) * np.tensordot(rows, columns, 1)[None]
        return block


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
