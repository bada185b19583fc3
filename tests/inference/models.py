"""Random tiny models for inference, and what a whole forward pass of theirs gives, in float64."""

import math
from dataclasses import replace
from functools import lru_cache

import jax
import numpy as np
import torch

from ringformer.inference.cache.arrays import CacheDtype
from ringformer.inference.generator import Generator
from ringformer.inference.session import Session
from ringformer.inference.session_arrays import as_global
from ringformer.models.families.llama import LlamaConfig
from ringformer.parallel.mesh import make_mesh
from ringformer.parallel.parameters import weight_shardings
from ringformer.train.state import make_init
from tests.oracle import llama as oracle
from tests.oracle.packing import Rows

CONFIG = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    init_std=0.25,
    compute_dtype="float32",
    q_chunk=8,
    k_chunk=8,
    ffn_chunk=16,
)


@lru_cache
def generator(
    config: LlamaConfig,
    mesh_dim: str,
    max_length: int = 64,
    prefill_chunk: int | None = None,
    cache_dtype: CacheDtype = "compute",
    checkpoint: str | None = "of seed 0",
) -> Generator:
    """Of the weights that the seed 0 draws; one for all tests, and its programs, too."""
    mesh = make_mesh(mesh_dim, jax.devices()[: math.prod(map(int, mesh_dim.split(",")))])

    def placed(x, w):
        padded = np.pad(x, [(0, p - s) for p, s in zip(w.padded_shape, w.shape, strict=True)])
        return as_global(padded, mesh, w.spec)

    params = jax.tree.map(placed, _parameters(config), weight_shardings(config, mesh))
    sizes = {"max_length": max_length, "prefill_chunk": prefill_chunk}
    return Generator(config, params, mesh, **sizes, cache_dtype=cache_dtype, checkpoint=checkpoint)


def _parameters(config: LlamaConfig) -> dict:
    """On the host, whole; equal for configs of one architecture."""
    return _drawn(*(getattr(config, field) for field in LlamaConfig.ARCHITECTURE))


@lru_cache
def _drawn(*architecture) -> dict:
    config = replace(CONFIG, **dict(zip(LlamaConfig.ARCHITECTURE, architecture, strict=True)))
    mesh = make_mesh("1,1,1,1", jax.devices()[:1])
    return jax.tree.map(np.asarray, make_init(config, weight_shardings(config, mesh), mesh, seed=0)())


def log_probabilities(config: LlamaConfig, tokens: list[int]) -> np.ndarray:
    """float64 [T, V]: of every next token after each one, by a whole forward pass of the oracle."""
    T, V = len(tokens), config.vocab_size
    shape = np.zeros((V, T), np.int64)
    everything = Rows(
        tokens=shape + np.array(tokens),
        targets=shape + np.arange(V)[:, None],
        positions=shape + np.arange(T),
        segment_ids=None,
        mask=shape == 0,
        ends=shape,
    )
    return -oracle.losses(_parameters(config), everything, _architecture(config)).T


def _architecture(config: LlamaConfig) -> oracle.Architecture:
    return oracle.Architecture(config.rope_theta, config.norm_eps, config.window)


def losses(config: LlamaConfig, tokens: list[int]) -> np.ndarray:
    """float64 [T - 1]: -log p of every token but the first, by the oracle."""
    row = np.array([tokens])
    shape = np.zeros((1, len(tokens) - 1), np.int64)
    rows = Rows(
        tokens=row[:, :-1],
        targets=row[:, 1:],
        positions=shape + np.arange(len(tokens) - 1),
        segment_ids=None,
        mask=shape == 0,
        ends=shape,
    )
    return oracle.losses(_parameters(config), rows, _architecture(config))[0]


def greedy(config: LlamaConfig, prompt: list[int], new: int) -> list[int]:
    """What the oracle continues with, a whole forward pass a token."""
    text = list(prompt)
    for _ in range(new):
        text.append(int(log_probabilities(config, text)[-1].argmax()))
    return text[len(prompt) :]


class Transcript:
    """A session of greedy turns, with the logits that it had after each token."""

    def __init__(self, session: Session):
        self.session, rows = session, len(session.lengths)
        self.text: list[list[int]] = [[] for _ in range(rows)]
        self._seen: list[list[tuple[int, np.ndarray]]] = [[] for _ in range(rows)]

    def turn(self, rows: list[list[int]], new: int) -> None:
        self.session.append(rows)
        for text, tokens in zip(self.text, rows, strict=True):
            text += tokens
        self._look(range(len(rows)))
        for step in self.session.decode(max_new_tokens=new):
            for text, token in zip(self.text, step, strict=True):
                text += [] if token is None else [token]
            self._look([row for row, token in enumerate(step) if token is not None])

    def _look(self, rows) -> None:
        logits = np.asarray(self.session.logits, np.float64)
        for row in rows:
            self._seen[row].append((len(self.text[row]) - 1, logits[row]))

    def error(self, config: LlamaConfig) -> float:
        """The largest difference of a log-probability from those of whole forward passes over what was written."""
        worst = 0.0
        for text, seen in zip(self.text, self._seen, strict=True):
            expected = log_probabilities(config, text)
            for position, logits in seen:
                found = torch.log_softmax(torch.from_numpy(logits), dim=-1).numpy()
                worst = max(worst, float(np.abs(found - expected[position]).max()))
        return worst
