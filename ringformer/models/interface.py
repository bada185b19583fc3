"""Interface of a model: everything that the trainer and the estimator use of it.

A family of models is a configuration and an nnx module, registered by name (`registry.py`). The module sees one
device's slice: local tokens and, inside a `shard_map`, the names of the axes that it may communicate over. Each
`nnx.Param` has metadata `letters`, with a shape letter for each of its last dimensions. From these letters,
`parallel/weight_sharding.py` derives the parameter's sharding ("H", "K" and "F" over tp; vectors are replicated and not
decayed).

Tokens are sharded along the sequence over (sp, tp). A family with `tensor_parallel` gathers tokens over tp before a
block that mixes them, and reduces the block's result, as LLaMA does. Other families are refused on meshes with tp > 1.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
from jax.sharding import AbstractMesh, Mesh

from ringformer.ops.layouts import Layout


@dataclass(frozen=True)
class Axes:
    """Names of the mesh axes that the model itself communicates over, inside a `shard_map`; None: no such axis."""

    sp: str | None = None
    tp: str | None = None
    rings: int = 1
    """Equal rings that the ranks of `sp` form, each with a sequence of its own."""


@runtime_checkable
class ModelConfig(Protocol):
    """A frozen dataclass of the model's sizes and options of its computation: the keys `--config.model.*`.

    It may also have a tuple `EXECUTION` of the fields that change results only by rounding, so that a run can be
    resumed with other values. All other fields are part of a run's identity (`runs/identity.py`).
    """

    ARCHITECTURE: ClassVar[tuple[str, ...]]
    """Fields that determine the shapes of the parameters."""
    CONTEXT: ClassVar[tuple[str, ...]]
    """Fields that a run initialized from another model may change, to extend the context."""
    INHERITED: ClassVar[tuple[str, ...]]
    """Fields, including `CONTEXT`, that decide the meaning of the weights but not their shapes. A config that does not
    set them takes them from the initial model, or else from the preset."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def layout(self) -> Layout:
        """Layout by which the loader distributes tokens over the ring."""
        ...

    @property
    def ulysses(self) -> int:
        """Neighbours on `sp` that are one rank of the ring; 1 unless the model exchanges heads between them."""
        ...

    @property
    def compute_dtype(self) -> str:
        """Dtype in which weights are gathered."""
        ...

    @property
    def num_params(self) -> int: ...

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raise ValueError if the model cannot be computed on the mesh (dp, fsdp, tp, sp)."""
        ...

    def check_stage(self, written: Collection[str]) -> None:
        """Raise ValueError if the fields that a stage sets contradict the others."""
        ...


class Model(Protocol):
    """An `nnx.Module`, constructed as `Model(config, rngs=nnx.Rngs(seed))` with parameters in float32.

    `gather(name, shards)` gathers the parameters of the model's attribute `name` and casts them to the compute dtype.
    They are a pytree; if layers are stacked, it is that of one layer. The model calls it where it uses them.
    """

    def loss(self, batch: Any, *, axes: Axes, gather: Callable) -> jax.Array:
        """Sum -log p(target) over this device's masked-in tokens, in float32; see `ringformer.data` for a batch."""
        ...

    def token_losses(self, batch: Any, *, axes: Axes, gather: Callable) -> jax.Array:
        """Compute -log p(target) of each of this device's tokens, float32 [B, T], for evaluation."""
        ...
