"""A run's model on one device."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from ringformer.checkpoints.saved_model import model_of, restore_params
from ringformer.parallel.mesh import make_mesh
from ringformer.parallel.parameters import abstract_model, weight_shardings


def load_model(run_dir: str | Path, **changes) -> Any:
    """The model of a run's latest checkpoint, or of a converted one, float32 on the default device.

    Args:
      changes: fields of the model's configuration that say how it is computed, e.g. `attention="vanilla"`.
    """
    saved: Any = model_of(run_dir)  # a dataclass
    config = replace(saved, **changes)
    default = jax.config.jax_default_device  # type: ignore[attr-defined]  # JAX makes it as it starts
    mesh = make_mesh("1,1,1,1", [default or jax.devices()[0]])
    params = restore_params(run_dir, weight_shardings(config, mesh), mesh)
    return nnx.merge(abstract_model(config)[0], params)
