"""Continue a prompt with a model on one device, without a cache: each token costs one forward pass over the text.

Right for looking at a small model in the middle of its training; nothing to serve with.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from ringformer.models.llama import Llama


def generate(
    model: Llama, prompt: list[int], *, max_new_tokens: int, temperature: float = 0.0, seed: int = 0
) -> list[int]:
    """The token ids that follow `prompt`; the most likely ones at temperature 0, else sampled.

    Raises ValueError for an empty prompt or one with ids outside the vocabulary.
    """
    V = model.config.vocab_size
    if not prompt or min(prompt) < 0 or max(prompt) >= V:
        raise ValueError(f"the prompt must hold at least one token, all of them in [0, {V}); got {prompt[:10]}")
    tokens = jnp.zeros((1, len(prompt) + max_new_tokens), jnp.int32).at[0, : len(prompt)].set(jnp.array(prompt))
    definition, state = nnx.split(model)
    out = _continue(definition, state, tokens, len(prompt), temperature, jax.random.key(seed))
    return out[0, len(prompt) :].tolist()


@partial(jax.jit, static_argnums=(0, 4))
def _continue(definition, state, tokens, start, temperature, key):
    model = nnx.merge(definition, state)

    def write_next(i, tokens):
        logits = model(tokens)[0, i - 1]  # what lies after i is not seen: attention is causal
        if temperature > 0:
            choice = jax.random.categorical(jax.random.fold_in(key, i), logits / temperature)
        else:
            choice = logits.argmax()
        return tokens.at[0, i].set(choice)

    return jax.lax.fori_loop(start, tokens.shape[1], write_next, tokens)
