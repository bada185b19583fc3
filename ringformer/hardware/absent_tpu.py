"""A TPU that is not here is left alone.

libtpu is the estimator's compiler, too, and so installed where there is no TPU. JAX would start it among its backends,
and it prints errors before it fails.
"""

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import jax
from jax.extend import backend

PCI_DEVICES = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
"""The vendor of TPUs, and of network cards and disks of Google's virtual machines."""

NETWORK_OR_DISK = ("0x01", "0x02")
"""How the class of such a PCI device begins."""

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
"""One of them is set where TPUs are lent to a container, which may not see their PCI devices."""


def may_have_tpu() -> bool:
    """Whether a TPU may be here: a PCI device or a variable says so, or somebody chose the platforms.

    JAX chooses them too, for it looks for TPUs when it is imported.
    """
    if jax.config.values["jax_platforms"] or any(name in os.environ for name in TPU_VARIABLES):
        return True
    ours = (device for device in PCI_DEVICES.glob("*") if _word(device / "vendor") == GOOGLE)
    return any(not _word(device / "class").startswith(NETWORK_OR_DISK) for device in ours)


@cache
def leave_absent_tpu_alone() -> None:
    """Have JAX's backend for TPUs fail without starting libtpu, if there is none; GPUs and CPUs start as ever.

    Called before JAX is asked for its devices, or for the number of processes.
    """
    if not may_have_tpu():
        with suppress(RuntimeError):  # it has started, so there is one
            backend.register_backend_factory("tpu", _absent, priority=300, fail_quietly=True)


def _absent():
    raise RuntimeError(
        f"no TPU is here: no PCI device of vendor {GOOGLE}, and none of {', '.join(TPU_VARIABLES)} is set. "
        "If there is one, set JAX_PLATFORMS=tpu,cpu"
    )


def _word(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
