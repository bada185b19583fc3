"""Software and settings of a process that change what it computes, beside its options: the same on all of a run."""

import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

import ringformer
from ringformer.files.hashes import hash_sources

PACKAGES = ("ringformer", "jax", "jaxlib", "flax", "optax", "numpy", "libtpu", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
JAX_SETTINGS = (
    "jax_allow_f16_reductions",
    "jax_debug_nans",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_random_seed_offset",
    "jax_softmax_custom_jvp",
    "jax_threefry_partitionable",
)
"""JAX's settings that change numbers, or the order in which programs run."""
VARIABLES = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "XLA_FLAGS")
"""Variables that compilers and libraries read."""


def software(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the versions of packages, the hash of ringformer's own code, JAX's settings and compilers' flags, by name.

    Flags that name a path are left out: every process may write to a place of its own.
    """
    values: dict[str, Any] = {"Python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            values[package] = version(package)
    values["ringformer's code"] = hash_sources(Path(ringformer.__file__).parent)
    for setting in JAX_SETTINGS:
        values[setting] = str(getattr(jax.config, setting, None))
    for variable in VARIABLES:
        flags = [flag for flag in environment.get(variable, "").split() if "/" not in flag]
        values[variable] = " ".join(sorted(flags))
    return values


@cache
def revision() -> str:
    """Return the commit of the clone in which ringformer's code lies, with a + if that code has changed since; where
    there is no clone or no git, ringformer's version. A process keeps what it found first."""
    folder = Path(ringformer.__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()

    try:
        if not (folder.parent / ".git").exists():
            raise FileNotFoundError("there is no clone")
        changed = "+" if git("status", "--porcelain", ".") else ""
        return git("rev-parse", "--short=12", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return f"ringformer {version('ringformer')}"
