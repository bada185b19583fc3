"""The device mesh (dp, fsdp, tp, sp): its shape, its devices in order, and how batches lie on it.

A batch is [B, T]: B over (dp, fsdp), T over (sp, tp). The residual stream follows it: between the blocks of a layer it
is sharded along the sequence over both (Megatron's sequence parallelism).
"""

import math

import jax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from ringformer.absent_tpu import leave_absent_tpu_alone
from ringformer.device_order import order_devices

leave_absent_tpu_alone()  # before a backend starts

AXIS_NAMES = ("dp", "fsdp", "tp", "sp")
BATCH = P(("dp", "fsdp"), ("sp", "tp"))
"""Arrays [B, T] of a batch, T in layout order."""


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
