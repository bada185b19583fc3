"""Initial weights, drawn as LLaMA draws them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ringformer.models.decoder_config import DecoderConfig


def normal(config: DecoderConfig, rngs: nnx.Rngs, letters: str, *, of_product: bool = False) -> nnx.Param[Any]:
    """Draw a float32 parameter of the shape spelled by its letters, normal with the config's standard deviation.

    Args:
      of_product: the layer multiplies by it with `product`, which takes a `LayerWeight`.
    """
    sizes = config.sizes
    shape = tuple(sizes[letter] for letter in letters)
    drawn = config.init_std * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(drawn, letters=letters, of_product=of_product)
