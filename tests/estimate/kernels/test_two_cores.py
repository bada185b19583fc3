"""One sequence uses both TensorCores of v4 and v5p: read in the kernels' machine code."""

import re

import pytest

from ringformer.estimate.kernels.pair_kernels import TARGETS, dumped
from ringformer.estimate.seconds.machine_code import Code, dumped_kernels, grid_of
from tests.hlo import on_tpu

EXIT = re.compile(r"scmp\.ge\.s32\.totalorder %s\w+, (\d+) /\* loop exit test \*/")

COMPILE = """
import sys
from functools import partial
import jax, jax.numpy as jnp
from ringformer.estimate.workloads.programs import abstract_array
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.targets import only_compilers
from ringformer.ops.ring_attention import ring_attention

only_compilers()
mesh = jax.sharding.Mesh(find_target(sys.argv[1]).devices()[:1], "x")
batch, key_heads, group = map(int, sys.argv[2:])
q, k = (
    abstract_array(mesh, jax.sharding.PartitionSpec(), jnp.bfloat16, batch, 8192, heads, 128)
    for heads in (key_heads * group, key_heads)
)
attend = partial(ring_attention, axis_name=None, kernel="pallas", q_chunk=1024, k_chunk=1024)
jax.jit(lambda *x: jax.vjp(attend, *x[:3])[1](x[3])).lower(q, k, k, q).compile()
"""


@pytest.mark.slow
@on_tpu
@pytest.mark.parametrize(
    ("generation", "batch", "key_heads", "group", "most"),
    [
        ("v5p", 1, 4, 1, 2),
        ("v5p", 1, 1, 2, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("v4", 1, 4, 1, 2),
                ("v5p", 1, 3, 1, 2),
                ("v5p", 1, 3, 2, 3),
                ("v5p", 2, 4, 1, 4),
                ("v5p", 1, 1, 1, 1),
                ("v5e", 1, 4, 1, 4),
            )
        ),
    ],
)
def test_cores_share_the_heads_of_one_sequence(generation, batch, key_heads, group, most):
    """The grid is batch x key heads x pairs; if batch times key heads is odd, it has two groups of query heads for each
    key head. A core's loop states its steps (and up to two more, of the pipeline): `most` heads of the rows times the
    36 pairs. A single query head leaves a core idle; v5e has one core."""
    with dumped(["-c", COMPILE, TARGETS[generation], str(batch), str(key_heads), str(group)]) as (folder, _):
        texts = {name: path.read_text() for name, path in dumped_kernels(folder).items() if "flash_" in name}
    assert len(texts) == 2
    for name, text in texts.items():
        grid = grid_of(name)
        assert grid is not None and grid.heads == batch * key_heads * (2 if batch * key_heads % 2 and group > 1 else 1)
        pairs = (grid.whole + grid.masked) // grid.heads
        (steps,) = (int(trips) for trips in EXIT.findall(text))
        assert pairs == 36 and most * pairs <= steps <= most * pairs + 2
        assert Code.read(text).cores == (1 if generation == "v5e" else 2)
