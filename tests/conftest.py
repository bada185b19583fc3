"""Eight simulated CPU devices, set before JAX starts; libtpu is only ever a compiler here."""

import gc
import os

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Most of a test's time is LLVM's, on programs that run once. What is computed does not depend on it.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# JAX keeps millions of objects: Python's default would walk them again and again.
gc.freeze()
gc.set_threshold(100_000, 50, 50)
