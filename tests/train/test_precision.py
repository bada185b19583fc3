"""The default bfloat16 step against a float64 LLaMA: what rounding costs, held for every parameter.

Random numbers hide rounding: the errors of a thousand tokens average out, and logits near zero round well. Three sets
of parameters and batches beside random ones make it show, each as trained models have it (`SETTINGS`). Parameters are
representable in bfloat16, and programs are compiled to round where they say so (`xla_allow_excess_precision` off): what
is left is the arithmetic of the step.

After a change that may alter it, or for another JAX, print the table: python -m tests.train.test_precision
"""

import dataclasses
from collections.abc import Callable
from functools import cache

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from ringformer.data import Batch
from ringformer.models.families.llama import LlamaConfig
from ringformer.ops.layouts import permutation
from ringformer.parallel.mesh import BATCH, make_mesh
from ringformer.parallel.parameters import specs, weight_shardings
from ringformer.runs.config import OptimizerConfig
from ringformer.train.program import make_program
from ringformer.train.state import TrainState, state_shardings
from ringformer.train.step import make_train_step
from tests.helpers import relative_error
from tests.oracle import llama

B, T = 4, 512
# Small chunks: many sums. All dimensions divide by eight: no weight is padded.
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=1e6,
    q_chunk=32,
    k_chunk=32,
    ffn_chunk=16,
    loss_chunk=8,
)
DENSE = dataclasses.replace(CONFIG, attention="vanilla")
KEEP_GRADIENT = optax.trace(decay=0.0)
"""An optimizer whose state is the gradient, to the bit."""

RING_8, OTHER_MESHES = "1,1,1,8", ["1,4,2,1", "1,2,2,2", "1,2,1,4"]
"""Rings of 8 and, slow, of 1, 2 and 4 beside other axes, on eight devices."""
ALONE = ["1,1,1,1", "1,1,1,2", "1,1,1,4"]
"""The shorter rings without other axes."""

TIMES_DENSE = 1.3
"""The error of a gradient, over that of one device with dense attention."""
MARGIN = 1.15
"""Of the measured errors, below."""
LOSS_ERROR = 1e-4
"""Relative, of the batch's loss: 4e-5 at most today."""


def parameters(values_mean=0.0, logits_offset=0.0, keys_offset=0.0, embedding_mean=2.0, head=1.0, **scales):
    """Random weights; embeddings have a common component, and along it values, logits and keys may have one, too."""
    c, rng = CONFIG, np.random.default_rng(0)

    def normal(*shape, fan_in=1, scale=1.0):
        return scale * rng.standard_normal(shape) / fan_in**0.5

    V, D, F, H, K, d, L = (c.sizes[letter] for letter in "VDFHKdL")
    embed = normal(V, D) + embedding_mean * normal(D)
    wo, ffn = scales.get("wo", 1.0), scales.get("ffn", 1.0)
    params = {
        "embed": embed,
        "layers": {
            "attention_norm": {"scale": 1 + 0.1 * normal(L, D)},
            "attention": {
                "wq": normal(L, D, H, d, fan_in=D),
                "wk": normal(L, D, K, d, fan_in=D),
                "wv": normal(L, D, K, d, fan_in=D),
                "wo": normal(L, H, d, D, fan_in=H * d, scale=wo),
            },
            "feedforward_norm": {"scale": 1 + 0.1 * normal(L, D)},
            "feedforward": {
                "w_gate": normal(L, D, F, fan_in=D, scale=ffn),
                "w_up": normal(L, D, F, fan_in=D, scale=ffn),
                "w_down": normal(L, F, D, fan_in=F, scale=ffn),
            },
        },
        "norm": {"scale": 1 + 0.1 * normal(D)},
        "head": normal(D, V, fan_in=D, scale=head),
    }
    common = embed.mean(axis=0)
    common /= np.linalg.norm(common) * D**0.5  # times a normed token: about 1
    attention = params["layers"]["attention"]
    params["head"] += logits_offset * common[:, None]
    turn = normal(d)
    attention["wq"] += keys_offset * common[:, None, None] * turn
    attention["wk"] += keys_offset * common[:, None, None] * turn
    attention["wv"] += values_mean * common[:, None, None] * normal(L, 1, 1, d)
    return jax.tree.map(lambda x: np.asarray(jax.numpy.asarray(x, "bfloat16"), np.float32), params)


