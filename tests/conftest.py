"""Eight simulated CPU devices, set before JAX starts; libtpu is only ever a compiler here."""

import gc
import os
import signal
import subprocess

from tests.cpu_flags import FLAGS, OLD_EMITTERS

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", "")  # commands keep no programs in the user's cache
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"

import jax
import jaxtyping
import pytest

from ringformer.processes import signals
from tests.signatures import check

pytest_plugins = ["tests.counted_runs", "tests.unordered_loops", "tests.usual_suite"]

CHECKED_MODELS = ("attention", "decoder", "feedforward", "layer", "placement", "rms_norm", "share_products")
# The shapes and dtypes in the signatures of these modules hold in every test; for users nothing checks them.
jaxtyping.install_import_hook(
    ["ringformer.ops", *(f"ringformer.models.{name}" for name in CHECKED_MODELS)],
    f"{check.__module__}.{check.__name__}",
)

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_traceback_in_locations_limit", 1)  # the lines of Python in a program take a tenth of the suite
jax.jit(lambda: 0)()  # now the flags are read
os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(OLD_EMITTERS, "")  # for libtpu

# Ctrl-C ends the suite: training in a test's own process must not take it as a request to stop that run. The processes
# that tests start take it, as for users.
signals.SIGNALS = tuple(number for number in signals.SIGNALS if number != signal.SIGINT)

# JAX keeps millions of objects: Python's default would walk them again and again.
gc.freeze()
gc.set_threshold(100_000, 50, 50)


@pytest.fixture
def as_for_users(monkeypatch):
    """Signatures are not checked: what does not fit meets the package's own errors, as it does outside the tests."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def mounted(tmp_path):
    """`mounted(bytes)`: an empty file system of this size."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(size):
        if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]).returncode:
            pytest.skip("only root may mount a file system")
        return folder

    yield mount
    subprocess.run(["umount", "-l", folder], check=False)
