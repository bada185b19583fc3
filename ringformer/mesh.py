"""The device mesh (dp, fsdp, tp, sp), and where every array lies on it.

    batch       [B, T]: B over (dp, fsdp), T over (sp, tp). The residual stream follows it: between the blocks of
                a layer it is sharded along the sequence over both (Megatron's sequence parallelism).
    parameters  ZeRO-3: one dimension over (fsdp, sp). Heads and feed-forward features ("H", "K", "F") over tp;
                a weight without them spreads over tp as well, like one more axis of ZeRO. Vectors are replicated.

Which dimension: the largest that divides, else the one that needs the least padding. Padding is zero, stays zero
(its gradient is zero), and is cut off before a weight is used or written to disk.
"""

import math
from dataclasses import dataclass

import jax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ringformer.device_order import order_devices
from ringformer.ops.gather_weight import gather_weight

AXIS_NAMES = ("dp", "fsdp", "tp", "sp")
BATCH = P(("dp", "fsdp"), ("sp", "tp"))
"""Arrays [B, T] of a batch, T in layout order."""

TENSOR_PARALLEL = "HKF"
"""The shape letters that tp shards."""


def mesh_shape(mesh_dim: str, devices: int) -> tuple[int, int, int, int]:
    """The sizes of the axes from "dp,fsdp,tp,sp", where one of them may be -1: the rest. ValueError if none fit."""
    form = f'"{",".join(AXIS_NAMES)}", four integers of which one may be -1'
    try:
        sizes = [int(size) for size in mesh_dim.split(",")]
    except ValueError:
        raise ValueError(f"mesh_dim={mesh_dim!r} must be {form}") from None
    if len(sizes) != len(AXIS_NAMES) or sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
        raise ValueError(f"mesh_dim={mesh_dim!r} must be {form}")
    known = math.prod(s for s in sizes if s != -1)
    if -1 in sizes:
        if devices % known:
            raise ValueError(f"mesh_dim={mesh_dim!r}: the {devices} devices are not a multiple of {known}")
        sizes[sizes.index(-1)] = devices // known
    elif known != devices:
        raise ValueError(f"mesh_dim={mesh_dim!r} needs {known} devices, there are {devices}; write -1 for the rest")
    dp, fsdp, tp, sp = sizes
    return dp, fsdp, tp, sp


def make_mesh(mesh_dim: str, devices: list | None = None) -> Mesh:
    """The mesh of all devices (or those given); every axis is there, of size 1 if unused.

    Devices are ordered for the links between them; warns if a ring's hops cannot be single links (`device_order`).
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = mesh_shape(mesh_dim, len(devices))
    return Mesh(order_devices(devices, shape), AXIS_NAMES, axis_types=(AxisType.Auto,) * len(AXIS_NAMES))


@dataclass(frozen=True)
class WeightSharding:
    """Where one parameter lies. Dimensions are counted from the end, so that stacked layers share it."""

    shape: tuple[int, ...]  # logical; of all stacked layers
    tp_dim: int | None
    zero_dim: int | None
    zero_axes: tuple[str, ...]
    shards: int  # over zero_axes

    @property
    def spec(self) -> P:
        """The axes of each dimension."""
        dims: list = [None] * len(self.shape)
        if self.tp_dim is not None:
            dims[self.tp_dim] = "tp"
        if self.zero_dim is not None:
            dims[self.zero_dim] = self.zero_axes
        return P(*dims)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape of the global array at rest."""
        shape = list(self.shape)
        if self.zero_dim is not None:
            shape[self.zero_dim] = -(-shape[self.zero_dim] // self.shards) * self.shards
        return tuple(shape)

    def gather(self, w: jax.Array, dtype: DTypeLike) -> jax.Array:
        """The weight in `dtype`, whole but for tp, from this device's shard (inside `shard_map`)."""
        if self.zero_dim is None:
            return w
        return gather_weight(w, self.zero_axes, self.zero_dim, self.shape[self.zero_dim], dtype)


def shard_weight(letters: str, shape: tuple[int, ...], mesh: Mesh) -> WeightSharding:
    """Where a parameter of these shape letters lies; `shape` may have a leading L that `letters` does not name."""
    sizes = dict(zip(letters, shape[-len(letters) :], strict=True))
    tp = mesh.shape["tp"]
    tp_dim = next(
        (letters.index(x) - len(letters) for x in letters if x in TENSOR_PARALLEL and tp > 1 and sizes[x] % tp == 0),
        None,
    )
    axes = tuple(a for a in ("fsdp", "sp", "tp") if mesh.shape[a] > 1 and not (a == "tp" and tp_dim is not None))
    shards = math.prod(mesh.shape[a] for a in axes)
    if len(letters) == 1 or shards == 1:
        return WeightSharding(shape, tp_dim, None, (), 1)
    candidates = [dim for dim in range(-len(letters), 0) if dim != tp_dim]
    zero_dim = min(candidates, key=lambda dim: (-shape[dim] % shards / shape[dim], -shape[dim]))
    return WeightSharding(shape, tp_dim, zero_dim, axes, shards)
