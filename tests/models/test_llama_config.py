"""What a LLaMA's configuration refuses."""

import pytest
from jax.sharding import AbstractMesh

from ringformer.models.families.llama import PRESETS, LlamaConfig
from ringformer.parallel.mesh import AXIS_NAMES


@pytest.mark.parametrize(
    ("change", "shape", "message"),
    [
        ({}, (1, 1, 8, 1), "tp=8 does not divide num_heads=2"),
        ({"num_heads": 12, "num_kv_heads": 6}, (1, 1, 4, 2), "tp=4 neither divides num_kv_heads=6"),
        ({"ulysses": 4}, (1, 1, 1, 6), "ulysses=4 does not divide sp=6"),
        ({"num_heads": 12, "num_kv_heads": 6, "ulysses": 4}, (1, 1, 2, 4), "does not divide the 6 query heads.*tp=2"),
        ({"attention": "blockwise"}, (1, 1, 1, 8), "needs sp=1; mesh has sp=8"),
    ],
)
def test_models_that_the_mesh_cannot_compute(change, shape, message):
    config = LlamaConfig(**PRESETS["tiny"] | change)
    with pytest.raises(ValueError, match=message):
        config.check_mesh(AbstractMesh(shape, AXIS_NAMES))
