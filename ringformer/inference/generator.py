"""Generator: loads the model of a run on a mesh, and continues token ids with it."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from ringformer.checkpoints.rope_change import RopeChange
from ringformer.checkpoints.saved_model import context_of, model_of, restore_params, weights_hash
from ringformer.inference.cache.arrays import CacheDtype
from ringformer.inference.inference_config import checked_config, rank_devices_of, usual_dtype
from ringformer.inference.program_sizes import ProgramSizes, round_up
from ringformer.inference.programs import Programs
from ringformer.inference.rows import check_room, check_tokens, padded
from ringformer.inference.sampling import Sampling
from ringformer.inference.session import Session
from ringformer.inference.session_arrays import TOKENS, as_global
from ringformer.inference.session_files import restore_state, settings_of
from ringformer.inference.weight_shares import reshard, weight_shares
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.own_attention import REGISTERED
from ringformer.models.registry import as_decoder
from ringformer.ops import layouts
from ringformer.parallel.mesh import make_mesh, mesh_shape
from ringformer.parallel.parameters import abstract_model, weight_shardings

LONGEST = 2**31 - 1
"""Maximum length of a row in tokens: positions are int32."""


class Generator:
    """A decoder on a mesh (dp, fsdp, tp, sp), with weights sharded over (fsdp, tp, sp) and rows over dp.

    Args:
      params: parameters of a run's checkpoint, sharded by `weight_shardings` for this mesh; its matrices are deleted
        while they are converted.
      max_length: maximum number of tokens of a row, prompt and continuation together.
      prefill_chunk: number of tokens of a prompt to read at a time, for prompts that would need too much memory at
        once; None: all of them.
      cache_dtype: compute, or int8 for half the memory of bfloat16 and an error (docs/inference.md).
      checkpoint: hash of the checkpoint of `params`, by which saved sessions recognize them; None: sessions cannot be
        saved.

    Attributes:
      config: the model as it is computed here. kernel: its attention kernel, and the reason for it.
      sizes: sizes of the programs of its sessions.

    Raises:
      ValueError: for sizes that are not positive, or a mesh that does not fit the model.
    """

    def __init__(
        self,
        config: DecoderConfig,
        params: Any,
        mesh: Mesh,
        *,
        max_length: int,
        prefill_chunk: int | None = None,
        cache_dtype: CacheDtype = "compute",
        checkpoint: str | None = None,
    ):
        check_sizes(max_length, prefill_chunk)
        if cache_dtype not in get_args(CacheDtype):
            raise ValueError(f"cache_dtype={cache_dtype!r}: choose one of {', '.join(get_args(CacheDtype))}")
        local_tokens = (prefill_chunk or max_length) // mesh.shape["sp"]
        self.config: DecoderConfig
        self.kernel: str
        self.config, self.kernel = checked_config(config, mesh, local_tokens)
        self.mesh = mesh
        self.max_length = max_length
        self._programs = Programs(self.config, mesh, cache_dtype)
        self.sizes: ProgramSizes = self._programs.sizes(max_length, prefill_chunk)
        self._settings = None if checkpoint is None else settings_of(self._programs, self.sizes, checkpoint)
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
        cache_dtype: CacheDtype = "compute",
        kernel: str = "auto",
        kernel_check: bool = True,
        q_chunk: int | None = None,
        k_chunk: int | None = None,
        rope: RopeChange | None = None,
    ) -> "Generator":
        """Load the model of a run's latest checkpoint, or a converted model.

        Args:
          mesh_dim: "dp,fsdp,tp,sp". The mesh takes as many devices as it needs, the first ones. One size may be -1,
            which takes the remaining devices. Several processes always use all devices.
          compute_dtype: float32 or bfloat16; None: float32 on CPUs, the run's dtype elsewhere. cache_dtype: as for
            `Generator`.
          kernel: attention kernel, whatever the run was trained with; auto: the best for these devices.
          kernel_check: compare the attention kernel with XLA's blocks on these devices before it is used.
          q_chunk, k_chunk: queries and keys of a chunk pair (`DecoderConfig`); None: the run's.
          rope: another rope than the model's.

        Raises:
          ValueError, FileNotFoundError: if `run` holds no decoder, the mesh or `rope` does not fit the model, or a
            checkpoint was written while another was read.
        """
        check_sizes(max_length, prefill_chunk)
        config = as_decoder(model_of(run), run)
        if rope is not None:
            config = rope.apply(config, context_of(run))
        config = replace(config, kernel=kernel, kernel_check=kernel_check)  # type: ignore[arg-type]
        devices = jax.devices()
        dtype = compute_dtype or usual_dtype(config, devices[0].platform)
        config = replace(config, compute_dtype=dtype)  # type: ignore[arg-type]  # the config checks it
        if q_chunk is not None:
            config = replace(config, q_chunk=q_chunk)
        if k_chunk is not None:
            config = replace(config, k_chunk=k_chunk)
        mesh_sizes = mesh_dim.split(",")
        if jax.process_count() == 1 and all(size.strip().isdigit() for size in mesh_sizes):
            devices = devices[: math.prod(map(int, mesh_sizes))]
        _, _, tp, sp = mesh_shape(mesh_dim, len(devices))
        mesh = make_mesh(mesh_dim, devices, rank_devices_of(config, tp, sp))
        # Before any weights are read: refuse a mesh that does not fit, and check the kernel while the memory is free.
        checked_config(config, mesh, (prefill_chunk or max_length) // mesh.shape["sp"])
        dtypes = jax.tree.map(lambda share: share.dtype, weight_shares(config, mesh))
        checkpoint = weights_hash(run)
        params = restore_params(run, weight_shardings(config, mesh), mesh, dtypes)
        if weights_hash(run) != checkpoint:
            raise ValueError(f"{run} wrote a checkpoint while it was being read: start again")
        return cls(
            config,
            params,
            mesh,
            max_length=max_length,
            prefill_chunk=prefill_chunk,
            cache_dtype=cache_dtype,
            checkpoint=checkpoint,
        )

    @property
    def can_fork(self) -> bool:
        """True if rows can share the text of one (`Session.fork`)."""
        return self.mesh.shape["dp"] == 1 and not any(self.config.windows) and self.can_append

    @property
    def can_append(self) -> bool:
        """True if a session can read more tokens after the first ones."""
        return self.config.attention not in REGISTERED

    def session(self, rows: int) -> Session:
        """Start a session of `rows` empty rows, a multiple of dp."""
        return Session(self._programs, self._weights, rows, self.sizes, self._settings)

    def restore_session(self, folder: str | Path) -> Session:
        """Return a session that `Session.save` wrote. It goes on as the saved one would have.

        Raises:
          ValueError: if it belongs to another model, mesh, dtype or size, which the message names.
          FileNotFoundError, DamagedFiles: if the folder is not there, or differs from what was written.
        """
        if self._settings is None:
            raise ValueError("weights without a checkpoint are those of no saved session: use Generator.load")
        state, slots = restore_state(Path(folder), self._programs, self.sizes, self._settings)
        rows = len(slots.lengths)
        return Session(self._programs, self._weights, rows, self.sizes, self._settings, saved=(state, slots))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),
        end_tokens: Collection[int] = (),
    ) -> list[list[int]]:
        """Return the ids that follow each prompt, including the end token if there is one.

        Raises ValueError under the same conditions as `Session.append` and `Session.decode`, but before anything is
        computed.
        """
        check_tokens(prompts, self.config.vocab_size)
        check_room(max(map(len, prompts)), max_new_tokens, self.max_length)
        session = self.session(len(prompts))
        session.append(prompts)
        steps = session.decode(max_new_tokens=max_new_tokens, sampling=sampling, end_tokens=end_tokens)
        return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]

    def token_losses(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Compute, by a forward pass, -log p in nats of every token of each row except the first, float32 [length - 1].

        Before anything is computed, raises ValueError for a row that has fewer than two tokens, more than max_length
        tokens, or ids outside the vocabulary.
        """
        check_tokens(rows, self.config.vocab_size)
        for number, row in enumerate(rows):
            if not 2 <= len(row) <= self.max_length:
                raise ValueError(f"row {number} has {len(row)} tokens; it must have 2 to max_length={self.max_length}")
        dp = self.mesh.shape["dp"]
        return [loss for first in range(0, len(rows), dp) for loss in self._losses(rows[first : first + dp])]

    def _losses(self, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the losses of at most dp rows."""
        dp = self.mesh.shape["dp"]
        sizes = self.sizes
        length = round_up(max(map(len, rows)) - 1, sizes.step)
        every = [*rows, *[()] * (dp - len(rows))]
        tokens = padded([row[:-1] for row in every], length)
        targets = padded([row[1:] for row in every], length)
        order = layouts.permutation(self.config.layout, length, sizes.ranks // self.config.ulysses)
        positions = np.broadcast_to(order.astype(np.int32), tokens.shape)
        arrays = (as_global(x, self.mesh, TOKENS) for x in (tokens[:, order], positions, targets[:, order]))
        losses = np.asarray(self._programs.losses(dp, length)(self._weights, *arrays))[:, np.argsort(order)]
        return [loss[: len(row) - 1] for row, loss in zip(rows, losses, strict=False)]


def load_model(run_dir: str | Path, **changes: Any) -> Any:
    """Load the model of a run's latest checkpoint, or a converted model, in float32 on the default device.

    Args:
      changes: fields of the model's configuration that determine how it is computed, e.g. `attention="vanilla"`.
    """
    saved: Any = model_of(run_dir)  # a dataclass
    config = replace(saved, **changes)
    default = jax.config.jax_default_device  # type: ignore[attr-defined]  # JAX defines it at import
    mesh = make_mesh("1,1,1,1", [default or jax.devices()[0]])
    params = restore_params(run_dir, weight_shardings(config, mesh), mesh)
    return nnx.merge(abstract_model(config)[0], params)


def check_sizes(max_length: int, prefill_chunk: int | None) -> None:
    """Raise ValueError for a size that is too small, or a length that is too large for int32 positions."""
    if not 2 <= max_length <= LONGEST:
        raise ValueError(
            f"max_length={max_length:,} must be at least 2, for a prompt and a token after it, and at most "
            f"{LONGEST:,}, because positions have 32 bits"
        )
    if prefill_chunk is not None and prefill_chunk < 1:
        raise ValueError(f"prefill_chunk={prefill_chunk} must be positive, or unset")
