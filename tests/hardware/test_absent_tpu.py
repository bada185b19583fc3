"""libtpu, installed as a compiler, is not started where there is no TPU; whatever else JAX can start, it does."""

import os
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from ringformer.hardware import absent_tpu

ROOT = Path(__file__).parents[2]

USES = {
    "JAX first, then an op": "import jax; from ringformer import ring_attention; print(jax.devices()[0].platform)",
    "ringformer first": "from ringformer import Decoder; import jax; print(jax.default_backend())",
    "a mesh": "from ringformer.parallel.mesh import make_mesh; print(make_mesh('1,1,1,1').devices.item().platform)",
    "a checkpoint": "from ringformer.checkpoints.sharded_arrays import checkpoint_handler as h; h(); print('cpu')",
}


def fresh(program: str, tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A program in an interpreter whose environment says nothing of JAX's platforms."""
    ours = {"JAX_PLATFORMS", "TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY", *absent_tpu.TPU_VARIABLES}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    path = os.pathsep.join([str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, env={**kept, "PYTHONPATH": path, **more}, capture_output=True, text=True)


@pytest.mark.usual("ringformer first")
@pytest.mark.parametrize("program", USES.values(), ids=USES)
def test_nothing_is_printed_where_libtpu_is_only_a_compiler(program, tmp_path):
    assert find_spec("libtpu"), "the test extra has it"
    done = fresh(program, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cpu\n", "")


@pytest.mark.parametrize("chosen", [{"JAX_PLATFORMS": "tpu,cpu"}, {"TPU_WORKER_ID": "0", "JAX_PLATFORMS": ""}])
def test_a_choice_and_a_container_s_variables_start_libtpu_all_the_same(chosen, tmp_path):
    program = (
        "from ringformer import ring_attention; import jax.extend; jax.extend.backend.backends(); print('started')"
    )
    done = fresh(program, tmp_path, **chosen)
    assert "libtpu" in done.stderr or "TPU initialization" in done.stderr
    assert "no TPU: there is no PCI" not in done.stderr


def test_other_accelerators_start_and_keep_their_place(tmp_path):
    """A plugin as those of GPUs are: found in `jax_plugins`, above the CPU."""
    (tmp_path / "jax_plugins").mkdir()
    (tmp_path / "jax_plugins" / "gpu_of_a_test.py").write_text(
        "from jax.extend import backend\n"
        "def started():\n    print('asked')\n    raise RuntimeError('no such device')\n"
        "def initialize():\n    backend.register_backend_factory('gpu_of_a_test', started, priority=500)\n"
    )
    done = fresh("from ringformer import ring_attention; import jax; print(jax.default_backend())", tmp_path)
    assert done.stdout == "asked\ncpu\n" and done.stderr == ""


def pci_device(folder: Path, name: str, vendor: str, kind: str) -> None:
    (folder / name).mkdir()
    (folder / name / "vendor").write_text(f"{vendor}\n")
    (folder / name / "class").write_text(f"{kind}\n")


def test_which_devices_and_variables_are_a_tpu_s(tmp_path, monkeypatch):
    monkeypatch.setattr(absent_tpu, "PCI_DEVICES", tmp_path)
    for name in absent_tpu.TPU_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with jax_platforms(""):
        assert not absent_tpu.may_have_tpu()
        pci_device(tmp_path, "0000:00:00.0", "0x10de", "0x030200")  # somebody's GPU
        pci_device(tmp_path, "0000:00:01.0", "0x1ae0", "0x020000")  # Google's network card
        pci_device(tmp_path, "0000:00:02.0", "0x1ae0", "0x010802")  # and disk
        (tmp_path / "0000:00:03.0").mkdir()
        assert not absent_tpu.may_have_tpu()
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
        assert absent_tpu.may_have_tpu()
        monkeypatch.delenv("TPU_WORKER_HOSTNAMES")
        pci_device(tmp_path, "0000:00:04.0", "0x1ae0", "0xff0000")
        assert absent_tpu.may_have_tpu()


def test_chosen_platforms_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(absent_tpu, "PCI_DEVICES", tmp_path)
    with jax_platforms("cuda,cpu"):
        assert absent_tpu.may_have_tpu()


@contextmanager
def jax_platforms(value: str):
    """JAX's own setting; the backends of this process have started and do not read it again."""
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", value)
    yield
    jax.config.update("jax_platforms", before)
