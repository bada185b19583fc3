"""How programs that run once on a CPU are compiled: most of a test's time is LLVM's. What they compute does not depend
on it."""

import os
from importlib.metadata import version

OLD_EMITTERS = " --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""
"""The new ones take most of the time; later versions have no others. libtpu dies of a flag that it does not know."""

FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1" + OLD_EMITTERS
)


def cpu_environment(**more: str) -> dict[str, str]:
    """This process's environment for a program that uses the CPU alone."""
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS} | more
