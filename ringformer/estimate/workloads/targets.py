"""Compilation targets: descriptions of hardware, by name, that need no such hardware.

    slices  2xv5e-256, 4xv5p-128: equal TPU slices that the hosts' network joins
    TPU     v3-512 (cores; each is a device), v4-1024 (cores; megacore joins them into 512 devices), v5e-256,
            v5p-1024 (cores), v6e-256, tpu7x-64, or any slice by its shape: v5e:4x8, v4:4x4x8
    GPU     8xA100-80, 32xA100-80, 8xH100, 8xH200, 8xB200: whole nodes of eight, or fewer GPUs of one node
    groups  2x32xH100: equal groups of GPUs that a slower network joins, such as Ethernet between racks

The `libtpu` wheel and JAX's CUDA plugin contain the compilers; `devices()` asks them for the topology.
"""

import math
import os
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental import topologies

from ringformer.hardware import CHIPS, GPUS_OF_A_NODE, PODS, SLICES, Chip, GiB, Multiprocessors, sides_of
from ringformer.parallel.runtime_environment import GPU_FRACTION


def only_compilers() -> None:
    """Configure JAX to use the TPU and GPU compilers but no devices; several processes may then load a compiler at
    once.

    Environment variables that are already set stay as they are. JAX's compilation cache is disabled: programs for
    absent devices cannot be read back (JAX warns and recompiles), and a cached program would leave no dump.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    for name in ("ALLOW_MULTIPLE_LIBTPU_LOAD", "TPU_SKIP_MDS_QUERY"):
        os.environ.setdefault(name, "1")
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")


COMPILERS = {
    "tpu": {"libtpu": "libtpu"},
    "gpu": {"jax_plugins.xla_cuda12": "jax-cuda12-plugin", "jax_plugins.xla_cuda13": "jax-cuda13-plugin"},
}
"""Python module and wheel of each compiler; if both GPU wheels are installed, JAX loads the first."""


class MissingCompiler(ValueError):
    """The wheel with a target's compiler is not installed."""


