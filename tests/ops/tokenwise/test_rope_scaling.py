"""Scaled rotary frequencies: those of transformers for the same settings, and settings that contradict each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ringformer.ops.tokenwise import rope
from ringformer.ops.tokenwise.rope import RopeScaling

LLAMA_3_1 = dict(kind="llama3", factor=8.0, original_max_position=8192)
YARN = dict(kind="yarn", factor=16.0, original_max_position=4096)

SETTINGS = [
    dict(kind="none"),
    dict(kind="linear", factor=4.0),
    dict(kind="linear", factor=1.0),
    LLAMA_3_1,
    LLAMA_3_1 | dict(factor=32.0),
    LLAMA_3_1 | dict(low_freq_factor=2.0, high_freq_factor=16.0, original_max_position=1024),
    YARN,
    YARN | dict(beta_fast=20.0, beta_slow=2.5),
    YARN | dict(truncate=False),
    YARN | dict(truncate=False, beta_fast=64.0, original_max_position=512, factor=3.5),
    YARN | dict(original_max_position=16),  # every frequency turns less than beta_fast times
    YARN | dict(original_max_position=10**9),  # every frequency turns more than beta_slow times
    YARN | dict(attention_factor=0.8),
    YARN | dict(mscale=0.7),
    YARN | dict(mscale=0.7, mscale_all_dim=1.2),
    YARN | dict(mscale=1.0, mscale_all_dim=0.0),
    YARN | dict(factor=1.0),
]


def transformers_config(settings: dict, head_dim: int, theta: float) -> LlamaConfig:
    parameters = {"rope_theta": theta} | settings
    parameters["rope_type"] = {"none": "default"}.get(parameters["kind"], parameters.pop("kind"))
    if parameters["rope_type"] == "llama3":
        parameters = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | parameters
    if "original_max_position" in parameters:
        parameters["original_max_position_embeddings"] = parameters.pop("original_max_position")
    return LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, max_position_embeddings=2**30, rope_parameters=parameters
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("head_dim", "theta"), [(128, 1e4), (128, 5e5), (64, 5e7), (10, 1e4)])
def test_frequencies_and_amplitude_are_those_of_transformers(settings, head_dim, theta):
    config = transformers_config(settings, head_dim, theta)
    if settings["kind"] == "none":
        expected, amplitude = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, amplitude = ROPE_INIT_FUNCTIONS[settings["kind"]](config)
    scaling = RopeScaling(**settings)
    found = rope.frequencies(head_dim, theta, scaling)
    assert found.dtype == np.float64
    # The blends of llama3 subtract float32 numbers there, whose difference may be a hundredth of them.
    tolerance = 1e-5 if settings["kind"] == "llama3" else 1e-6
    np.testing.assert_allclose(found, expected.numpy(), rtol=tolerance)
    assert scaling.amplitude == pytest.approx(amplitude, rel=1e-12)


def test_the_amplitude_multiplies_cos_and_sin():
    scaling = RopeScaling(**YARN)
    frequencies = rope.frequencies(64, 1e4, scaling)
    positions = jnp.arange(64, dtype=jnp.int32)
    cos, sin = rope.rotations(positions, frequencies, scaling.amplitude)
    np.testing.assert_allclose(np.hypot(cos, sin), 0.1 * np.log(16) + 1, rtol=1e-6)
    np.testing.assert_allclose(jnp.arctan2(sin, cos)[1], frequencies, rtol=1e-6, atol=3e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(kind="dynamic"), "unknown rope_scaling.kind 'dynamic'; known: none, linear, yarn, llama3"),
        (dict(kind="longrope", factor=2.0), "unknown rope_scaling.kind 'longrope'"),
        (dict(factor=2.0), "kind none does not use factor"),
        (dict(kind="linear"), "kind linear needs factor"),
        (dict(kind="yarn", factor=8.0), "kind yarn needs original_max_position"),
        (LLAMA_3_1 | dict(original_max_position=None), "kind llama3 needs original_max_position"),
        (dict(kind="linear", factor=2.0, beta_fast=3.0), r"does not use beta_fast \(beta_fast belongs to yarn\)"),
        (YARN | dict(low_freq_factor=1.0), r"low_freq_factor belongs to llama3"),
        (LLAMA_3_1 | dict(attention_factor=1.0), r"kind llama3 does not use attention_factor"),
        (dict(kind="linear", factor=0.5), "factor=0.5 must be at least 1"),
        (dict(kind="linear", factor=float("nan")), "factor=nan must be at least 1"),
        (YARN | dict(mscale=-1.0), "mscale=-1.0 must be >= 0"),
        (YARN | dict(attention_factor=0.0), "attention_factor=0"),
        (YARN | dict(beta_slow=40.0), "beta_slow=40.0 must be positive and less than beta_fast=32.0"),
        (LLAMA_3_1 | dict(low_freq_factor=4.0), "low_freq_factor=4.0 must be positive and less than high_freq"),
    ],
    ids=str,
)
def test_contradictions_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**settings)


def test_a_scaling_is_a_static_argument():
    function = jax.jit(lambda scaling: jnp.float32(scaling.amplitude), static_argnums=0)
    assert function(RopeScaling(**YARN)) != function(RopeScaling(**YARN | dict(factor=2.0)))
    assert function._cache_size() == 2
    assert function(RopeScaling(**YARN)) and function._cache_size() == 2
