"""Compile targets: real hardware by name, described without any of it being here.

    TPU     v3-512 (core devices), v4-1024 (cores; megacore makes 512 devices of them), v5e-256, v5p-1024 (cores),
            v6e-256, tpu7x-64, or any slice by its shape: v5e:4x8, v4:4x4x8
    GPU     8xA100-80, 32xA100-80, 8xH100, 8xH200: any number of whole nodes of eight, or fewer GPUs of one node

The `libtpu` wheel and JAX's CUDA plugin contain the compilers; `devices()` asks them for the topology.
"""

import re
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec

from jax.experimental import topologies

GiB = 2**30


@dataclass(frozen=True)
class Chip:
    """One JAX device of a kind. FLOP/s dense, bytes per second one way."""

    name: str
    kind: str
    bf16_flops: float
    hbm_bytes: int
    """What the compiler may use."""
    hbm_bandwidth: float
    link_bandwidth: float
    """Of one link of the TPU interconnect in one direction; of a GPU's NVLink, all links together."""
    node_bandwidth: float = 0.0
    """GPU: of its share of the network between nodes, in one direction."""
    host_bytes: int = 0
    """Host memory per device."""
    float32_passes: int = 1
    """bf16 matmul passes that a float32 matmul takes at default precision."""
    float32_flops: float = 0.0
    """Where float32 matmuls do not run as bf16 passes."""
    compiler_options: dict = field(default_factory=dict, hash=False)
    synchronous: bool = False
    """The compiler makes no asynchronous permutes for this chip."""


# The limit on scheduled memory: at its default the scheduler gives up overlap in nearly full programs.
TPU_OPTIONS = {"xla_tpu_scheduler_percent_shared_memory_limit": "150"}
# One collective at a time is the default; the ring's keys and gradients travel together.
GPU_OPTIONS = {
    "xla_gpu_enable_latency_hiding_scheduler": "true",
    "xla_gpu_experimental_parallel_collective_overlap_limit": "4",
}


def _tpu(name, tflops, hbm_gib, bandwidth, link, host_gib, **more) -> Chip:
    return Chip(
        name, "tpu", tflops * 1e12, int(hbm_gib * GiB), bandwidth * 1e9, link * 1e9, host_bytes=host_gib * GiB,
        compiler_options=TPU_OPTIONS, **more,
    )  # fmt: skip


def _gpu(name, tflops, float32_tflops, hbm_bytes, bandwidth, link, network) -> Chip:
    return Chip(
        name, "gpu", tflops * 1e12, hbm_bytes, bandwidth * 1e9, link * 1e9, network * 1e9, host_bytes=250 * GiB,
        float32_flops=float32_tflops * 1e12, compiler_options=GPU_OPTIONS,
    )  # fmt: skip


# Vendors' data sheets. TPU link: one direction of one link. v3: a device is a core, half a chip.
CHIPS = {
    "v3": _tpu("TPU v3 core", 61.5, 16, 450, 70, 40, synchronous=True),
    "v4": _tpu("TPU v4", 275, 32, 1228, 45, 100),
    "v5e": _tpu("TPU v5e", 197, 15.75, 819, 45, 24),
    "v5p": _tpu("TPU v5p", 459, 95, 2765, 90, 110),
    "v6e": _tpu("TPU v6e", 918, 31.25, 1640, 90, 90),
    "tpu7x": _tpu("TPU7x core", 1153, 94.75, 3690, 90, 120),
    "A100-80": _gpu("NVIDIA A100-SXM4-80GB", 312, 19.5, 85100068864, 2039, 300, 25),
    "H100": _gpu("NVIDIA H100 80GB HBM3", 989, 67, 85029158912, 3350, 450, 50),
    "H200": _gpu("NVIDIA H200", 989, 67, 150754820096, 4800, 450, 50),
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


@dataclass(frozen=True)
class Target:
    """A number of devices of one kind, and how they are connected."""

    name: str
    chip: Chip
    topology: str
    """TPU: "v5e:16x16". GPU: "1x8x4", partitions x devices of a node x nodes."""

    def devices(self) -> list:
        """The devices, as the compiler describes them. Raises ValueError if the compiler is not installed."""
        return list(_devices(self.chip.kind, self.chip.name, self.topology))


def target(name: str) -> Target:
    """A target by its name; raises ValueError with the known ones."""
    if match := re.fullmatch(r"(\d+)x([A-Za-z][\w-]*)", name):
        count, gpu = int(match[1]), match[2].upper()
        gpu = "A100-80" if gpu in ("A100", "A100-80GB") else gpu
        if gpu in CHIPS and (count <= 8 or count % 8 == 0):
            return Target(name, CHIPS[gpu], f"{max(1, count // 8)}x{min(count, 8)}")
        if gpu in CHIPS:
            raise ValueError(f"target {name!r}: more than one node of eight must be whole nodes, e.g. 16x{gpu}")
    elif match := re.fullmatch(r"([a-z]\w*):(\d+(?:x\d+)+)", name):
        if match[1] in SLICES:
            return Target(name, CHIPS[match[1]], name)
    elif match := re.fullmatch(r"([a-z]\w*)-(\d+)", name):
        generation, count = match[1], int(match[2])
        if shape := SLICES.get(generation, {}).get(count):
            return Target(name, CHIPS[generation], f"{generation}:{shape}")
        if generation in SLICES:
            known = ", ".join(f"{generation}-{n}" for n in SLICES[generation])
            raise ValueError(f"unknown slice {name!r}; known: {known}, or any by its shape, e.g. {generation}:"
                             f"{next(iter(SLICES[generation].values()))}")  # fmt: skip
    known = [f"{g}-{max(s)}" for g, s in SLICES.items()] + ["8xA100-80", "8xH100", "8xH200"]
    raise ValueError(f"unknown target {name!r}; known: {', '.join(known)}, other sizes of these, "
                     "or a TPU slice by its shape, e.g. v5e:4x8")  # fmt: skip


@lru_cache
def _devices(kind: str, chip: str, topology: str) -> tuple:
    if kind == "gpu":
        raise ValueError(f"{chip}: GPU targets cannot be compiled for yet, TPU targets can")
    generation = topology.split(":")[0]
    more = {}
    if generation in ("v4", "v5p"):  # both cores of a chip as one device
        more = dict(chip_config_name="megacore", chips_per_host_bounds=(2, 2, 1))
    if find_spec("libtpu") is None:
        raise ValueError("TPU targets need the compiler of the libtpu wheel: pip install 'ringformer[estimate]'")
    try:
        return tuple(topologies.get_topology_desc(topology, "tpu", **more).devices)
    except Exception as error:
        raise ValueError(f"the TPU compiler knows no topology {topology!r}: {str(error)[:300]}") from error
