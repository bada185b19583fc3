"""Accelerators by their vendors' data sheets, each once: for MFU, for estimates, and for the launch scripts.

Rates are dense; bandwidths are bytes per second in one direction. Nothing here is measured, and nothing is imported.
"""

from dataclasses import dataclass
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


def _tpu(
    name: str, *device_kinds: str, tflops: float, ghz: float, cores: int, units: int, hbm_gib: float, hbm_gb: int,
    link_gb: float, host_gib: int, vmem_mib: float, host_gb: float = 15, side: int = 128, mosaic: bool = True,
    host_devices: int = 4, network_gb: float | None = None,
) -> Chip:  # fmt: skip
    """`units`: 128 x 128 multiply-accumulate arrays in the matrix units of a core."""
    return Chip(
        name=name, kind="tpu", device_kinds=device_kinds, bf16_flops=tflops * 1e12, float32_flops=tflops * 1e12,
        hbm_bytes=int(hbm_gib * GiB), hbm_bandwidth=hbm_gb * 10**9, clock_hz=ghz * 1e9, link_bandwidth=link_gb * 1e9,
        host_bytes=host_gib * GiB, host_devices=host_devices,
        host_bandwidth=host_gb * 1e9, node_bandwidth=network_gb and network_gb * 1e9,
        tensor_cores=TensorCores(cores, units * 2 * 128 * 128, side, int(vmem_mib * 2**20), mosaic),
    )  # fmt: skip


def _gpu(
    name: str, device_kind: str, cores: Multiprocessors, *, tflops: float, tf32_tflops: float, ghz: float,
    hbm_bytes: int, hbm_gb: int, link_gb: float, host_gb: float, network_gb: float,
) -> Chip:  # fmt: skip
    return Chip(
        name=name, kind="gpu", device_kinds=(device_kind,), bf16_flops=tflops * 1e12, float32_flops=tf32_tflops * 1e12,
        hbm_bytes=hbm_bytes, hbm_bandwidth=hbm_gb * 10**9, clock_hz=ghz * 1e9, link_bandwidth=link_gb * 1e9,
        host_bytes=250 * GiB, host_devices=GPUS_OF_A_NODE,
        host_bandwidth=host_gb * 1e9, node_bandwidth=network_gb * 1e9, multiprocessors=cores,
    )  # fmt: skip


_AMPERE = Multiprocessors(8, count=108, fpus=64, shared_bytes=167936, l2_bytes=40 * 2**20)
_HOPPER = Multiprocessors(9, count=132, fpus=128, shared_bytes=233472, l2_bytes=50 * 2**20)
_BLACKWELL = Multiprocessors(10, count=148, fpus=128, shared_bytes=233472, l2_bytes=132644864)

