"""A family without a vocabulary: bits of bytes are its features, and it predicts the next byte's by their error."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ringformer.models.interface import Feature, Features
from ringformer.models.registry import Family, register
from ringformer.ops.ring_attention import ring_attention


@dataclass(frozen=True)
class BitsConfig:
    width: int = 32
    layout: str = "zigzag"
    compute_dtype: ClassVar = "float32"
    ulysses: ClassVar = 1
    ARCHITECTURE: ClassVar = ("width",)
    CONTEXT: ClassVar = ()
    INHERITED: ClassVar = ()

    @property
    def num_params(self) -> int:
        return 16 * self.width + 3 * self.width**2

    def check_mesh(self, mesh):
        pass

    def check_stage(self, written):
        pass


class Bits(nnx.Module):
    def __init__(self, config, *, rngs):
        D = config.width
        self.config = config
        for name, letters, shape in ("enter", "VD", (8, D)), ("qkv", "DQ", (D, 3 * D)), ("leave", "DV", (D, 8)):
            setattr(self, name, nnx.Param(0.2 * jax.random.normal(rngs.params(), shape), letters=letters))

    def loss(self, batch, *, axes, gather):
        return jnp.where(batch.mask, self.token_losses(batch, axes=axes, gather=gather), 0.0).sum()

    def token_losses(self, batch, *, axes, gather):
        x = batch.features["bits"] @ gather("enter", self.enter[...])
        q, k, v = (y[:, :, None] for y in jnp.split(x @ gather("qkv", self.qkv[...]), 3, axis=-1))
        o = ring_attention(q, k, v, axis_name=axes.sp, layout=self.config.layout, segment_ids=batch.segment_ids)
        predicted = (x + o[:, :, 0]) @ gather("leave", self.leave[...])
        return jnp.square(predicted - batch.features["next_bits"]).sum(axis=-1)


def bits_of(ids: np.ndarray) -> np.ndarray:
    return (ids[..., None] >> np.arange(8) & 1).astype(np.float32)


def read(batch: Any) -> dict[str, np.ndarray]:
    return {"bits": bits_of(batch.tokens), "next_bits": bits_of(batch.targets)}


FEATURES = Features({"bits": Feature("float32", (8,)), "next_bits": Feature("float32", (8,))}, read)
register("bits", Family(BitsConfig, Bits, {"bits": {}}, features=FEATURES, likelihood=False))
