"""A run's model on one device."""

import json
from pathlib import Path

import jax
from flax import nnx

from ringformer.mesh import make_mesh
from ringformer.models.llama import Llama
from ringformer.models.llama_config import LlamaConfig
from ringformer.train.checkpoints import restore_params
from ringformer.train.state import abstract_model, weight_shardings


def load_model(run_dir: str | Path, **changes) -> Llama:
    """The model of a run's latest checkpoint, or of a converted one, float32 on the default device.

    Args:
      changes: fields of `LlamaConfig` that say how it is computed, e.g. `attention="vanilla"`.
    """
    if not (Path(run_dir) / "config.json").is_file():
        raise FileNotFoundError(f"{run_dir} has no config.json: name the folder of a run or of a converted model")
    model = json.loads((Path(run_dir) / "config.json").read_text())["model"]
    config = LlamaConfig(**model | changes)
    default = jax.config.jax_default_device  # type: ignore[attr-defined]  # JAX makes it as it starts
    mesh = make_mesh("1,1,1,1", [default or jax.devices()[0]])
    params = restore_params(run_dir, weight_shardings(config, mesh), mesh)
    return nnx.merge(abstract_model(config)[0], params)