@dataclass(frozen=True)
class Target:
    """A number of devices of one kind and their topology."""

    name: str
    generation: str
    """A key of CHIPS."""
    topology: str
    """TPU: "v5e:16x16". GPU: "1x4x8" (partitions x nodes x devices per node)."""
    host_gib: float | None = None
    """Host memory per device; None: that of a usual host."""
    slices: int = 1
    """Number of TPU slices of this topology, joined by the network between their hosts; or of such groups of GPUs,
    joined by a slower network than a group's own."""
    group_gb_per_s: float | None = None
    """Rate of one GPU's share of the network between groups, in GB/s; None: not known, or there are no groups."""

    @property
    def chip(self) -> Chip:
        return CHIPS[self.generation]

    @property
    def budget(self) -> float:
        """Bytes that a step may use on a device: all of a TPU's memory, or most of a GPU's."""
        if self.chip.kind == "gpu":
            return self.chip.hbm_bytes * GPU_FRACTION
        return float(self.chip.hbm_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for each device."""
        if self.host_gib is None:
            return self.chip.host_bytes
        return round(self.host_gib * GiB)

    @property
    def sides(self) -> tuple[int, ...]:
        """Sides of the topology: of a TPU slice in chips, or (partitions, nodes, devices per node) of GPUs."""
        return sides_of(self.topology.split(":")[-1])

    @property
    def num_devices(self) -> int:
        """Number of JAX devices; needs no compiler."""
        number = math.prod(self.sides)
        if self.generation in ("v3", "tpu7x"):  # each core of a chip is a device
            number *= 2
        return number * self.slices

    @property
    def slices_are(self) -> str:
        """Word for the slices in messages."""
        return "groups of GPUs" if self.chip.kind == "gpu" else "slices"

    @property
    def slice_bandwidth(self) -> float:
        """Bytes per second of a device's share of the network between slices, or groups of GPUs. Raises ValueError if
        that of groups is not known."""
        if self.chip.kind == "tpu":
            return self.chip.node_bandwidth or math.inf  # known of all slices that are joined
        if self.group_gb_per_s is None:
            raise ValueError(
                f"target {self.name!r} needs the rate of the network between its groups: --group_gb_per_s, of one "
                "GPU, in GB/s; e.g. --group_gb_per_s=1.6 if a node of 8 GPUs has Ethernet of 100 Gb/s"
            )
        return self.group_gb_per_s * 1e9

    @property
    def wraps(self) -> bool:
        """True if links join the ends of each dimension of a TPU slice: in three dimensions those of cubes of 4x4x4, in
        two only a whole pod's (cloud.google.com/tpu/docs)."""
        if self.chip.kind == "gpu":
            return False
        if len(self.sides) == 3:
            return _has_cubes(self.sides)
        return self.topology.split(":")[1] == PODS[self.generation]

    @property
    def compiler(self) -> str | None:
        """The installed wheel with the target's compiler; None if there is none."""
        for module, wheel in COMPILERS[self.chip.kind].items():
            if _installed(module):
                return wheel
        return None

    @property
    def missing_compiler(self) -> str:
        """The message of MissingCompiler, which says how to install the compiler; empty if it is installed."""
        if self.compiler:
            return ""
        package = "'jax[cuda13]'" if self.chip.kind == "gpu" else "libtpu"
        return f"the compiler for {self.chip.name} is missing: pip install {package}"

    def require_compiler(self) -> str:
        """Return the wheel with the target's compiler; raises MissingCompiler."""
        if wheel := self.compiler:
            return wheel
        raise MissingCompiler(self.missing_compiler)

    def devices(self) -> list[Any]:
        """Return the target's devices as the compiler describes them. Raises MissingCompiler."""
        self.require_compiler()
        return list(_devices(self.generation, self.topology, self.slices))

    def ring_bandwidth(self, ranks: int) -> float:
        """Return the bytes per second, one way, of the slowest hop of a ring over `ranks` neighbouring devices (tp
        included)."""
        if self.chip.kind == "gpu" and ranks > GPUS_OF_A_NODE and self.chip.node_bandwidth:
            return self.chip.node_bandwidth
        return self.chip.link_bandwidth


def compiler_versions(target: Target) -> dict[str, str]:
    """Return the versions of jax, jaxlib and, if it is installed, the wheel with the target's compiler."""
    return {name: installed_version(name) for name in ("jax", "jaxlib", target.compiler) if name}


def compiled_by(target: Target) -> str:
    """Return the versions of JAX and of the target's compiler as text; raises MissingCompiler."""
    wheel = target.require_compiler()
    return f"jax {installed_version('jax')}, {wheel} {installed_version(wheel)}"


def find_target(name: str) -> Target:
    """Return the target with this name; raises ValueError that lists the valid names."""
    if re.search(r"(?<!\d)0+(?!\d)", name.partition(":")[2] or name.partition("x")[0]):
        raise ValueError(f"target {name!r} has a size of 0")
    if match := re.fullmatch(r"(\d+)x((?:v\d|tpu\d|\d+x).*)", name):
        return _joined(int(match[1]), find_target(match[2]))
    if match := re.fullmatch(r"(\d+)x([A-Za-z][\w-]*)", name):
        count = int(match[1])
        gpu = match[2].upper()
        if gpu in ("A100", "A100-80GB"):
            gpu = "A100-80"
        if gpu in CHIPS and (count <= 8 or count % 8 == 0):
            return Target(name, gpu, f"1x{max(1, count // 8)}x{min(count, 8)}")
        if gpu in CHIPS:
            raise ValueError(f"target {name!r}: more than eight GPUs must be whole nodes of eight, e.g. 16x{gpu}")
    elif (match := re.fullmatch(r"([a-z]\w*)(:\d+(?:x\d+)+|-\d+)", name)) and (slices := SLICES.get(match[1])):
        generation, size = match.groups()
        if size.startswith(":"):
            _check_shape(name)
            return Target(name, generation, name)
        if shape := slices.get(int(size[1:])):
            return Target(name, generation, f"{generation}:{shape}")
        sizes = ", ".join(f"{generation}-{n}" for n in slices)
        example = f"{generation}:{next(iter(slices.values()))}"
        raise ValueError(f"unknown slice {name!r}; known: {sizes}, or any slice by its shape, e.g. {example}")
    valid = [f"{g}-{max(s)}" for g, s in SLICES.items()]
    valid += ["2xv5e-256", "8xA100-80", "8xH100", "8xH200", "8xB200", "2x32xH100"]
    raise ValueError(
        f"unknown target {name!r}; known: {', '.join(valid)}, other sizes of these, "
        "or a TPU slice by its shape, e.g. v5e:4x8"
    )


def _joined(count: int, of: Target) -> Target:
    """Return the target of `count` equal TPU slices or groups of GPUs. Raises ValueError for one, for slices of slices,
    and for TPU hosts whose network is not known."""
    if of.slices > 1:
        raise ValueError(
            f"target '{count}x{of.name}' has {of.slices_are} twice: write one number of them, as in {of.name}"
        )
    if count < 2:
        one = "group" if of.chip.kind == "gpu" else "slice"
        raise ValueError(f"target '{count}x{of.name}' is one {one}: write {of.name}")
    if not of.chip.node_bandwidth:
        raise ValueError(
            f"target '{count}x{of.name}': no rate of the network between {of.chip.name} hosts is published, so joined "
            "slices of them have no estimate"
        )
    return replace(of, name=f"{count}x{of.name}", slices=count)


def with_host_memory(target: Target, host_gib: float | None) -> Target:
    """Return the target with this much host memory for each device, in GiB; None: that of a usual host. Raises
    ValueError for none."""
    if host_gib is not None and not 0 < host_gib < math.inf:
        raise ValueError(f"--host_gib={host_gib:g} must be positive: host memory for each device, in GiB")
    return replace(target, host_gib=host_gib)


def with_group_network(target: Target, group_gb_per_s: float | None) -> Target:
    """Return the target with this rate of one GPU between groups, in GB/s. Raises ValueError if groups of GPUs have
    none, if there are no groups, and for a rate that is not slower than a group's own network."""
    if group_gb_per_s is None:
        if target.slices > 1:
            _ = target.slice_bandwidth  # raises if it is not known
        return target
    option = f"--group_gb_per_s={group_gb_per_s:g}"
    if target.chip.kind != "gpu" or target.slices == 1:
        raise ValueError(f"{option} needs a target of groups of GPUs, such as 2x32xH100, and {target.name} is none")
    if not group_gb_per_s > 0:
        raise ValueError(f"{option} must be positive: GB/s of one GPU between groups, e.g. 1.6")
    within = (target.chip.node_bandwidth or math.inf) / 1e9
    if group_gb_per_s > within:
        gpus = f"{target.num_devices}x{target.generation}"
        raise ValueError(
            f"{option} is more than the {within:g} GB/s of a GPU inside a group: give the share of one GPU, in "
            f"gigabytes (Ethernet of 100 Gb/s for 8 GPUs: 1.6); where one network joins all, write --target={gpus}"
        )
    return replace(target, group_gb_per_s=group_gb_per_s)


def _check_shape(name: str) -> None:
    """Raise ValueError that lists valid shapes if no slice has the shape in a name such as "v5e:4x8"."""
    generation, _, sides = name.partition(":")
    shape = sides_of(sides)
    pod = sides_of(PODS[generation])
    if len(shape) != len(pod):
        problem = f"it needs {len(pod)} dimensions"
    elif math.prod(shape) > math.prod(pod):
        problem = f"a whole pod is {PODS[generation]}, {math.prod(pod):,} chips"
    elif (shape[0] % 2 or shape[1] % 2) and sides not in _PARTS_OF_A_HOST.get(generation, ()):
        problem = "its hosts have 2x2 chips, so the first two sides must be even"
    elif any(side > most for side, most in zip(sorted(shape), sorted(pod), strict=True)):
        problem = f"a whole pod is {PODS[generation]}"
    elif _is_cut(generation, shape):
        return
    elif len(pod) == 3:
        problem = "larger slices than the named ones are cubes of 4x4x4"
    else:
        problem = "no such slice exists"
    usual = ", ".join(f"{generation}:{shape}" for shape in SLICES[generation].values())
    raise ValueError(f"no slice of {CHIPS[generation].name} has the shape {name}: {problem}; usual shapes: {usual}")


def _is_cut(generation: str, shape: tuple[int, ...]) -> bool:
    """Return True if a shape exists, in any orientation: named slices, parts of a host, and cubes of 4x4x4."""
    sold = [*SLICES[generation].values(), *_PARTS_OF_A_HOST.get(generation, ())]
    return _has_cubes(shape) or any(sorted(shape) == sorted(sides_of(sides)) for sides in sold)


def _has_cubes(shape: tuple[int, ...]) -> bool:
    """Return True if a shape consists of cubes of 4x4x4."""
    return len(shape) == 3 and all(side % 4 == 0 for side in shape)


_PARTS_OF_A_HOST = {"v3": ("1x1",), "v5e": ("1x1", "1x2", "2x1"), "v6e": ("1x1", "1x2", "2x1"), "tpu7x": ("1x1x1",)}
"""Slices smaller than 2x2 chips."""


def _gpu_target_config(chip: Chip, cores: Multiprocessors) -> str:
    """Return the description that the GPU compiler needs instead of a device (text of a GpuTargetConfigProto)."""
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          shared_memory_per_block: 49152 shared_memory_per_core: {cores.shared_bytes}
          shared_memory_per_block_optin: {cores.shared_bytes - 1024}
          core_count: {cores.count} fpus_per_core: {cores.fpus} clock_rate_ghz: {chip.clock_hz / 1e9}
          l2_cache_size: {cores.l2_bytes}
          device_memory_size: {chip.hbm_bytes} memory_bandwidth: {chip.hbm_bandwidth}
          cuda_compute_capability {{ major: {cores.compute_capability} }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 8 }}
        device_description_str: "{chip.name}"
    """


@lru_cache
def _devices(generation: str, topology: str, slices: int) -> tuple[Any, ...]:
    chip = CHIPS[generation]
    if chip.multiprocessors:
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # JAX would check the versions of drivers that are absent
        config = _gpu_target_config(chip, chip.multiprocessors)
        partitions, nodes, gpus = sides_of(topology)
        topology = f"{partitions}x{slices * nodes}x{gpus}"  # the compiler knows nodes, but no groups of them
        more: dict[str, Any] = dict(topology_name="", platform="cuda", target_config=config, topology=topology)
    else:
        more = dict(topology_name=topology, platform="tpu")
        if topology.split(":")[0] in ("v4", "v5p"):  # megacore: both cores of a chip are one device
            more |= dict(chip_config_name="megacore", chips_per_host_bounds=(2, 2, 1))
        if slices > 1:
            more["num_slices"] = slices
    try:
        return tuple(topologies.get_topology_desc(**more).devices)
    except Exception as error:
        raise ValueError(f"the compiler has no topology {topology!r} of {chip.name}: {str(error)[:300]}") from error


def installed_version(wheel: str) -> str:
    """Return the version of an installed wheel; "unknown" if the compiler was installed in another way."""
    try:
        return version(wheel)
    except PackageNotFoundError:
        return "unknown"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
