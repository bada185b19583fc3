"""A model on a mesh that continues token ids; it knows no text."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from ringformer.checkpoints.saved_model import model_of, restore_params
from ringformer.inference.program_sizes import step_of_sizes
from ringformer.inference.programs import TOKENS, Programs, as_global, inference_config
from ringformer.inference.sampling import Sampling
from ringformer.inference.session import Session, check_decoding, check_tokens
from ringformer.inference.weight_shares import parameter_dtypes, reshard
from ringformer.models.llama_config import LlamaConfig
from ringformer.ops import layouts
from ringformer.parallel.mesh import make_mesh
from ringformer.parallel.parameters import weight_shardings

LONGEST = 2**31 - 1
"""Tokens of a row, whose positions are int32."""


class Generator:
    """A LLaMA on a mesh (dp, fsdp, tp, sp), its weights shared out over (fsdp, tp, sp) and rows over dp.

    Args:
      params: as a run's checkpoint has them, laid out by `weight_shardings` for this mesh; the matrices are deleted.
      max_length: tokens, prompt and continuation together, that a row may have.
      prefill_chunk: tokens of a prompt that are taken in at once, if all would need too much memory; None: all.

    Raises:
      ValueError: sizes that are not positive, a mesh that does not fit the model.
    """

    def __init__(
        self, config: LlamaConfig, params: Any, mesh: Mesh, *, max_length: int, prefill_chunk: int | None = None
    ):
        check_sizes(max_length, prefill_chunk)
        self.config = inference_config(config, mesh, (prefill_chunk or max_length) // mesh.shape["sp"])
        self.mesh, self.max_length, self.prefill_chunk = mesh, max_length, prefill_chunk
        self._programs = Programs(self.config, mesh)
        self._weights = reshard(self.config, params, mesh)

    @classmethod
    def load(
        cls,
        run: str | Path,
        *,
        mesh_dim: str = "1,1,1,1",
        max_length: int,
        prefill_chunk: int | None = None,
        compute_dtype: str | None = None,
        devices: list | None = None,
    ) -> "Generator":
        """The model of a run's latest checkpoint, or of a converted one.

        Args:
          mesh_dim: "dp,fsdp,tp,sp", of which one may be -1: the rest of the devices.
          compute_dtype: float32 or bfloat16; None: the run's.
          devices: of the mesh; None: the first of all, as many as mesh_dim needs.

        Raises:
          ValueError, FileNotFoundError: `run` holds no model, or another one than a LLaMA; the mesh does not fit it.
        """
        check_sizes(max_length, prefill_chunk)
        config = model_of(run)
        if not isinstance(config, LlamaConfig):
            raise ValueError(f"{run} holds a {type(config).__name__}: inference is for LLaMA models")
        if compute_dtype is not None:
            config = replace(config, compute_dtype=compute_dtype)  # type: ignore[arg-type]  # which checks it
        mesh = make_mesh(mesh_dim, _first(mesh_dim) if devices is None else devices)
        inference_config(config, mesh, max_length)  # what does not fit is refused before anything is read
        params = restore_params(run, weight_shardings(config, mesh), mesh, parameter_dtypes(config))
        return cls(config, params, mesh, max_length=max_length, prefill_chunk=prefill_chunk)

    def session(self, rows: int) -> Session:
        """Empty rows, as many as dp or a multiple of it."""
        return Session(self._programs, self._weights, rows, self.max_length, self.prefill_chunk)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),
        end_tokens: Collection[int] = (),
    ) -> list[list[int]]:
        """The ids that follow each prompt, an end token included where one came.

        Raises ValueError, before anything is computed: what `Session.append` and `decode` refuse.
        """
        check_decoding(max_new_tokens, sampling)
        check_tokens(prompts, self.config.vocab_size)
        longest = max(map(len, prompts))
        if longest + max_new_tokens > self.max_length:
            raise ValueError(
                f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed max_length="
                f"{self.max_length}: at most {max(0, self.max_length - longest)} new tokens fit, or a prompt of "
                f"{max(0, self.max_length - max_new_tokens)}"
            )
        session = self.session(len(prompts))
        session.append(prompts)
        out: list[list[int]] = [[] for _ in prompts]
        for tokens in session.decode(max_new_tokens=max_new_tokens, sampling=sampling, end_tokens=end_tokens):
            for row, token in zip(out, tokens, strict=True):
                if token is not None:
                    row.append(token)
        return out

    def token_losses(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """-log p of every token but the first of each row, in nats, float32 [length - 1]: whole forward passes.

        Raises ValueError, before anything is computed: a row of fewer than two tokens or more than max_length, ids
        outside the vocabulary.
        """
        check_tokens(rows, self.config.vocab_size)
        for number, row in enumerate(rows):
            if not 2 <= len(row) <= self.max_length:
                raise ValueError(f"row {number} has {len(row)} tokens, it must have 2 to max_length={self.max_length}")
        dp = self.mesh.shape["dp"]
        return [loss for first in range(0, len(rows), dp) for loss in self._losses(rows[first : first + dp])]

    def _losses(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Of at most dp rows."""
        step = step_of_sizes(self._programs.granule, self.max_length)
        length = -(-(max(map(len, rows)) - 1) // step) * step
        tokens = np.zeros((2, self.mesh.shape["dp"], length), np.int32)  # and targets
        for number, row in enumerate(rows):
            tokens[:, number, : len(row) - 1] = row[:-1], row[1:]
        order = layouts.permutation(self.config.layout, length, self.mesh.shape["sp"])
        positions = np.broadcast_to(order.astype(np.int32), tokens.shape[1:])
        arrays = (as_global(x, self.mesh, TOKENS) for x in (tokens[0][:, order], positions, tokens[1][:, order]))
        found = np.asarray(self._programs.losses(tokens.shape[1], length)(self._weights, *arrays))
        natural = found[:, np.argsort(order)]
        return [natural[number, : len(row) - 1] for number, row in enumerate(rows)]


def check_sizes(max_length: int, prefill_chunk: int | None) -> None:
    """Raise ValueError for sizes that are not positive, or beyond what can be counted."""
    if max_length < 2:
        raise ValueError(f"max_length={max_length} must be at least 2: a prompt and a token after it")
    if max_length > LONGEST:
        raise ValueError(f"max_length={max_length:,} is beyond {LONGEST:,}: positions are of 32 bits")
    if prefill_chunk is not None and prefill_chunk < 1:
        raise ValueError(f"prefill_chunk={prefill_chunk} must be positive, or unset")


def _first(mesh_dim: str) -> list:
    """The first devices, as many as a mesh without a -1 takes; one process takes them, several need all."""
    devices = jax.devices()
    sizes = mesh_dim.split(",")
    if jax.process_count() > 1 or not all(size.strip().isdigit() for size in sizes):
        return devices
    return devices[: math.prod(map(int, sizes))]
