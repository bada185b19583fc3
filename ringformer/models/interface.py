"""What the trainer and the compiled estimate ask of a model; they know no more of it.

A family of models is a configuration and an nnx module, registered by name (`registry.py`). The module sees one
device's slice: local tokens, and inside a `shard_map` the names of the axes that it may communicate over. Each
`nnx.Param` has metadata `letters`, a shape letter for each of its last dimensions, by which
`parallel/weight_sharding.py` decides where it lies ("H", "K" and "F" over tp; vectors are replicated and not decayed).

Tokens are sharded along the sequence over (sp, tp): a family that says `tensor_parallel` gathers them over tp into what
mixes them and reduces out of it, as LLaMA does; any other is refused on meshes with tp > 1.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
from jax.sharding import AbstractMesh, Mesh

from ringformer.ops.layouts import Layout


@dataclass(frozen=True)
class Axes:
    """The names, inside a `shard_map`, of the axes that the model itself communicates over. None: there is none."""

    sp: str | None = None
    tp: str | None = None


@runtime_checkable
class ModelConfig(Protocol):
    """A frozen dataclass: the model's sizes, and how it is computed. Its fields are the keys `--config.model.*`.

    It may have a tuple `EXECUTION` too: the fields that change no number but by rounding, with which a run may go on
    as it is. All others belong to what a run is (`runs/identity.py`).
    """

    ARCHITECTURE: ClassVar[tuple[str, ...]]
    """The fields that decide the shapes of the parameters."""
    CONTEXT: ClassVar[tuple[str, ...]]
    """The fields that a run which begins with another's parameters may change, to reach further."""
    INHERITED: ClassVar[tuple[str, ...]]
    """The fields that decide what the weights mean and not their shapes, `CONTEXT` among them: a config that does not
    write them takes them from the model that the run begins with, or else from the preset."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def layout(self) -> Layout:
        """How the loader deals tokens out to the ring."""
        ...

    @property
    def compute_dtype(self) -> str:
        """The dtype that weights are gathered in."""
        ...

    @property
    def num_params(self) -> int: ...

    def check_mesh(self, mesh: Mesh | AbstractMesh) -> None:
        """Raise ValueError if the model cannot be computed on the mesh (dp, fsdp, tp, sp)."""
        ...

    def check_stage(self, written: Collection[str]) -> None:
        """Raise ValueError if the fields that a stage writes contradict the rest."""
        ...


class Model(Protocol):
    """An `nnx.Module`, made as `Model(config, rngs=nnx.Rngs(seed))` with parameters in float32.

    `gather(name, shards)` makes the parameters of the model's attribute `name` whole and casts them to the compute
    dtype: a pytree of them, with stacked layers one layer's. It is called where they are used.
    """

    def loss(self, batch: Any, *, axes: Axes, gather: Callable) -> jax.Array:
        """The sum of -log p(target) over this device's tokens with mask, float32; see `ringformer.data` for a batch."""
        ...

    def token_losses(self, batch: Any, *, axes: Axes, gather: Callable) -> jax.Array:
        """-log p(target) of each of this device's tokens, float32 [B, T]: for evaluation."""
        ...
