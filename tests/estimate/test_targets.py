"""Targets by name, and what is said of those that are none or whose compiler is missing."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from itertools import product

import pytest

from ringformer.estimate.workloads import targets
from ringformer.estimate.workloads.targets import MissingCompiler, compiled_by, compiler_versions, find_target
from ringformer.hardware import PODS, SLICES
from tests.hlo import on_tpu


@on_tpu
@pytest.mark.parametrize(
    ("name", "devices"),
    [("v3-512", 512), ("v4-1024", 512), ("v5e-256", 256), ("v5p-128", 64), ("v6e-16", 16), ("v5e:4x8", 32)],
)
def test_slices(name, devices):
    assert len(find_target(name).devices()) == find_target(name).num_devices == devices


@pytest.mark.parametrize(
    ("name", "topology"),
    [("8xA100-80", "1x1x8"), ("32xa100", "1x4x8"), ("4xH100", "1x1x4"), ("16xH200", "1x2x8"), ("8xB200", "1x1x8")],
)
def test_gpu_nodes(name, topology):
    assert find_target(name).topology == topology


def test_a_ring_across_nodes_runs_at_the_networks_rate():
    target = find_target("32xA100-80")
    assert (
        target.ring_bandwidth(8) == target.chip.link_bandwidth > target.ring_bandwidth(32) == target.chip.node_bandwidth
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e-100", "unknown slice 'v5e-100'; known: v5e-1, v5e-4, v5e-8"),
        ("v9-8", "unknown target 'v9-8'"),
        ("12xH100", "must be whole nodes"),
        ("8xB900", "unknown target '8xB900'"),
        ("0xA100", "target .0xA100. has a size of 0"),
        ("v5e:0x4", "has a size of 0"),
        ("v5e-0", "has a size of 0"),
    ],
)
def test_unknown_targets(name, message):
    with pytest.raises(ValueError, match=message):
        find_target(name)


@pytest.mark.parametrize(("name", "command"), [("v5e:2x2", "libtpu$"), ("2xH100", r"'jax\[cuda13\]'$")])
def test_a_missing_compiler_is_named_with_its_install(monkeypatch, name, command):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    targets._devices.cache_clear()
    with pytest.raises(MissingCompiler, match=f"is missing: pip install {command}"):
        find_target(name).devices()


PROGRAM = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.targets import only_compilers
only_compilers()
mesh = Mesh(np.array(find_target("v5e:2x2").devices()), ("sp",))
x = jax.ShapeDtypeStruct((256, 128), np.float32, sharding=NamedSharding(mesh, P("sp")))
jax.jit(lambda x: x + 1).lower(x).compile()
"""


@on_tpu
def test_programs_for_elsewhere_are_kept_in_no_compilation_cache(tmp_path):
    """Though the environment names one: reading them back fails."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | cache, check=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e:3x7", "hosts have 2x2 chips, so the first two sides must be even; usual shapes: v5e:1x1, v5e:2x2"),
        ("v4:5x1x1", "the first two sides must be even"),
        ("v5p:1x1x1", "the first two sides must be even"),
        ("v5e:999x1", "a whole pod is 16x16, 256 chips"),
        ("v5e:32x32", "a whole pod is 16x16, 256 chips"),
        ("v4:32x16x16", "a whole pod is 16x16x16, 4,096 chips"),
        ("v4:4x4", "needs 3 dimensions; usual shapes: v4:2x2x1"),
        ("v5e:2x64", "a whole pod is 16x16; usual"),
        ("v5e:6x6", "no such slice exists; usual"),
        ("v3:2x6", "no such slice exists; usual"),
        ("v4:2x2x3", "larger slices than the named ones are cubes of 4x4x4"),
        ("v4:4x4x256", "a whole pod is 16x16x16; usual"),
        ("v5e:2x2x2", "needs 2 dimensions"),
    ],
)
def test_a_shape_that_no_slice_has(name, message):
    with pytest.raises(ValueError, match=rf"no slice of TPU [\w ]+ has the shape {name}: .*{message}"):
        find_target(name)


@on_tpu
@pytest.mark.parametrize("generation", SLICES)
def test_the_compiler_knows_every_slice_with_a_name(generation):
    """And how many hosts it has. Those of over 2,048 devices take seconds."""
    for size in SLICES[generation]:
        target = find_target(f"{generation}-{size}")
        assert target.num_devices == (size // 2 if generation in ("v4", "v5p") else size)
        if target.num_devices <= 2048:
            devices = target.devices()
            assert len(devices) == target.num_devices
            assert len({x.process_index for x in devices}) == max(1, len(devices) // target.chip.host_devices)


@on_tpu
def test_the_compiler_knows_every_small_shape_that_is_let_through():
    """What it knows and is not let through, it takes though no hardware has it."""
    for generation, pod in PODS.items():
        for shape in product(range(1, 6), repeat=pod.count("x") + 1):
            name = f"{generation}:{'x'.join(map(str, shape))}"
            try:
                target = find_target(name)
            except ValueError:
                continue
            assert len(target.devices()) == target.num_devices, name


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_the_wheel_that_is_installed_is_named(monkeypatch, cuda):
    """Whichever CUDA it is of; none is named where none is."""
    monkeypatch.setattr(targets, "find_spec", lambda name: "there" if name == f"jax_plugins.xla_cuda{cuda}" else None)
    monkeypatch.setattr(targets, "version", lambda wheel: f"of {wheel}")
    gpus, tpus = find_target("8xH100"), find_target("v5e-8")
    assert compiled_by(gpus) == f"jax of jax, jax-cuda{cuda}-plugin of jax-cuda{cuda}-plugin"
    assert list(compiler_versions(gpus)) == ["jax", "jaxlib", f"jax-cuda{cuda}-plugin"]
    assert list(compiler_versions(tpus)) == ["jax", "jaxlib"]
    with pytest.raises(MissingCompiler):
        compiled_by(tpus)


def test_a_compiler_that_no_wheel_brought_is_named_all_the_same(monkeypatch):
    """What it compiled is done by then."""

    def version(wheel):
        if wheel != "jax":
            raise PackageNotFoundError(wheel)
        return "1.2"

    monkeypatch.setattr(targets, "find_spec", lambda name: "there" if name == "jax_plugins.xla_cuda13" else None)
    monkeypatch.setattr(targets, "version", version)
    assert compiled_by(find_target("8xH100")) == "jax 1.2, jax-cuda13-plugin unknown"
