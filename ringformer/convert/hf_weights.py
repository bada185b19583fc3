"""Mapping between Hugging Face's tensors and slices of stacked parameters, in blocks of bounded size."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np
from einops import rearrange

from ringformer.models.llama_config import LlamaConfig

BLOCK_BYTES = 64 * 2**20
"""Largest block to read, transpose and write at a time, in float32; also a chunk on disk."""

ParamPath = tuple[str, ...]

TENSORS: dict[ParamPath, tuple[str, str]] = {
    ("embed",): ("model.embed_tokens.weight", "V D -> V D"),
    ("layers", "attention_norm", "scale"): ("model.layers.{}.input_layernorm.weight", "D -> D"),
    ("layers", "attention", "wq"): ("model.layers.{}.self_attn.q_proj.weight", "(H d) D -> D H d"),
    ("layers", "attention", "wk"): ("model.layers.{}.self_attn.k_proj.weight", "(K d) D -> D K d"),
    ("layers", "attention", "wv"): ("model.layers.{}.self_attn.v_proj.weight", "(K d) D -> D K d"),
    ("layers", "attention", "wo"): ("model.layers.{}.self_attn.o_proj.weight", "D (H d) -> H d D"),
    ("layers", "feedforward_norm", "scale"): ("model.layers.{}.post_attention_layernorm.weight", "D -> D"),
    ("layers", "feedforward", "w_gate"): ("model.layers.{}.mlp.gate_proj.weight", "F D -> D F"),
    ("layers", "feedforward", "w_up"): ("model.layers.{}.mlp.up_proj.weight", "F D -> D F"),
    ("layers", "feedforward", "w_down"): ("model.layers.{}.mlp.down_proj.weight", "D F -> F D"),
    ("norm", "scale"): ("model.norm.weight", "D -> D"),
    ("head",): ("lm_head.weight", "V D -> D V"),
}
"""Name of each parameter's tensors, and the einops pattern from a tensor to its layer of the parameter."""


@dataclass(frozen=True)
class Block:
    """Rows of a tensor, and their place in the parameter."""

    rows: slice
    index: tuple[slice, ...]


@dataclass(frozen=True)
class Weight:
    """One parameter, of all layers, and its tensors."""

    path: ParamPath
    config: LlamaConfig

    @property
    def stacked(self) -> bool:
        return self.path[0] == "layers"

    @property
    def names(self) -> list[str]:
        """Names of its tensors, by layer."""
        name = TENSORS[self.path][0]
        return [name.format(i) for i in range(self.config.num_layers)] if self.stacked else [name]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of one of its tensors."""
        axes = re.findall(r"\(.*?\)|\w", self._patterns[0])
        return tuple(prod(self.config.sizes[letter] for letter in re.findall(r"\w", axis)) for axis in axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter, [L, ...] if stacked."""
        return (*((self.config.num_layers,) if self.stacked else ()), *self._layer_shape)

    @property
    def chunk(self) -> tuple[int, ...]:
        """Shape on disk of the largest block."""
        shape = list(self._layer_shape)
        shape[self._axis] = self._step
        return (*((1,) if self.stacked else ()), *shape)

    def blocks(self, layer: int = 0) -> Iterator[Block]:
        """Yield the parts of one tensor, in the order of its rows."""
        size = self._layer_shape[self._axis]
        unit = self.tensor_shape[0] // size  # rows of one head
        for start in range(0, size, self._step):
            stop = min(start + self._step, size)
            index = [slice(None)] * len(self._layer_shape)
            index[self._axis] = slice(start, stop)
            first = (slice(layer, layer + 1),) if self.stacked else ()
            yield Block(slice(start * unit, stop * unit), (*first, *index))

    def to_parameter(self, rows: np.ndarray) -> np.ndarray:
        """Rearrange a block of a tensor as in the parameter (a view)."""
        tensor, parameter = self._patterns
        turned = rearrange(rows, f"{tensor} -> {parameter}", **self._head_dim(tensor))
        return turned[None] if self.stacked else turned

    def to_tensor(self, block: np.ndarray) -> np.ndarray:
        """Invert `to_parameter`."""
        tensor, parameter = self._patterns
        return rearrange(block[0] if self.stacked else block, f"{parameter} -> {tensor}")

    @property
    def _patterns(self) -> tuple[str, str]:
        tensor, parameter = TENSORS[self.path][1].split(" -> ")
        return tensor, parameter

    @property
    def _layer_shape(self) -> tuple[int, ...]:
        return tuple(self.config.sizes[letter] for letter in self._patterns[1].split())

    @property
    def _axis(self) -> int:
        """The parameter's dimension that corresponds to the tensor's rows (counted in whole heads)."""
        return self._patterns[1].split().index(re.findall(r"\w", self._patterns[0])[0])

    @property
    def _step(self) -> int:
        size = self._layer_shape[self._axis]
        return min(size, max(1, BLOCK_BYTES * size // (4 * prod(self._layer_shape))))

    def _head_dim(self, pattern: str) -> dict[str, int]:
        return {"d": self.config.head_dim} if "d" in pattern else {}


def weights(config: LlamaConfig) -> list[Weight]:
    """Return all parameters of a model."""
    return [Weight(path, config) for path in TENSORS if not (config.tie_embeddings and path == ("head",))]
