"""mesh_dim strings, and the mesh that they make."""

import subprocess
import sys

import jax
import pytest

from ringformer.parallel.mesh import AXIS_NAMES, make_mesh, mesh_shape
from tests.cpu_flags import cpu_environment


@pytest.mark.parametrize(
    ("mesh_dim", "expected"),
    [("1,1,1,8", (1, 1, 1, 8)), ("1,-1,2,2", (1, 2, 2, 2)), ("-1,1,1,1", (8, 1, 1, 1)), ("2,2,2,-1", (2, 2, 2, 1))],
)
def test_mesh_shape(mesh_dim, expected):
    assert mesh_shape(mesh_dim, 8) == expected
    assert make_mesh(mesh_dim).shape == dict(zip(AXIS_NAMES, expected, strict=True))


@pytest.mark.parametrize(
    ("mesh_dim", "message"),
    [
        ("1,1,1,4", "needs 4 devices, there are 8"),
        ("1,3,1,-1", "8 devices are not a multiple of 3"),
        ("1,1,8", "four integers"),
        ("1,-1,1,-1", "four integers"),
        ("1,x,1,1", "four integers"),
        ("1,0,1,8", "four integers"),
    ],
)
def test_bad_mesh_is_refused_with_its_numbers(mesh_dim, message):
    with pytest.raises(ValueError, match=message):
        mesh_shape(mesh_dim, 8)


PROGRAM = """
import jax
from ringformer.parallel.mesh import simulate_cpu_devices
simulate_cpu_devices(%s)
jax.jit(lambda x: x + 1)(0)
"""


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 12), reason="JAX reads programs of several CPU devices back as they were"
)
@pytest.mark.parametrize(("devices", "is_kept"), [(1, True), (2, False)])
def test_programs_of_simulated_devices_are_kept_in_no_compilation_cache(tmp_path, devices, is_kept):
    """Though the environment names one: what is read back computes wrong numbers."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    subprocess.run([sys.executable, "-c", PROGRAM % devices], env=cpu_environment(**cache), check=True)
    assert bool(list(tmp_path.iterdir())) == is_kept
