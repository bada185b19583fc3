"""A model in forty lines through the door that LLaMA came through: a table, one head of ring attention, a head."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from ringformer.models.registry import Family, register
from ringformer.ops.ring_attention import ring_attention
from ringformer.ops.tokenwise.cross_entropy import cross_entropy, token_cross_entropy
from ringformer.ops.tokenwise.embedding import embed


@dataclass(frozen=True)
class ToyConfig:
    vocab_size: int = 257
    width: int = 32
    compute_dtype: str = "float32"
    layout: str = "zigzag"
    ulysses: ClassVar = 1
    ARCHITECTURE: ClassVar = ("vocab_size", "width")
    CONTEXT: ClassVar = ()
    INHERITED: ClassVar = ()

    @property
    def num_params(self) -> int:
        return 2 * self.vocab_size * self.width + 3 * self.width**2

    def check_mesh(self, mesh):
        if self.width < mesh.size:
            raise ValueError(f"a toy of width {self.width} is too small for {mesh.size} devices")

    def check_stage(self, written):
        pass


class Toy(nnx.Module):
    def __init__(self, config, *, rngs):
        V, D = config.vocab_size, config.width
        self.config = config
        for name, letters, shape in ("embed", "VD", (V, D)), ("qkv", "DQ", (D, 3 * D)), ("head", "DV", (D, V)):
            setattr(self, name, nnx.Param(0.2 * jax.random.normal(rngs.params(), shape), letters=letters))

    def loss(self, batch, *, axes, gather):
        x, head = self.hidden(batch, axes, gather)
        return cross_entropy(x, head, batch.targets, batch.mask, 64)

    def token_losses(self, batch, *, axes, gather):
        x, head = self.hidden(batch, axes, gather)
        return token_cross_entropy(x, head, batch.targets, 64)

    def hidden(self, batch, axes, gather):
        x = embed(gather("embed", self.embed[...]), batch.tokens)
        q, k, v = (y[:, :, None] for y in jnp.split(x @ gather("qkv", self.qkv[...]), 3, axis=-1))
        o = ring_attention(q, k, v, axis_name=axes.sp, layout=self.config.layout, segment_ids=batch.segment_ids)
        return x + o[:, :, 0], gather("head", self.head[...])


register("toy", Family(ToyConfig, Toy, {"toy": {}, "wide_toy": {"width": 48}}))