def batch(documents=1, one_target=False) -> Batch:
    rng = np.random.default_rng(1)
    tokens, targets = rng.integers(0, CONFIG.vocab_size, (2, B, T))
    ids = np.sort(rng.integers(1, documents + 1, (B, T)), axis=1)
    starts = np.stack([np.searchsorted(row, row) for row in ids])
    arrays = tokens, targets * (not one_target), np.arange(T) - starts, ids
    mask = rng.random((B, T)) < 0.9
    return Batch(*(x.astype(np.int32) for x in arrays), mask, ends=np.zeros_like(mask))


SETTINGS: dict[str, Callable] = {
    "random": lambda: (parameters(embedding_mean=0.0), batch(3)),
    # Every token pulls the same way: gradients are sums of like terms, and the error of the sum is what shows.
    "coherent": lambda: (parameters(embedding_mean=1.0, head=0.1, wo=0.5, ffn=0.7), batch(one_target=True)),
    # Logits, of attention and of the loss, far from zero and close together: softmax forgives the offset, rounding not.
    "offsets": lambda: (parameters(logits_offset=64.0, keys_offset=3.0), batch()),
    # Values with a mean, so that o and delta have one; keys with one, so that delta's error does not average out.
    "means": lambda: (parameters(values_mean=4.0, keys_offset=3.0, logits_offset=48.0, wo=2.0, ffn=0.5), batch(3)),
}

MEASURED = {
    "0.10.2": {
        "embed": (0.782, 0.185, 1.160, 2.514),
        "head": (0.465, 0.0743, 0.156, 0.188),
        "layers.attention.wk": (0.999, 0.264, 2.271, 8.377),
        "layers.attention.wo": (0.830, 0.0964, 0.603, 0.387),
        "layers.attention.wq": (0.987, 0.287, 4.717, 16.09),
        "layers.attention.wv": (0.869, 0.0956, 0.568, 0.429),
        "layers.attention_norm.scale": (1.104, 0.0419, 0.835, 1.982),
        "layers.feedforward.w_down": (0.762, 0.103, 0.638, 0.404),
        "layers.feedforward.w_gate": (0.812, 0.112, 0.677, 0.459),
        "layers.feedforward.w_up": (0.787, 0.111, 0.672, 0.500),
        "layers.feedforward_norm.scale": (0.709, 0.0661, 0.684, 0.523),
        "norm.scale": (0.126, 0.0329, 0.717, 0.347),
        "all": (0.694, 0.0744, 0.475, 0.294),
    },
    "0.12.0.1": {
        "embed": (0.780, 0.185, 1.162, 2.503),
        "head": (0.463, 0.0764, 0.156, 0.189),
        "layers.attention.wk": (0.999, 0.264, 2.282, 8.417),
        "layers.attention.wo": (0.822, 0.0959, 0.602, 0.389),
        "layers.attention.wq": (0.988, 0.287, 4.705, 16.06),
        "layers.attention.wv": (0.865, 0.0957, 0.568, 0.432),
        "layers.attention_norm.scale": (1.029, 0.0414, 0.831, 1.967),
        "layers.feedforward.w_down": (1.035, 0.222, 0.685, 0.452),
        "layers.feedforward.w_gate": (1.056, 0.207, 0.730, 0.481),
        "layers.feedforward.w_up": (1.041, 0.209, 0.710, 0.520),
        "layers.feedforward_norm.scale": (0.712, 0.064, 0.682, 0.527),
        "norm.scale": (0.128, 0.0327, 0.717, 0.348),
        "all": (0.814, 0.0766, 0.483, 0.297),
    },
}
"""By JAX version, percent of a gradient's norm in each of the `SETTINGS`: the largest error on eight devices. A version
that is not here is held to the last one."""


@cache
def setting(name):
    return SETTINGS[name]()


@cache
def exact(name) -> tuple[float, dict]:
    params, b = setting(name)
    total, gradients = llama.loss_and_gradients(params, b, llama.Architecture(CONFIG.rope_theta, CONFIG.norm_eps))
    return total / b.mask.sum(), jax.tree.map(lambda g: g / b.mask.sum(), gradients)


