"""Workaround that keeps JAX from starting libtpu on machines without a TPU.

libtpu is also the estimator's compiler, so it is installed on machines without a TPU. JAX would start it together with
its other backends, and libtpu prints errors before it fails.
"""

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import jax
from jax.extend import backend

PCI_DEVICES = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
"""PCI vendor of TPUs, and of the network cards and disks of Google's virtual machines."""

NETWORK_OR_DISK = ("0x01", "0x02")
"""Prefixes of the PCI classes of disks and network cards."""

TPU_VARIABLES = (
    "TPU_ACCELERATOR_TYPE",
    "TPU_CHIPS_PER_HOST_BOUNDS",
    "TPU_HOST_BOUNDS",
    "TPU_NAME",
    "TPU_TOPOLOGY",
    "TPU_VISIBLE_CHIPS",
    "TPU_VISIBLE_DEVICES",
    "TPU_WORKER_HOSTNAMES",
    "TPU_WORKER_ID",
)
"""Environment variables, at least one of which is set in a container with TPUs. Such a container may not see the TPUs'
PCI devices."""


def may_have_tpu() -> bool:
    """Return True if this machine may have a TPU: a PCI device or a variable indicates one, or platforms are set.

    JAX itself may have set the platforms, because it looks for TPUs when it is imported.
    """
    if jax.config.values["jax_platforms"] or any(name in os.environ for name in TPU_VARIABLES):
        return True
    for device in PCI_DEVICES.glob("*"):
        if _word(device / "vendor") == GOOGLE and not _word(device / "class").startswith(NETWORK_OR_DISK):
            return True
    return False


@cache
def leave_absent_tpu_alone() -> None:
    """Make JAX's TPU backend fail without starting libtpu if there is no TPU; GPUs and CPUs start as usual.

    Call it before asking JAX for devices or for the number of processes.
    """
    if not may_have_tpu():
        with suppress(RuntimeError):  # the backend has already started, so there is a TPU
            backend.register_backend_factory("tpu", _absent, priority=300, fail_quietly=True)


def _absent() -> None:
    raise RuntimeError(
        f"no TPU: there is no PCI device of vendor {GOOGLE}, and none of {', '.join(TPU_VARIABLES)} is set. If there "
        "is a TPU, set JAX_PLATFORMS=tpu,cpu"
    )


def _word(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
