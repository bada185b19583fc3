"""What must be the same on all processes: another value of each is seen."""

import shutil
from pathlib import Path

import jax
import pytest

import ringformer
from ringformer.files.hashes import hash_sources
from ringformer.processes import software as software_module
from ringformer.processes.software import JAX_SETTINGS, software


def test_every_setting_exists():
    """Of the JAX that is installed: a setting of another name would compare nothing."""
    assert all(hasattr(jax.config, setting) for setting in JAX_SETTINGS)


def test_precision_that_the_environment_sets_is_seen():
    before = software()
    with jax.default_matmul_precision("highest"):
        after = software()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"jax_default_matmul_precision"} and after["jax_default_matmul_precision"] == "highest"


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        ("--xla_gpu_enable_triton_gemm=false", False),
        ("--xla_dump_to=/tmp/process-1", True),
        ("--xla_b=2 --xla_a=1", True),
    ],
)
def test_flags_of_compilers(flags, same):
    """In any order, without the places that a process writes to."""
    before = {"--xla_b=2 --xla_a=1": "--xla_a=1 --xla_b=2"}.get(flags, "")
    assert (software({"XLA_FLAGS": flags}) == software({"XLA_FLAGS": before})) == same


def test_other_code_of_the_same_version_is_seen(tmp_path, monkeypatch):
    """As on a host where somebody forgot `git pull`."""
    copy = tmp_path / "ringformer"
    shutil.copytree(Path(ringformer.__file__).parent, copy)
    original = software()["ringformer's code"]
    assert hash_sources(copy) == original
    with (copy / "ops" / "ring.py").open("a") as file:
        file.write("\n")
    monkeypatch.setattr(software_module.ringformer, "__file__", str(copy / "__init__.py"))
    assert hash_sources(copy) == software()["ringformer's code"] != original
