"""Mapping between Hugging Face's tensors and slices of stacked parameters, in blocks of bounded size."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from einops import rearrange

from ringformer.models.decoder_config import DecoderConfig

BLOCK_BYTES = 64 * 2**20
"""Maximum size of a block in float32. Blocks are read, transposed and written one at a time; each is a chunk on
disk."""

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
"""Name of each parameter's tensors in a LLaMA, and the einops pattern that turns a tensor into one layer of the
parameter."""

BIASES: dict[ParamPath, tuple[str, str]] = {
    ("layers", "attention", "bq"): ("model.layers.{}.self_attn.q_proj.bias", "(H d) -> H d"),
    ("layers", "attention", "bk"): ("model.layers.{}.self_attn.k_proj.bias", "(K d) -> K d"),
    ("layers", "attention", "bv"): ("model.layers.{}.self_attn.v_proj.bias", "(K d) -> K d"),
}
OUTPUT_NORMS: dict[ParamPath, tuple[str, str]] = {
    ("layers", "attention_output_norm", "scale"): ("model.layers.{}.post_attention_layernorm.weight", "D -> D"),
    ("layers", "feedforward_output_norm", "scale"): ("model.layers.{}.post_feedforward_layernorm.weight", "D -> D"),
}
INPUT_NORMS = ("layers", "attention_norm", "scale"), ("layers", "feedforward_norm", "scale")


def tensors_of(config: DecoderConfig) -> dict[ParamPath, tuple[str, str]]:
    """Return the names and patterns of a model's tensors, which follow from the parts of its family."""
    parts = config.PARTS
    tensors = dict(TENSORS)
    if config.tie_embeddings:
        del tensors["head",]
    if parts.bias:
        tensors |= BIASES
    if parts.qk_norm:
        for x, heads in (("q", "H"), ("k", "K")):
            pattern = "d -> d" if parts.qk_norm == "head" else f"({heads} d) -> {heads} d"
            tensors["layers", "attention", f"{x}_norm"] = f"model.layers.{{}}.self_attn.{x}_norm.weight", pattern
    if parts.norms == "after":
        for path in INPUT_NORMS:
            del tensors[path]
    if parts.norms == "both":
        tensors[INPUT_NORMS[1]] = "model.layers.{}.pre_feedforward_layernorm.weight", "D -> D"
    if parts.norms != "before":
        tensors |= OUTPUT_NORMS
    return tensors


@dataclass(frozen=True)
class Weight:
    """A parameter, stacked over all layers, and the tensors that it is made of."""

    path: ParamPath
    config: DecoderConfig

    @property
    def stacked(self) -> bool:
        return self.path[0] == "layers"

    @property
    def names(self) -> list[str]:
        """Names of the parameter's tensors, by layer."""
        name = self._tensors[0]
        if not self.stacked:
            return [name]
        return [name.format(i) for i in range(self.config.num_layers)]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of one of the parameter's tensors."""
        axes = re.findall(r"\(.*?\)|\w", self._patterns[0])
        return tuple(prod(self._sizes(axis)) for axis in axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter, [L, ...] if stacked."""
        return (*[self.config.num_layers] * self.stacked, *self._sizes(self._patterns[1]))

    @property
    def chunk(self) -> tuple[int, ...]:
        """Shape on disk of the largest block."""
        shape = [*[1] * self.stacked, *self._sizes(self._patterns[1])]
        size = shape[self._axis]
        shape[self._axis] = min(size, max(1, BLOCK_BYTES * size // (4 * prod(shape))))
        return tuple(shape)

    def blocks(self, layer: int = 0) -> Iterator[tuple[slice, tuple[slice, ...]]]:
        """Yield the rows of each block of one tensor, in order, and the block's index into the parameter."""
        size = self.shape[self._axis]
        step = self.chunk[self._axis]
        unit = self.tensor_shape[0] // size  # rows of one head
        for start in range(0, size, step):
            stop = min(start + step, size)
            index = [slice(None)] * len(self.shape)
            if self.stacked:
                index[0] = slice(layer, layer + 1)
            index[self._axis] = slice(start, stop)
            yield slice(start * unit, stop * unit), tuple(index)

    def to_parameter(self, rows: np.ndarray) -> np.ndarray:
        """Rearrange a block of a tensor as a block of the parameter (a view)."""
        tensor, parameter = self._patterns
        sizes = {"d": self.config.head_dim} if "d" in tensor else {}
        return rearrange(rows, f"{tensor} -> {'1 ' * self.stacked}{parameter}", **sizes)

    def to_tensor(self, block: np.ndarray) -> np.ndarray:
        """Invert `to_parameter`."""
        tensor, parameter = self._patterns
        return rearrange(block, f"{'1 ' * self.stacked}{parameter} -> {tensor}")

    @property
    def _patterns(self) -> list[str]:
        return self._tensors[1].split(" -> ")

    @cached_property
    def _tensors(self) -> tuple[str, str]:
        return tensors_of(self.config)[self.path]

    def _sizes(self, pattern: str) -> list[int]:
        return [self.config.sizes[letter] for letter in re.findall(r"\w", pattern)]

    @property
    def _axis(self) -> int:
        """Dimension of the parameter, from the end, that corresponds to the tensor's rows (counted in whole heads)."""
        tensor, parameter = self._patterns
        letters = parameter.split()
        return letters.index(tensor.lstrip("(")[0]) - len(letters)


def weights(config: DecoderConfig) -> list[Weight]:
    """Return all parameters of a model."""
    return [Weight(path, config) for path in tensors_of(config)]
