"""Accelerators by their vendors' data sheets, each once: for MFU, for estimates, and for the launch scripts.

Rates are dense; bandwidths are bytes per second in one direction. The figures and their sources are in `chips.toml`.
"""

import math
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Literal

GiB = 2**30
GPUS_OF_A_NODE = 8


@dataclass(frozen=True)
class TensorCores:
    """What of a TPU device runs a program."""

    count: int
    """2 where both cores of a chip are one device (megacore), and share its programs."""
    matrix_flops_per_cycle: int
    """Of one core's matrix units, bf16."""
    matrix_side: int
    """Features that a matrix unit sums over at once: a product over fewer fills a part of it."""
    vmem_bytes: int
    """On-chip memory of a core, what kernels may have of it."""
    mosaic: bool = True
    """Whether Mosaic compiles kernels with matrix products for it."""

    def filled(self, features: int) -> float:
        """The share of a matrix unit that products over so many features fill, which lanes of 128 make whole."""
        return min(1.0, -(-features // 128) * 128 / self.matrix_side)


@dataclass(frozen=True)
class Multiprocessors:
    """What a GPU's compiler wants to know of it, beyond its memory and its clock."""

    compute_capability: int
    """The major version: 8 is Ampere, 9 Hopper, 10 Blackwell."""
    count: int
    fpus: int
    """Float32 units of a multiprocessor."""
    shared_bytes: int
    """Shared memory of a multiprocessor, of which a block may have all but one KiB."""
    l2_bytes: int


@dataclass(frozen=True)
class Chip:
    """One JAX device of a kind: a core of a TPU v3 or TPU7x, a chip of the other TPUs, a GPU."""

    name: str
    kind: Literal["tpu", "gpu"]
    device_kinds: tuple[str, ...]
    """How `jax.Device.device_kind` begins."""
    bf16_flops: float
    float32_flops: float
    """FLOP/s of matrix products of float32 arrays at JAX's default precision: one bf16 pass on TPU, TF32 on GPU."""
    hbm_bytes: int
    """What a program may use of it: a TPU's by its compiler, a GPU's by CUDA."""
    hbm_bandwidth: int
    clock_hz: float
    """Of a TPU's cores, of a GPU's multiprocessors at their boost."""
    link_bandwidth: float
    """The rate of one link of the TPU interconnect; of a GPU's NVLink, all links together."""
    host_bytes: int
    """Host memory per device, of a usual host."""
    host_devices: int
    """Devices of a host."""
    host_bandwidth: float
    """The rate between a device and its host's memory (PCIe)."""
    node_bandwidth: float | None = None
    """The rate of a device's share of the network between hosts; None: not published."""
    tensor_cores: TensorCores | None = None
    """None for a GPU."""
    multiprocessors: Multiprocessors | None = None
    """None for a TPU."""

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products of arrays of this dtype."""
        return self.bf16_flops if dtype == "bfloat16" else self.float32_flops


def _read_chips() -> tuple[dict[str, Chip], dict[str, dict[int, str]], dict[str, str]]:
    """The chips, slices and pods of `chips.toml`."""
    sheets = tomllib.loads((resources.files(__package__) / "chips.toml").read_text())
    chips, slices, pods = {}, {}, {}
    for name, sheet in sheets["tpu"].items():
        chips[name] = _tpu(**{key: value for key, value in sheet.items() if key not in ("slices", "pod")})
        shapes, of_a_chip = sheet["slices"].split(), 2 if name in _COUNTED_IN_CORES else 1
        slices[name] = {of_a_chip * math.prod(map(int, shape.split("x"))): shape for shape in shapes}
        pods[name] = sheet["pod"]
    for name, sheet in sheets["gpu"].items():
        chips[name] = _gpu(**sheet)
    return chips, slices, pods


def _tpu(
    name: str,
    device_kinds: list[str],
    *,
    tflops: float,
    ghz: float,
    cores: int,
    units: int,
    hbm_gib: float,
    hbm_gb: int,
    link_gb: float,
    host_gib: int,
    vmem_mib: float,
    host_gb: float = 15,
    side: int = 128,
    mosaic: bool = True,
    host_devices: int = 4,
    network_gb: float | None = None,
) -> Chip:
    """`units`: 128 x 128 multiply-accumulate arrays in the matrix units of a core."""
    return Chip(
        name=name,
        kind="tpu",
        device_kinds=tuple(device_kinds),
        bf16_flops=tflops * 1e12,
        float32_flops=tflops * 1e12,
        hbm_bytes=int(hbm_gib * GiB),
        hbm_bandwidth=hbm_gb * 10**9,
        clock_hz=ghz * 1e9,
        link_bandwidth=link_gb * 1e9,
        host_bytes=host_gib * GiB,
        host_devices=host_devices,
        host_bandwidth=host_gb * 1e9,
        node_bandwidth=network_gb and network_gb * 1e9,
        tensor_cores=TensorCores(cores, units * 2 * 128 * 128, side, int(vmem_mib * 2**20), mosaic),
    )


def _gpu(
    name: str,
    device_kinds: list[str],
    *,
    multiprocessors: str,
    tflops: float,
    tf32_tflops: float,
    ghz: float,
    hbm_bytes: int,
    hbm_gb: int,
    link_gb: float,
    host_gb: float,
    network_gb: float,
) -> Chip:
    return Chip(
        name=name,
        kind="gpu",
        device_kinds=tuple(device_kinds),
        bf16_flops=tflops * 1e12,
        float32_flops=tf32_tflops * 1e12,
        hbm_bytes=hbm_bytes,
        hbm_bandwidth=hbm_gb * 10**9,
        clock_hz=ghz * 1e9,
        link_bandwidth=link_gb * 1e9,
        host_bytes=250 * GiB,
        host_devices=GPUS_OF_A_NODE,
        host_bandwidth=host_gb * 1e9,
        node_bandwidth=network_gb * 1e9,
        multiprocessors=_MULTIPROCESSORS[multiprocessors],
    )


_MULTIPROCESSORS = {
    "ampere": Multiprocessors(8, count=108, fpus=64, shared_bytes=167936, l2_bytes=40 * 2**20),
    "hopper": Multiprocessors(9, count=132, fpus=128, shared_bytes=233472, l2_bytes=50 * 2**20),
    "blackwell": Multiprocessors(10, count=148, fpus=128, shared_bytes=233472, l2_bytes=132644864),
}
_COUNTED_IN_CORES = ("v3", "v4", "v5p", "tpu7x")
"""Generations whose slices are named by their cores, two a chip; the others' by their chips."""

CHIPS, SLICES, PODS = _read_chips()
"""By the name of a TPU's generation or of a GPU: the chips; the shapes of TPU slices by the number in their names; the
shape of a whole pod, of which no slice has more chips, or other dimensions."""


@dataclass(frozen=True)
class CloudTpu:
    """How Google Cloud calls the slices of a generation."""

    accelerator_type: str
    """What stands before "-N" in `--accelerator-type`, with the N of `SLICES`."""
    runtime_version: str
    """The image of its hosts."""


CLOUD_TPUS = {
    "v4": CloudTpu("v4", "tpu-ubuntu2204-base"),
    "v5e": CloudTpu("v5litepod", "v2-alpha-tpuv5-lite"),
    "v5p": CloudTpu("v5p", "v2-alpha-tpuv5"),
    "v6e": CloudTpu("v6e", "v2-alpha-tpuv6e"),
    "tpu7x": CloudTpu("tpu7x", "v2-alpha-tpu7-ubuntu2404"),
}
"""By generation, what `scripts/tpu_pod.sh` rents."""


def chip_of(device_kind: str) -> Chip | None:
    """The chip that JAX calls so (`jax.Device.device_kind`), None if it is none of these: a CPU for example."""
    names = {name: chip for chip in CHIPS.values() for name in chip.device_kinds if device_kind.startswith(name)}
    return names[max(names, key=len)] if names else None
