"""Accelerators from their vendors' data sheets, for MFU, estimates and the launch scripts.

Rates are dense; bandwidths are bytes per second in one direction. The figures and their sources are in `chips.toml`.
"""

import math
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

GiB = 2**30
GPUS_OF_A_NODE = 8


@dataclass(frozen=True)
class TensorCores:
    """Cores of a TPU device."""

    count: int
    """Number of cores; 2 where both cores of a chip form one device (megacore) and share its programs."""
    matrix_flops_per_cycle: int
    """FLOPs per cycle of one core's matrix units, bf16."""
    matrix_side: int
    """Features that a matrix unit sums over at once; a product over fewer features fills only part of the unit."""
    vmem_bytes: int
    """On-chip memory of a core that kernels may use."""
    mosaic: bool = True
    """True if Mosaic compiles kernels with matrix products for it."""

    sparse_cores: bool = False
    """True if the compiler can run collectives on the chip's SparseCores."""

    async_all_to_all: bool = False
    """True if the compiler can run all-to-alls while the cores compute."""

    def filled(self, features: int) -> float:
        """Return the share of a matrix unit that is filled by products over `features`, padded to lanes of 128."""
        return min(1.0, -(-features // 128) * 128 / self.matrix_side)


@dataclass(frozen=True)
class Multiprocessors:
    """Properties of a GPU that its compiler needs, beyond memory and clock."""

    compute_capability: int
    """Major version: 8 is Ampere, 9 Hopper, 10 Blackwell."""
    count: int
    fpus: int
    """Number of float32 units of a multiprocessor."""
    shared_bytes: int
    """Shared memory of a multiprocessor; a block may use all but one KiB."""
    l2_bytes: int


@dataclass(frozen=True)
class Chip:
    """Data sheet of one JAX device: a core of a TPU v3 or TPU7x, a chip of another TPU, or a GPU."""

    name: str
    kind: Literal["tpu", "gpu"]
    device_kinds: tuple[str, ...]
    """Prefixes of `jax.Device.device_kind`."""
    bf16_flops: float
    float32_flops: float
    """FLOP/s of matrix products of float32 arrays at JAX's default precision: one bf16 pass on TPU, TF32 on GPU."""
    hbm_bytes: int
    """Memory that a program may use, as the TPU's compiler or CUDA reports it."""
    hbm_bandwidth: int
    clock_hz: float
    """Clock of a TPU's cores; boost clock of a GPU's multiprocessors."""
    link_bandwidth: float
    """Rate of one link of the TPU interconnect, or of all NVLinks of a GPU together."""
    host_bytes: int
    """Host memory per device of a typical host."""
    host_devices: int
    """Devices of a host."""
    host_bandwidth: float
    """Rate between a device and its host's memory (PCIe)."""
    node_bandwidth: float | None = None
    """Rate of a device's share of the network between hosts; None: not published."""
    tensor_cores: TensorCores | None = None
    """Cores of a TPU; None for a GPU."""
    multiprocessors: Multiprocessors | None = None
    """Multiprocessors of a GPU; None for a TPU."""

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products of arrays of this dtype."""
        return self.bf16_flops if dtype == "bfloat16" else self.float32_flops


_UNITS = {
    "_tflops": ("_flops", 1e12),
    "_ghz": ("_hz", 1e9),
    "_gib": ("_bytes", GiB),
    "_mib": ("_bytes", 2**20),
    "_gb_per_s": ("_bandwidth", 10**9),
}
"""Endings of keys in `chips.toml`: the ending of the field, and the factor to its unit."""

_COUNTED_IN_CORES = ("v3", "v4", "v5p", "tpu7x")
"""Generations whose slices are named by their cores, two per chip; other slices are named by their chips."""


def sides_of(shape: str) -> tuple[int, ...]:
    """Return the sides of a shape such as "4x8"."""
    return tuple(map(int, shape.split("x")))


def _read_chips() -> tuple[dict[str, Chip], dict[str, dict[int, str]], dict[str, str]]:
    """Read the chips, slices and pods of `chips.toml`."""
    sheets = tomllib.loads((resources.files(__package__) / "chips.toml").read_text())
    chips = {}
    slices = {}
    pods = {}
    for name, sheet in sheets["tpu"].items():
        shapes = sheet.pop("slices").split()
        of_a_chip = 2 if name in _COUNTED_IN_CORES else 1
        numbered: dict[int, str] = {}
        for shape in shapes:
            numbered[of_a_chip * math.prod(sides_of(shape))] = shape
        slices[name] = numbered
        pods[name] = sheet.pop("pod")
        sheet["tensor_cores"] = TensorCores(**_in_base_units(sheet["tensor_cores"]))
    for sheet in sheets["gpu"].values():
        sheet["multiprocessors"] = Multiprocessors(**sheets["multiprocessors"][sheet["multiprocessors"]])
    for kind in ("tpu", "gpu"):
        for name, sheet in sheets[kind].items():
            sheet["device_kinds"] = tuple(sheet["device_kinds"])
            chips[name] = Chip(**_in_base_units(sheet | {"kind": kind}))
    return chips, slices, pods


def _in_base_units(sheet: dict[str, Any]) -> dict[str, Any]:
    """Convert the entries of a data sheet with a unit in their key, e.g. hbm_gib to hbm_bytes."""
    fields = {}
    for key, value in sheet.items():
        for ending, (field_ending, factor) in _UNITS.items():
            if key.endswith(ending):
                key = key.removesuffix(ending) + field_ending
                value = value * factor
        fields[key] = int(value) if key.endswith("_bytes") else value
    return fields


CHIPS, SLICES, PODS = _read_chips()
"""CHIPS has the chips, by the name of a TPU generation or GPU. SLICES has the shapes of TPU slices, by the number in
their names. PODS has the shape of a generation's whole pod, which has the most chips, and as many dimensions as its
slices."""


@dataclass(frozen=True)
class CloudTpu:
    """Google Cloud's names for the slices of a generation."""

    accelerator_type: str
    """Part of `--accelerator-type` before "-N", where N is a number of `SLICES`."""
    runtime_version: str
    """Image of its hosts."""


CLOUD_TPUS = {
    "v4": CloudTpu("v4", "tpu-ubuntu2204-base"),
    "v5e": CloudTpu("v5litepod", "v2-alpha-tpuv5-lite"),
    "v5p": CloudTpu("v5p", "v2-alpha-tpuv5"),
    "v6e": CloudTpu("v6e", "v2-alpha-tpuv6e"),
    "tpu7x": CloudTpu("tpu7x", "v2-alpha-tpu7-ubuntu2404"),
}
"""Slices that `scripts/tpu_pod.sh` can rent, by generation."""


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip with this `jax.Device.device_kind`, or None if there is none, e.g. for a CPU."""
    chosen = None
    longest = 0
    for chip in CHIPS.values():
        for prefix in chip.device_kinds:
            if device_kind.startswith(prefix) and len(prefix) > longest:
                chosen = chip
                longest = len(prefix)
    return chosen
