"""mesh_dim strings, and the mesh that they make."""

import pytest

from ringformer.parallel.mesh import AXIS_NAMES, make_mesh, mesh_shape


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
