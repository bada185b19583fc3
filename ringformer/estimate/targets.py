"""Compile targets: real hardware by name, described without any of it being here.

    TPU     v3-512 (core devices), v4-1024 (cores; megacore makes 512 devices of them), v5e-256, v5p-1024 (cores),
            v6e-256, tpu7x-64, or any slice by its shape: v5e:4x8, v4:4x4x8
    GPU     8xA100-80, 32xA100-80, 8xH100, 8xH200: any number of whole nodes of eight, or fewer GPUs of one node

The `libtpu` wheel and JAX's CUDA plugin contain the compilers; `devices()` asks them for the topology.
"""

import math
import os
import re
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec

import jax
from jax.experimental import topologies

GiB = 2**30


@dataclass(frozen=True)
class Chip:
    """One JAX device of a kind. FLOP/s dense, bytes per second one way."""

    name: str
    kind: str
    bf16_flops: float
    float32_flops: float
    """Of matrix products of float32 arrays at JAX's default precision: one bf16 pass on TPU, TF32 on GPU."""
    hbm_bytes: int
    """What the compiler may use."""
    link_bandwidth: float
    """Of one link of the TPU interconnect in one direction; of a GPU's NVLink, all links together."""
    node_bandwidth: float
    """GPU: of its share of the network between nodes, in one direction."""
    host_bytes: int
    """Host memory per device, of a usual host."""
    description: str = field(default="", repr=False)
    """GPU: what the compiler wants to know of it (GpuTargetConfigProto)."""

    def flops(self, dtype: str) -> float:
        return self.bf16_flops if dtype == "bfloat16" else self.float32_flops


def _tpu(name, tflops, hbm_gib, link, host_gib) -> Chip:
    return Chip(
        name, "tpu", tflops * 1e12, tflops * 1e12, int(hbm_gib * GiB), link * 1e9, 0.0,
        host_gib * GiB,
    )  # fmt: skip


def _gpu(name, tflops, tf32_tflops, hbm_bytes, bandwidth, link, network, *, sm, cores, fpus, shared, l2, ghz) -> Chip:
    """`shared`: bytes of shared memory per multiprocessor, of which a block may have all but one KiB."""
    description = f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared - 1024}
          core_count: {cores} fpus_per_core: {fpus} clock_rate_ghz: {ghz} l2_cache_size: {l2}
          device_memory_size: {hbm_bytes} memory_bandwidth: {bandwidth * 10**9}
          cuda_compute_capability {{ major: {sm} }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 }}
        device_description_str: "{name}"
    """
    return Chip(
        name, "gpu", tflops * 1e12, tf32_tflops * 1e12, hbm_bytes, link * 1e9, network * 1e9,
        250 * GiB, description,
    )  # fmt: skip


_AMPERE = dict(sm=8, cores=108, fpus=64, shared=167936, l2=40 * 2**20, ghz=1.41)
_HOPPER = dict(sm=9, cores=132, fpus=128, shared=233472, l2=50 * 2**20, ghz=1.98)
# Vendors' data sheets. TPU link: one direction of one link. v3: a device is a core, half a chip. Host memory: what some
# GiB for the system leave to a device of machine types with 340 (v3, 8 cores), 407 (v4, 4 chips), 192 (v5e, 4 chips:
# cloud.google.com/tpu/docs/v5e), 448 (v5p, 4 chips), 720 (v6e, 8 chips), 960 GB (TPU7x, 8 cores) and 2 TB (8 GPUs).
CHIPS = {
    "v3": _tpu("TPU v3 core", 61.5, 16, 70, 38),
    "v4": _tpu("TPU v4", 275, 32, 45, 90),
    "v5e": _tpu("TPU v5e", 197, 15.75, 45, 42),
    "v5p": _tpu("TPU v5p", 459, 95, 90, 100),
    "v6e": _tpu("TPU v6e", 918, 31.25, 90, 80),
    "tpu7x": _tpu("TPU7x core", 1153, 94.75, 90, 105),
    "A100-80": _gpu("NVIDIA A100-SXM4-80GB", 312, 156, 85100068864, 2039, 300, 25, **_AMPERE),
    "H100": _gpu("NVIDIA H100 80GB HBM3", 989, 494, 85029158912, 3350, 450, 50, **_HOPPER),
    "H200": _gpu("NVIDIA H200", 989, 494, 150754820096, 4800, 450, 50, **_HOPPER),
}

SLICES = {
    "v3": {512: "16x16"},
    "v4": {8: "2x2x1", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8", 512: "4x8x8", 1024: "8x8x8"},
    "v5e": {4: "2x2", 8: "4x2", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    "v5p": {8: "2x2x1", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8", 512: "4x8x8", 1024: "8x8x8"},
    "v6e": {4: "2x2", 8: "4x2", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    "tpu7x": {8: "2x2x1", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8", 512: "4x8x8"},
}
"""Slices by the number in their product name: v3, v4, v5p and tpu7x count cores, the others chips."""


GPUS_OF_A_NODE = 8

GPU_FRACTION = 0.92
"""Of a GPU's memory; the rest is taken by the CUDA context, the libraries and fragmentation."""


