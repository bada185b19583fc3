"""Interface of a model: everything that the trainer and the estimator use of it.

A family of models is a configuration and an nnx module, registered by name (`registry.py`). The module sees one
device's slice: local tokens and, inside a `shard_map`, the names of the axes that it may communicate over. Each
`nnx.Param` has metadata `letters`, with a shape letter for each of its last dimensions. From these letters,
`parallel/weight_sharding.py` derives the parameter's sharding ("H", "K" and "F" over tp; vectors are replicated and not
decayed).

Tokens are sharded along the sequence over (sp, tp). A family with `tensor_parallel` gathers tokens over tp before a
block that mixes them, and reduces the block's result, as LLaMA does. Other families are refused on meshes with tp > 1.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ringformer.ops.layouts import Layout


@dataclass(frozen=True)
class Axes:
    """Names of the mesh axes that the model itself communicates over, inside a `shard_map`; None: no such axis."""

    sp: str | None = None
    tp: str | None = None
    rings: int = 1
    """Equal rings that the ranks of `sp` form, each with a sequence of its own."""


class Feature(NamedTuple):
    """An array [B, T, *shape] of a batch."""

    dtype: str
    shape: tuple[int, ...] = ()


class Features(NamedTuple):
    """Arrays of a family's batches beside the tokens; the model reads them in `batch.features`, by name."""

    fields: Mapping[str, Feature]
    read: Callable[[Any], Mapping[str, np.ndarray]]
    """Function of a loader's numpy batch, which has some of a batch's rows and tokens, in the order of the layout: a
    token's features depend on this token's fields alone. It runs in the loader's thread."""

    def check(self, read: Any, shape: tuple[int, ...]) -> None:
        """Raise ValueError if the arrays read for tokens of a shape are not those of `fields`."""
        if not isinstance(read, Mapping):
            raise ValueError(f"the family read {type(read).__name__} as features, must be a dict of arrays")
        actual = {name: (str(np.asarray(x).dtype), np.shape(x)) for name, x in read.items()}
        expected = {name: (field.dtype, (*shape, *field.shape)) for name, field in self.fields.items()}
        if actual != expected:
            raise ValueError(f"the family's batches have the features {expected}, but it read {actual}")


def check_features(features: Features) -> None:
    """Raise ValueError for features that are none, or have a dtype that devices do not hold."""
    fields = features.fields if isinstance(features, Features) else None
    if not isinstance(fields, Mapping) or not all(isinstance(field, Feature) for field in fields.values()):
        raise ValueError(f"features={features!r} must be Features({{name: Feature(dtype, shape)}}, read)")
    for name, field in fields.items():
        try:
            held = str(jax.dtypes.canonicalize_dtype(np.dtype(field.dtype)))
        except TypeError:
            held = ""
        if field.dtype != held:
            instead = f"; devices would hold {held}" if held else ""
            raise ValueError(f"feature {name!r} has dtype={field.dtype!r}, must be one of JAX, as text{instead}")


@runtime_checkable
class ModelConfig(Protocol):
    """A frozen dataclass of the model's sizes and options of its computation: the keys `--config.model.*`.

    It may also have a tuple `EXECUTION` of the fields that change results only by rounding, so that a run can be
    resumed with other values. All other fields are part of a run's identity (`runs/identity.py`). A `vocab_size` is
    compared with the tokenizer and the ids of the data.
    """

    ARCHITECTURE: ClassVar[tuple[str, ...]]
    """Fields that determine the shapes of the parameters."""
    CONTEXT: ClassVar[tuple[str, ...]]
    """Fields that a run initialized from another model may change, to extend the context."""
    INHERITED: ClassVar[tuple[str, ...]]
    """Fields, including `CONTEXT`, that decide the meaning of the weights but not their shapes. A config that does not
    set them takes them from the initial model, or else from the preset."""

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

    def loss(self, batch: Any, *, axes: Axes, gather: Callable[..., Any]) -> jax.Array:
        """Sum the loss, -log p(target), over this device's masked-in tokens of a `data.Batch`, in float32."""
        ...

    def token_losses(self, batch: Any, *, axes: Axes, gather: Callable[..., Any]) -> jax.Array:
        """Compute the loss of each of this device's tokens, float32 [B, T], for evaluation."""
        ...
