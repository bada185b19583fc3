"""Initial weights, drawn as LLaMA draws them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ringformer.models.decoder_config import DecoderConfig


def normal(config: DecoderConfig, rngs: nnx.Rngs, letters: str) -> nnx.Param[Any]:
    """Draw a float32 parameter of the shape spelled by its letters, normal with the config's standard deviation."""
    sizes = config.sizes
    shape = tuple(sizes[letter] for letter in letters)
    return nnx.Param(config.init_std * jax.random.normal(rngs.params(), shape, jnp.float32), letters=letters)