# TPU peaks and HBM rates: cloud.google.com/tpu/docs (v3, v4, ... tpu7x), of a chip; a core of v3 and tpu7x has
# half. Clocks: v3 of Norrie et al., "The Design Process for Google's Training Chips" (IEEE Micro 2021), v4 of Jouppi et
# al. (ISCA 2023), v5e and v5p of Austin et al., "How to Scale Your Model" (2025). Those of v6e and tpu7x are derived:
# the peak over the FLOPs of a cycle, of four 256 x 256 arrays (on v6e kernels of head size 128, which fill half of the
# width, reach 97% of 262,144 FLOPs a bundle: two arrays could not).
# TPU memory: what libtpu 0.0.52 says it has when a program is too large ("Used ... of 15.48G hbm"), on-chip memory when
# a kernel is ("Used ... of 63.94M vmem"; of v3, whose kernels it does not compile, JAX's pallas/mosaic/tpu_info.py). No
# Mosaic on v3: of products in bf16 and in float32 it ends in an internal error ("xir.matmul", "LLO_CHECK failure" in
# libtpu 0.0.52). Network: a host's
# NICs by the same pages (v5e two of 100 Gb/s and v6e four of 200 for 8 chips, v5p 50 and tpu7x 100 Gb/s a chip); of v3
# and v4 none is published.
# Host memory: what some GiB for the system leave to a device of machine types with 340 (v3, 8 cores), 407 (v4, 4
# chips), 192 (v5e, 4 chips: cloud.google.com/tpu/docs/v5e), 448 (v5p, 4 chips), 720 (v6e, 4 chips), 960 GB (TPU7x, 8
# cores) and 2 TB (8 GPUs). PCIe, one way: of a TPU's chip 16 GB/s on v4, about 15 on most and 32 on v6e ("How to Scale
# Your Model"), of v3 and tpu7x none is published: a core has half of a v4's or a v6e's; of a GPU 16 lanes of the fourth
# generation (A100) or the fifth, nominal. GPU memory: what CUDA reports, less than the nominal size.
CHIPS = {
    "v3": _tpu("TPU v3 core", "TPU v3", tflops=61.5, ghz=0.94, cores=1, units=2, hbm_gib=15.48, hbm_gb=450, link_gb=70,
               host_gib=38, host_gb=8, host_devices=8, vmem_mib=16, mosaic=False),
    "v4": _tpu("TPU v4", "TPU v4", tflops=275, ghz=1.05, cores=2, units=4, hbm_gib=30.75, hbm_gb=1228, link_gb=45,
               host_gib=90, host_gb=16, vmem_mib=16),
    "v5e": _tpu("TPU v5e", "TPU v5 lite", "TPU v5e", tflops=197, ghz=1.5, cores=1, units=4, hbm_gib=15.75, hbm_gb=819,
                link_gb=45, host_gib=42, vmem_mib=128, network_gb=3.125),
    "v5p": _tpu("TPU v5p", "TPU v5", "TPU v5p", tflops=459, ghz=1.75, cores=2, units=4, hbm_gib=95.73, hbm_gb=2765,
                link_gb=90, host_gib=100, vmem_mib=63.93, network_gb=6.25),
    "v6e": _tpu("TPU v6e", "TPU v6 lite", "TPU v6e", tflops=918, ghz=1.751, cores=1, units=16, hbm_gib=31.24,
                hbm_gb=1640, link_gb=90, host_gib=160, host_gb=32, vmem_mib=127.93, side=256, network_gb=12.5),
    "tpu7x": _tpu("TPU7x core", "TPU7x", tflops=1153, ghz=2.199, cores=1, units=16, hbm_gib=94.74, hbm_gb=3690,
                  link_gb=90, host_gib=105, host_gb=16, vmem_mib=63.93, side=256, host_devices=8, network_gb=6.25),
    "A100-80": _gpu("NVIDIA A100-SXM4-80GB", "NVIDIA A100", _AMPERE, tflops=312, tf32_tflops=156, ghz=1.41,
                    hbm_bytes=85100068864, hbm_gb=2039, link_gb=300, host_gb=31.5, network_gb=25),
    "H100": _gpu("NVIDIA H100 80GB HBM3", "NVIDIA H100", _HOPPER, tflops=989, tf32_tflops=494, ghz=1.98,
                 hbm_bytes=85029158912, hbm_gb=3350, link_gb=450, host_gb=63, network_gb=50),
    "H200": _gpu("NVIDIA H200", "NVIDIA H200", _HOPPER, tflops=989, tf32_tflops=494, ghz=1.98,
                 hbm_bytes=150754820096, hbm_gb=4800, link_gb=450, host_gb=63, network_gb=50),
    "B200": _gpu("NVIDIA B200", "NVIDIA B200", _BLACKWELL, tflops=2250, tf32_tflops=1125, ghz=1.965,
                 hbm_bytes=191514411008, hbm_gb=8000, link_gb=900, host_gb=63, network_gb=50),
}  # fmt: skip
"""By the name of a TPU's generation or of a GPU."""

SLICES = {
    "v3": {8: "2x2", 32: "4x4", 64: "4x8", 128: "8x8", 256: "8x16", 512: "16x16", 1024: "16x32", 2048: "32x32"},
    "v4": {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8", 384: "4x4x12", 512: "4x8x8",
           1024: "8x8x8", 1536: "8x8x12", 2048: "8x8x16", 4096: "8x16x16"},
    "v5e": {1: "1x1", 4: "2x2", 8: "4x2", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    "v5p": {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8", 384: "4x4x12", 512: "4x8x8",
            640: "4x4x20", 768: "4x8x12", 1024: "8x8x8", 1536: "8x8x12", 2048: "8x8x16", 3072: "8x12x16",
            4096: "8x16x16", 6144: "12x16x16", 8192: "16x16x16", 12288: "16x16x24"},
    "v6e": {1: "1x1", 4: "2x2", 8: "4x2", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    "tpu7x": {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8", 512: "4x8x8",
              1024: "8x8x8", 2048: "8x8x16", 4096: "8x16x16"},
}  # fmt: skip
"""The shape of a TPU slice by its generation and the number in its name: v3, v4, v5p and tpu7x count cores, the others
chips."""

PODS = {"v3": "32x32", "v4": "16x16x16", "v5e": "16x16", "v5p": "16x20x28", "v6e": "16x16", "tpu7x": "16x24x24"}
"""The shape of a whole pod: no slice has more chips, or other dimensions."""


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