def only_compilers() -> None:
    """Nothing more is wanted of a TPU or GPU in this process; several processes may load a compiler at once.

    What the environment says already stays, but for JAX's compilation cache: a program that is not here cannot be read
    from it again (JAX warns, and compiles), and one that could would leave no dump.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    for name in ("ALLOW_MULTIPLE_LIBTPU_LOAD", "TPU_SKIP_MDS_QUERY"):
        os.environ.setdefault(name, "1")
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")


class MissingCompiler(ValueError):
    """The wheel with a target's compiler is not installed."""


@dataclass(frozen=True)
class Target:
    """A number of devices of one kind, and how they are connected."""

    name: str
    generation: str
    """A key of CHIPS."""
    topology: str
    """TPU: "v5e:16x16". GPU: "1x4x8", partitions x nodes x devices of a node."""

    @property
    def chip(self) -> Chip:
        return CHIPS[self.generation]

    @property
    def budget(self) -> float:
        """Bytes of a device that a step may take: all of a TPU's, most of a GPU's."""
        return self.chip.hbm_bytes * (GPU_FRACTION if self.chip.kind == "gpu" else 1.0)

    @property
    def num_devices(self) -> int:
        """JAX devices, known without a compiler."""
        shape = math.prod(int(x) for x in self.topology.split(":")[-1].split("x"))
        return shape * (2 if self.generation in ("v3", "tpu7x") else 1)  # cores of a chip

    def require_compiler(self) -> None:
        """Raises MissingCompiler, with the command that installs it, if the target's compiler is not there."""
        is_gpu = self.chip.kind == "gpu"
        wheels = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13") if is_gpu else ("libtpu",)
        if not any(_installed(wheel) for wheel in wheels):
            wheel = "'jax[cuda13]'" if is_gpu else "libtpu"
            raise MissingCompiler(f"the compiler for {self.chip.name} is missing: pip install {wheel}")

    def devices(self) -> list:
        """The devices, as the compiler describes them. Raises MissingCompiler."""
        self.require_compiler()
        return list(_devices(self.generation, self.topology))

    def ring_bandwidth(self, ranks: int) -> float:
        """Bytes per second, one way, of the slowest hop of a ring; `ranks` devices, tp groups included, are close."""
        crosses = self.chip.kind == "gpu" and ranks > GPUS_OF_A_NODE
        return self.chip.node_bandwidth if crosses else self.chip.link_bandwidth


def target(name: str) -> Target:
    """A target by its name; raises ValueError with the known ones."""
    if match := re.fullmatch(r"(\d+)x([A-Za-z][\w-]*)", name):
        count, gpu = int(match[1]), match[2].upper()
        gpu = "A100-80" if gpu in ("A100", "A100-80GB") else gpu
        if gpu in CHIPS and (count <= 8 or count % 8 == 0):
            return Target(name, gpu, f"1x{max(1, count // 8)}x{min(count, 8)}")
        if gpu in CHIPS:
            raise ValueError(f"target {name!r}: more than one node of eight must be whole nodes, e.g. 16x{gpu}")
    elif match := re.fullmatch(r"([a-z]\w*):(\d+(?:x\d+)+)", name):
        if match[1] in SLICES:
            return Target(name, match[1], name)
    elif match := re.fullmatch(r"([a-z]\w*)-(\d+)", name):
        generation, count = match[1], int(match[2])
        if shape := SLICES.get(generation, {}).get(count):
            return Target(name, generation, f"{generation}:{shape}")
        if generation in SLICES:
            known = ", ".join(f"{generation}-{n}" for n in SLICES[generation])
            raise ValueError(f"unknown slice {name!r}; known: {known}, or any by its shape, e.g. {generation}:"
                             f"{next(iter(SLICES[generation].values()))}")  # fmt: skip
    known = [f"{g}-{max(s)}" for g, s in SLICES.items()] + ["8xA100-80", "8xH100", "8xH200"]
    raise ValueError(f"unknown target {name!r}; known: {', '.join(known)}, other sizes of these, "
                     "or a TPU slice by its shape, e.g. v5e:4x8")  # fmt: skip


@lru_cache
def _devices(chip: str, topology: str) -> tuple:
    chip = CHIPS[chip]
    if chip.kind == "gpu":
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # of versions of drivers that are not here
        more = dict(topology_name="", platform="cuda", target_config=chip.description, topology=topology)
    else:
        more = dict(topology_name=topology, platform="tpu")
        if topology.split(":")[0] in ("v4", "v5p"):  # both cores of a chip as one device
            more |= dict(chip_config_name="megacore", chips_per_host_bounds=(2, 2, 1))
    try:
        return tuple(topologies.get_topology_desc(**more).devices)
    except Exception as error:
        raise ValueError(f"the compiler knows no topology {topology!r} of {chip.name}: {str(error)[:300]}") from error


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False
