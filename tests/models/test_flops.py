"""FLOPs by both conventions, by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.estimate.compiled.program_text import Program
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.models.flops import executed_attention_flops, executed_flops, model_flops_per_token, working_params
from ringformer.models.registry import flops_per_token

MODEL = LlamaConfig(**preset("llama_7b"), remat="none")


def test_the_convention_of_mfu():
    """6 N + 12 L H d T with N without the input embedding."""
    N = 6.738e9 - 32000 * 4096
    assert model_flops_per_token(MODEL, 2048) == pytest.approx(6 * N + 12 * 32 * 4096 * 2048, rel=1e-3)


def test_frozen_weights_count_no_gradient():
    """4 N instead of 6 N; attention counts as before."""
    N = 6.738e9 - 32000 * 4096
    saved = model_flops_per_token(MODEL, 2048) - model_flops_per_token(MODEL, 2048, frozen=True)
    assert saved == pytest.approx(2 * N, rel=1e-3)
    assert flops_per_token(MODEL, 2048, frozen=True) == model_flops_per_token(MODEL, 2048, frozen=True)


def test_a_causal_mask_leaves_half_of_attention():
    attention = 12 * 32 * 4096 * 2048
    whole, causal = (model_flops_per_token(MODEL, 2048, causal=causal) for causal in (False, True))
    assert whole - causal == attention / 2


@pytest.mark.parametrize("window", [1, 100, 2048, 5000])
def test_a_window_leaves_its_pairs(window):
    """Counted one by one; a token counts half of its own pair, as half of a sequence does."""
    T = 2048
    age = np.arange(T)[:, None] - np.arange(T)
    pairs = ((age >= 0) & (age < window)).sum() - (min(window, T) - 1) * 0.5 * (window < T) - T / 2 * (window >= T)
    model = replace(MODEL, window=window)
    products = model_flops_per_token(model, 0)
    attention = (model_flops_per_token(model, T, causal=True) - products) * T
    assert attention == pytest.approx(12 * 32 * 4096 * pairs, rel=1e-3)
    every = model_flops_per_token(model, T) - products
    assert every == pytest.approx(12 * 32 * 4096 * min(window, T))


def test_what_a_step_executes():
    """6 a weight and token, and 14 d a visible pair and head; a second forward is 2 and 4 d more, of what is not
    kept."""
    weights, pairs = MODEL.num_params - 32000 * 4096, 32 * 32 * 128 * 4096**2 / 2
    for remat, group, forward in (
        ("none", 1, (2, 4)),
        ("full", 1, (4, 8)),
        ("full", 2, (6, 12)),
        ("attention", 1, (4, 4)),
        ("attention", 2, (6, 8)),
        ("dots", 1, (2, 4)),
    ):
        model = replace(MODEL, remat=remat, remat_group=group)
        expected = (4 + forward[0]) * weights * 4096 + (10 + forward[1]) * pairs
        assert executed_flops(model, 4096) == pytest.approx(expected), (remat, group)
        frozen = executed_flops(model, 4096, frozen=True)
        assert frozen == pytest.approx(expected - 2 * weights * 4096), (remat, group)
    some = replace(MODEL, remat="attention", offload=True, full_remat_layers=12)
    without = 12 / 32 * 4 * pairs
    assert executed_flops(some, 4096) == pytest.approx(8 * weights * 4096 + 14 * pairs + without)
    kept = executed_flops(replace(MODEL, remat="attention"), 4096) - executed_flops(
        replace(MODEL, remat="feedforward"), 4096
    )
    assert kept == pytest.approx(2 * 32 * 3 * 4096 * 11008 * 4096)


def test_the_conventions_differ_by_the_mask_and_by_the_logits_computed_again():
    """Of attention, by 12 whole pairs against 14 halves; of the weights, by nothing."""
    T = 4096
    attention = 12 * 32 * 4096 * T * T
    assert executed_attention_flops(MODEL, T) == pytest.approx(attention * 14 / 24)
    assert T * model_flops_per_token(MODEL, T) - attention == pytest.approx(
        executed_flops(MODEL, T) - executed_attention_flops(MODEL, T)
    )


def test_an_embedding_works_only_if_it_is_the_head():
    model = LlamaConfig(**preset("tiny"))
    tied = LlamaConfig(**preset("tiny") | {"tie_embeddings": True})
    assert working_params(tied) == tied.num_params and working_params(model) == working_params(tied)


def flops(function, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = Program.parse(jax.jit(function).lower(*arrays).compile().as_text())
    return program.flops(program.entry)


@pytest.mark.parametrize(("differentiated", "each"), [(False, 4), (True, 4 + 8)])
def test_a_pair_by_a_compiled_program(differentiated, each):
    """Plain attention of one head, whose logits are kept: 4 d a pair forward, and 8 d more with its gradients."""
    T, d = 64, 16

    def attend(q, k, v):
        return ((jax.nn.softmax(q @ k.T) @ v) ** 2).sum()

    function = jax.grad(attend, argnums=(0, 1, 2)) if differentiated else attend
    assert flops(function, (T, d), (T, d), (T, d)) == each * d * T * T
