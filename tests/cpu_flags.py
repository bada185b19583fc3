"""How the suite compiles programs for the CPU. Most of a test's time is LLVM's, and each program runs once. What the
programs compute does not depend on these options."""

import os
from importlib.metadata import version

IN_ORDER = " --xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
"""The package compiles its own steps so (CONTRIBUTING.md, "Races on simulated devices"); this is for all others."""

OLD_EMITTERS = " --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""
"""The new ones take most of the time; later versions have no others."""

UNKNOWN_TO_LIBTPU = IN_ORDER + OLD_EMITTERS
"""libtpu ends a process whose flags it does not know."""

FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1" + UNKNOWN_TO_LIBTPU
)


def cpu_environment(**more: str) -> dict[str, str]:
    """This process's environment for a program that uses the CPU alone."""
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS} | more
