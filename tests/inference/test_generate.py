"""Greedy continuation equals the argmax of whole forward passes."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from ringformer.inference.generate import generate
from ringformer.models.llama import Llama
from ringformer.models.llama_config import LlamaConfig
from ringformer.models.llama_presets import preset


def test_greedy_equals_argmax_of_growing_text():
    shape = preset("tiny") | {"num_layers": 2, "init_std": 0.3}
    config = LlamaConfig(**shape, compute_dtype="float32", attention="vanilla")
    model = Llama(config, rngs=nnx.Rngs(0))
    text = [5, 9, 200]
    out = generate(model, text, max_new_tokens=4)
    forward = jax.jit(lambda model, tokens: model(tokens)[0, -1])
    for token in out:
        assert token == int(forward(model, jnp.array([text])).argmax())
        text.append(token)
    assert generate(model, [5, 9, 200], max_new_tokens=4, temperature=1.0, seed=1) != out


@pytest.mark.parametrize("prompt", [[], [257], [-1]])
def test_bad_prompts(prompt):
    model = Llama(LlamaConfig(**preset("tiny")), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, prompt, max_new_tokens=2)
