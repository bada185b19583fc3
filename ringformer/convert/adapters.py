"""Adapters of a run, added to the weights that it began with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from ringformer.checkpoints.saved_model import latest_checkpoint, restore_adapters, runs_with_adapters
from ringformer.convert.block_streams import open_streams
from ringformer.convert.hf_weights import ParamPath, Weight, weights
from ringformer.models.decoder_config import DecoderConfig
from ringformer.parallel.lora import PROJECTIONS
from ringformer.parallel.mesh import make_mesh

Index = tuple[slice, ...]
Factors = dict[ParamPath, list[tuple[float, np.ndarray, np.ndarray]]]
"""Scale, A and B of the adapters of each parameter, stacked over its layers."""
READING_ORDER = ("embed", "layers", "norm", "head")
"""Parts of a model, in the order in which it uses them; exports have their tensors in this order."""


class MergedTensors:
    """Tensors of a run's latest checkpoint, or of a converted model, named and arranged as Hugging Face's. If the run
    trained adapters, they are added.

    Raises DamagedFiles if files of the checkpoint have changed; so does reading.
    """

    def __init__(self, run_dir: Path, config: DecoderConfig):
        base, self._adapters = adapters_of(run_dir)
        self._stored: dict[ParamPath, ts.TensorStore] = open_streams(latest_checkpoint(base), config)
        self._place: dict[str, tuple[Weight, int]] = {}
        for weight in weights(config):
            for layer, name in enumerate(weight.names):
                self._place[name] = (weight, layer)

    @property
    def dtype(self) -> str:
        """Name of the dtype as stored."""
        return self._stored["embed",].dtype.numpy_dtype.name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, in the order in which the model uses them."""

        def position(name: str) -> tuple[int, int]:
            weight, layer = self._place[name]
            return READING_ORDER.index(weight.path[0]), layer

        ordered = sorted(self._place, key=position)
        return {name: self._place[name][0].tensor_shape for name in ordered}

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """Yield the blocks of rows of a tensor, in order."""
        weight, layer = self._place[name]
        for _, index in weight.blocks(layer):
            block = self._stored[weight.path][index].read().result()
            yield weight.to_tensor(add_adapters(self._adapters, weight.path, index, block))


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
    base, adapted = runs_with_adapters(run_dir)
    for run, lora in adapted:
        layers = read_adapters(run)["layers"]
        for name in lora.names:
            part, weight, _ = PROJECTIONS[name]
            a = layers[part][weight]["a"]
            b = layers[part][weight]["b"]
            factors.setdefault(("layers", part, weight), []).append((lora.scale, a, b))
    return base, factors


def read_adapters(run_dir: Path) -> dict[str, Any]:
    """Return the adapters of a run's latest checkpoint, float32 arrays on the host."""
    mesh = make_mesh("1,1,1,1", jax.devices("cpu")[:1])
    return jax.tree.map(np.asarray, restore_adapters(run_dir, mesh))