@cache
def measured(mesh_dim: str, config: LlamaConfig = CONFIG) -> dict[str, dict[str, float]]:
    """The errors of a step's gradients by setting and parameter, of the whole gradient, and of the loss (relative)."""
    mesh = make_mesh(mesh_dim, jax.devices()[: np.prod([int(n) for n in mesh_dim.split(",")])])
    shardings = state_shardings(weight_shardings(config, mesh), KEEP_GRADIENT)
    step = make_train_step(config, KEEP_GRADIENT, shardings, mesh, clip_norm=float("inf"))
    order = permutation(config.layout, T, mesh.shape["sp"])
    found = {}
    for name in SETTINGS:
        params, b = setting(name)
        state = TrainState(np.int32(0), params, KEEP_GRADIENT.init(params))
        state = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), state, specs(shardings))
        laid_out = jax.tree.map(lambda x: jax.device_put(x[:, order], NamedSharding(mesh, BATCH)), b)
        if not found:
            step = step.lower(state, laid_out).compile(compiler_options={"xla_allow_excess_precision": False})
        state, metrics = step(state, laid_out)
        gradients, (loss, expected) = jax.device_get(state.opt_state.trace), exact(name)
        found[name] = {
            ".".join(key.key for key in path): error
            for path, error in jax.tree.leaves_with_path(jax.tree.map(relative_error, gradients, expected))
        }
        whole = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (gradients, expected))
        found[name]["all"] = relative_error(*whole)
        found[name]["loss"] = relative_error(metrics["loss"], loss)
    return found


@pytest.mark.parametrize("mesh_dim", [RING_8, *(pytest.param(m, marks=pytest.mark.slow) for m in OTHER_MESHES)])
def test_no_error_grows(mesh_dim):
    """Every parameter's gradient and the loss, on every ring: at most what was measured, and a margin."""
    found, table = measured(mesh_dim), MEASURED.get(jax.__version__, list(MEASURED.values())[-1])
    for i, name in enumerate(SETTINGS):
        limits = {key: MARGIN * row[i] / 100 for key, row in table.items()} | {"loss": LOSS_ERROR}
        assert found[name].keys() == limits.keys()
        over = {key: (error, limits[key]) for key, error in found[name].items() if not error <= limits[key]}
        assert not over, f"{name}: errors and their limits {over}"


@pytest.mark.slow
@pytest.mark.parametrize("mesh_dim", [RING_8, *(pytest.param(m, marks=pytest.mark.slow) for m in ALONE)])
def test_a_ring_rounds_little_more_than_dense_attention(mesh_dim):
    """The whole gradient in every setting; with random numbers each parameter's."""
    ring, dense = measured(mesh_dim), measured("1,1,1,1", DENSE)
    ratios = {name: ring[name]["all"] / dense[name]["all"] for name in SETTINGS}
    ratios |= {key: ring["random"][key] / error for key, error in dense["random"].items() if key != "loss"}
    assert max(ratios.values()) < TIMES_DENSE, ratios


def main():
    """Print all errors in percent, and the rows of `MEASURED`."""
    runs = {"dense": measured("1,1,1,1", DENSE)} | {mesh: measured(mesh) for mesh in [RING_8, *OTHER_MESHES, *ALONE]}
    for name in SETTINGS:
        print(f"{name:30}" + "".join(f"{run:>10}" for run in runs))
        for key in runs["dense"][name]:
            print(f"{key:30}" + "".join(f"{100 * run[name][key]:10.4f}" for run in runs.values()))
    print(f'"{jax.__version__}": {{')
    for key in next(iter(MEASURED.values())):
        worst = [max(100 * runs[mesh][name][key] for mesh in [RING_8, *OTHER_MESHES]) for name in SETTINGS]
        print(f'    "{key}": ({", ".join(f"{x:.4g}" for x in worst)}),')
    print("},")


if __name__ == "__main__":
    import tests.conftest  # noqa: F401 - eight simulated devices

    main()


def test_a_runs_program_keeps_the_gradients_of_products_in_float32():
    """The tests above make their own shardings: a run's must be the same, or its gradients are rounded to bfloat16."""
    mesh = make_mesh("1,2,2,2")
    config = dataclasses.replace(CONFIG, compute_dtype="bfloat16")
    program = make_program(config, mesh, OptimizerConfig(), steps=10, seq_len=64)
    assert program.shardings.params == weight_shardings(config, mesh)
    of_products = [w for w in jax.tree.leaves(program.shardings.params) if w.of_product]
    assert len(of_products) == 7
