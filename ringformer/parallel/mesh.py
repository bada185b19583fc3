"""The device mesh (dp, fsdp, tp, sp): its shape, device order, and sharding of batches.

A batch [B, T] is sharded over (dp, fsdp) in B and over (sp, tp) in T. So is the residual stream: between the blocks of
a layer, the sequence is sharded over both sp and tp (Megatron's sequence parallelism).
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from ringformer.hardware.absent_tpu import leave_absent_tpu_alone
from ringformer.ops.layouts import Layout, check_layout
from ringformer.parallel.device_order import order_devices
from ringformer.settings import whole_number

leave_absent_tpu_alone()  # before a backend starts

AXIS_NAMES = ("dp", "fsdp", "tp", "sp")
MOST_CPU_DEVICES = 1024
"""Most simulated devices; each has its own threads and buffers."""

BATCH = P(("dp", "fsdp"), ("sp", "tp"))
"""Sharding of arrays [B, T] of a batch, with T in layout order."""


def mesh_shape(mesh_dim: str, devices: int) -> tuple[int, int, int, int]:
    """Parse sizes "dp,fsdp,tp,sp"; one may be -1, which takes the remaining devices. Raises ValueError if they do not
    fit."""
    try:
        sizes = [whole_number(size) for size in mesh_dim.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) != len(AXIS_NAMES) or sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
        raise ValueError(
            f'mesh_dim={mesh_dim!r} must be "{",".join(AXIS_NAMES)}", four integers, one of which may be -1'
        )
    given = math.prod(s for s in sizes if s != -1)
    if -1 in sizes:
        if devices % given:
            raise ValueError(f"mesh_dim={mesh_dim!r}: the {devices} devices are not a multiple of {given}")
        sizes[sizes.index(-1)] = devices // given
    elif given != devices:
        raise ValueError(f"mesh_dim={mesh_dim!r} needs {given} devices, there are {devices}; write -1 for the rest")
    dp, fsdp, tp, sp = sizes
    return dp, fsdp, tp, sp


def make_mesh(mesh_dim: str, devices: list[Any] | None = None, ulysses: int = 1) -> Mesh:
    """Make the mesh of all devices, or of those given, with all four axes; unused axes have size 1.

    Devices are ordered by the links between them, where each `ulysses` devices of sp are one rank of the ring; warns if
    ranks that follow each other cannot be neighbours (`device_order`). Raises ValueError for sizes that do not fit.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = mesh_shape(mesh_dim, len(devices))
    ordered = order_devices(devices, shape, ulysses) if len(devices) > 1 else np.array(devices).reshape(shape)
    return Mesh(ordered, AXIS_NAMES, axis_types=(AxisType.Auto,) * len(AXIS_NAMES))


def check_batch(
    layout: Layout, ulysses: int, mesh: Mesh | AbstractMesh, seq_len: int, batch_size: int, accumulate: int = 1
) -> None:
    """Raise ValueError if batches of `batch_size` sequences of `seq_len` tokens cannot be sharded over the mesh, where
    each `ulysses` devices of sp are one rank of the ring."""
    dp, fsdp, tp, sp = (mesh.shape[a] for a in AXIS_NAMES)
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len} must be at least 1")
    rows = dp * fsdp * accumulate
    if batch_size < 1 or batch_size % rows:
        raise ValueError(
            f"batch_size={batch_size} is not a multiple of {rows} = dp {dp} x fsdp {fsdp} x accumulate {accumulate}"
        )
    check_layout(layout, seq_len, sp // ulysses, ulysses)
    if seq_len % (sp * tp):
        raise ValueError(f"seq_len={seq_len} is not divisible by {sp * tp} = sp {sp} x tp {tp}")


def simulate_cpu_devices(count: int) -> None:
    """Make JAX run on `count` simulated CPU devices (0: no change). Call it before asking JAX for devices.

    JAX before 0.12 then keeps no compiled programs: those that it reads back have no order of their collectives, and
    return wrong numbers (`docs/simulated-devices.md`).

    Raises ValueError for a negative count, and for more devices than start in a few seconds.
    """
    if not 0 <= count <= MOST_CPU_DEVICES:
        raise ValueError(f"cpu_devices={count:,} must lie between 0 and {MOST_CPU_DEVICES:,}: they are simulated")
    if count:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    if count > 1 and jax.__version_info__ < (0, 12):
        jax.config.update("jax_enable_compilation_cache", False)
