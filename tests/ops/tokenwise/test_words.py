"""Numbers in words, and the products of what GPUs read as words, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.ops.tokenwise.words import as_words, joined, matrices_as_words, numbers, product
from tests.helpers import normal, relative_error


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int8])
def test_words_hold_the_numbers_in_order(dtype):
    x = jnp.asarray(np.arange(-120, 120).reshape(3, 80), dtype)
    words = as_words(x)
    assert words.dtype == jnp.uint32 and words.nbytes == x.nbytes
    np.testing.assert_array_equal(joined(numbers(words, dtype)), np.arange(-120, 120).reshape(3, 80))


def test_what_fills_no_words_stays():
    for x in (jnp.ones((2, 3), jnp.bfloat16), jnp.ones((2, 6), jnp.int8), jnp.ones((2, 4))):
        assert as_words(x) is x


@pytest.mark.parametrize("rows", [12, 128, 100])
def test_a_row_times_a_matrix_of_words(rows):
    """As the exact product of the rounded numbers; rows that the parts of a sum divide, and that they do not."""
    x, matrix = (jnp.asarray(normal(i, *shape), jnp.bfloat16) for i, shape in ((0, (1, rows)), (1, (rows, 64))))
    expected = np.asarray(x, np.float64) @ np.asarray(matrix, np.float64)
    assert relative_error(product(x, as_words(matrix)), expected) <= 1e-6
    assert relative_error(product(x, matrix), expected) <= 1e-6


def test_the_embedding_and_vectors_are_no_words():
    bf16 = jnp.bfloat16
    weights = {
        "embed": jnp.ones((4, 4), bf16),
        "layers": {"wq": jnp.ones((2, 4, 4), bf16), "scale": jnp.ones((2, 4))},
        "norm": {"scale": jnp.ones(4, bf16)},
    }
    dtypes = jax.tree.map(lambda x: str(x.dtype), matrices_as_words(weights))
    assert dtypes == {
        "embed": "bfloat16",
        "layers": {"wq": "uint32", "scale": "float32"},
        "norm": {"scale": "bfloat16"},
    }
