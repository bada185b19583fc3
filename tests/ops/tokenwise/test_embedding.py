"""The embedding's gradient, summed in float32."""

import jax
import jax.numpy as jnp
import numpy as np

from ringformer.ops.tokenwise.embedding import CHUNK, embed
from tests.helpers import assert_close, normal, random_vjp

B, D, V = 2, 12, 37


def test_embedding_gradient_is_summed_in_float32():
    """One token 4096 times in bfloat16: a bfloat16 sum would stop growing at 256."""
    table, tokens = jnp.ones((4, 3), jnp.bfloat16), jnp.full((1, 4096), 2, jnp.int32)
    y, vjp = jax.vjp(lambda t: embed(t, tokens), table)
    (dtable,) = vjp(jnp.ones_like(y))
    assert dtable.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(dtable, np.float32)[:, 0], [0, 0, 4096, 0])


def test_embedding_gradients_go_to_their_own_rows():
    """More tokens than one chunk, not a multiple of it, of several sequences."""
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, V, (B, CHUNK // B + 37)), jnp.int32)
    table = jnp.asarray(normal(0, V, D))
    actual = random_vjp(lambda t: embed(t, tokens), table)
    expected = random_vjp(lambda t: jax.nn.one_hot(tokens, V) @ t, table)
    assert_close(dict(zip(("y", "dtable"), actual, strict=True)), dict(zip(("y", "dtable"), expected, strict=True)))


def test_the_gradient_of_the_table_is_rewritten_once_per_chunk():
    """16,384 tokens of two sequences: twice."""
    table = jax.ShapeDtypeStruct((V, D), jnp.float32)
    tokens = jax.ShapeDtypeStruct((B, CHUNK), jnp.int32)
    program = str(jax.make_jaxpr(jax.grad(lambda table, tokens: embed(table, tokens).sum()))(table, tokens))
    assert program.count("scatter-add") == 1 and program.count(" scan[") == 1 and "length=2" in program


def test_the_sum_begins_when_its_gradients_do():
    """Its zeros come from a barrier that waits for them. Made earlier, Llama 3 8B's would take 2 GiB of a GPU while all
    layers are differentiated."""
    table = jax.ShapeDtypeStruct((V, D), jnp.float32)
    tokens = jax.ShapeDtypeStruct((B, 8), jnp.int32)
    program = jax.make_jaxpr(jax.grad(lambda table, tokens: embed(table, tokens).sum()))(table, tokens)
    (barrier,) = (eqn for eqn in program.eqns if eqn.primitive.name == "optimization_barrier")
    assert [var.aval.shape for var in barrier.invars] == [(), (B, 8, D)]
    (zeros,) = (
        eqn for eqn in program.eqns if eqn.primitive.name == "broadcast_in_dim" and barrier.outvars[0] in eqn.invars
    )
    assert zeros.outvars[0].aval.shape == (V, D)
