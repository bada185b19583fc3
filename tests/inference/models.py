"""Random tiny models for inference, and what a whole forward pass of theirs gives, in float64."""

import jax
import numpy as np
import torch
from flax import nnx

from ringformer.inference.generator import Generator
from ringformer.mesh import make_mesh
from ringformer.models.llama import Llama
from ringformer.models.llama_config import LlamaConfig
from ringformer.train.state import make_init, weight_shardings
from tests.oracle import llama as oracle

CONFIG = LlamaConfig(
    vocab_size=61, hidden_size=32, intermediate_size=40, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    init_std=0.25, compute_dtype="float32", q_chunk=8, k_chunk=8, ffn_chunk=16,
)  # fmt: skip


def generator(config: LlamaConfig, mesh_dim: str, **options) -> Generator:
    """Of the weights that the seed 0 draws."""
    shape = [int(x) for x in mesh_dim.split(",")]
    mesh = make_mesh(mesh_dim, jax.devices()[: int(np.prod(shape))])
    params = make_init(config, weight_shardings(config, mesh), mesh, seed=0)()
    return Generator(config, params, mesh, **options)


def log_probabilities(config: LlamaConfig, tokens: list[int]) -> np.ndarray:
    """float64 [T, V] of the next token after each one."""
    params = nnx.to_pure_dict(nnx.state(Llama(config, rngs=nnx.Rngs(0))))
    T, V = len(tokens), config.vocab_size

    class Batch:
        segment_ids = None
        mask = np.ones((V, T), bool)
        positions = np.tile(np.arange(T), (V, 1))

    Batch.tokens, Batch.targets = np.tile(tokens, (V, 1)), np.tile(np.arange(V)[:, None], (1, T))
    with torch.no_grad():
        return -oracle.losses(params, Batch, oracle.Architecture(config.rope_theta, config.norm_eps)).T
