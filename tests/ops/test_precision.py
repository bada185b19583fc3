"""bfloat16 in, bfloat16 out, float32 between: each op's error against float64 in numpy, on the same rounded inputs.

An error is at most 1.15 times the one measured when the bound was written (JAX 0.10.2), most of which is the rounding
of the result itself, 1.7e-3. A sum, a norm or a logit that is rounded on the way exceeds it. Casts are compiled as they
are written: left to itself, XLA drops a pair of casts through bfloat16, and such a mistake would hide on a CPU. The TPU
kernels are held to XLA's errors in `kernels/test_flash_attention.py`.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ringformer.models.rms_norm import rms_norm
from ringformer.ops.ring_attention import ring_attention
from ringformer.ops.tokenwise import rope
from ringformer.ops.tokenwise.blockwise_feedforward import blockwise_feedforward, gated
from ringformer.ops.tokenwise.cross_entropy import cross_entropy
from ringformer.ops.tokenwise.embedding import embed
from ringformer.parallel.gather_weight import gather_weight
from tests import dense
from tests.helpers import errors, normal, ring_mesh
from tests.ops.rings import LAYOUTS, on_ring
from tests.ops.rings import jit_as_written as jit

ROOM = 1.15


def rounded(x):
    return np.asarray(x, jnp.bfloat16)


def assert_within(bounds, actual, expected):
    found = errors(actual, expected)
    assert found.keys() == bounds.keys()
    assert all(found[name] <= ROOM * bound for name, bound in bounds.items()), (found, bounds)


# --- attention ----------------------------------------------------------------------------------------------------

MEANS = {
    0.0: dict(o=1.78e-3, lse=4e-8, dq=2.86e-3, dk=2.95e-3, dv=2.04e-3, dbias=2.72e-3),
    1.0: dict(o=1.73e-3, lse=4e-8, dq=4.48e-3, dk=3.56e-3, dv=1.73e-3, dbias=3.54e-4),
}
"""Of v and do, and the measured errors, the largest of rings of 1, 2, 4 and 8. With a mean, delta = rowsum(o * do) is
large and all but cancels in ds = p (dp - delta): what it lacks in precision shows."""


def attention_arrays():
    """One sequence for each mean."""
    B, T, H, K, d = len(MEANS), 256, 2, 1, 64
    mean = np.array(list(MEANS))[:, None, None, None]
    shapes = enumerate(((H, 0), (K, 0), (K, mean), (H, mean)))
    q, k, v, do = (rounded(normal(i, B, T, heads, d) + m) for i, (heads, m) in shapes)
    return dict(q=q, k=k, v=v, bias=normal(4, B, T)), dict(do=do, dlse=normal(5, B, H, T))


@pytest.fixture(scope="module")
def attention_oracle():
    return dense.attention(*attention_arrays())


QUICK = {("zigzag", 1), ("zigzag", 8), ("striped", 4)}


@pytest.mark.parametrize(
    "layout, n",
    [
        pytest.param(layout, n, marks=() if (layout, n) in QUICK else pytest.mark.slow)
        for layout in LAYOUTS
        for n in (1, 2, 4, 8)
    ],
)
def test_attention(layout, n, attention_oracle):
    """The error is one device's whatever the ring size: sums, maxima and delta are float32 at every hop."""
    out = on_ring(n, layout, *attention_arrays(), compile=jit, q_chunk=16, k_chunk=16)
    assert all(out[name].dtype == jnp.bfloat16 for name in ("o", "dq", "dk", "dv"))
    for b, bounds in enumerate(MEANS.values()):
        assert_within(bounds, *({name: x[b] for name, x in arrays.items()} for arrays in (out, attention_oracle)))


# --- every product ------------------------------------------------------------------------------------------------


PRODUCTS = {
    "attention": (
        lambda x: ring_attention(x, x, x, axis_name=None, q_chunk=4, k_chunk=4).sum(),
        np.zeros((1, 8, 1, 8), jnp.bfloat16),
        2 * (2 + 5) + 1,  # of whole and of masked pairs, and delta
    ),
    "cross-entropy": (
        lambda x: cross_entropy(x, x[0].T, np.zeros((1, 8), np.int32), np.ones((1, 8), bool), 8),
        np.zeros((1, 8, 8), jnp.bfloat16),
        3,
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_float32_before_they_are_summed(name):
    """Each matrix product of bfloat16, forward and backward, comes out in float32."""
    function, x, number = PRODUCTS[name]
    program = str(jax.make_jaxpr(jax.grad(function))(x))
    assert re.findall(r":(\w+)\[[\d,]*\] = dot_general", program) == ["f32"] * number


# --- what is computed of each token alone ---------------------------------------------------------------------------

B, T, D = 2, 256, 64


def gradients(function, *inputs, dy):
    """The value of `function` and its gradients, as they come."""

    def run(inputs, dy):
        y, vjp = jax.vjp(function, *inputs)
        return y, *vjp(dy)

    return jit(run)(inputs, dy)


def wide(*arrays):
    return (np.asarray(x).astype(np.float64) for x in arrays)


def test_rms_norm():
    """The mean of squares, and what multiplies x, are float32, forward and backward."""
    x, dy, scale = rounded(3 + normal(0, B, T, D)), rounded(1 + normal(1, B, T, D)), 1 + 0.1 * normal(2, D)
    y, dx, dscale = gradients(lambda x, scale: rms_norm(x, scale, 1e-6), x, scale, dy=dy)
    assert y.dtype == dx.dtype == jnp.bfloat16 and dscale.dtype == jnp.float32
    x, dy, scale = wide(x, dy, scale)
    r = (np.mean(x * x, axis=-1, keepdims=True) + 1e-6) ** -0.5
    g = dy * scale
    expected = dict(
        y=x * r * scale,
        dx=r * (g - x * r**2 * np.mean(g * x, axis=-1, keepdims=True)),
        dscale=(dy * x * r).sum(axis=(0, 1)),
    )
    assert_within(dict(y=1.69e-3, dx=1.66e-3, dscale=1e-6), dict(y=y, dx=dx, dscale=dscale), expected)


def test_rope():
    """Angles, their cosines and the products are float32; at positions of a million as at 0."""
    x, dy = rounded(normal(0, B, T, 2, D)), rounded(normal(1, B, T, 2, D))
    positions = (np.arange(T) + np.array([[0], [10**6]])).astype(np.int32)
    frequencies = rope.frequencies(D, 1e4)
    y, dx = gradients(lambda x: rope.rotate(x, rope.rotations(positions, frequencies)), x, dy=dy)
    assert y.dtype == dx.dtype == jnp.bfloat16
    turn = np.exp(1j * positions[:, :, None, None] * frequencies)

    def rotated(x, turn):
        (x,) = wide(x)
        z = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    expected = dict(y=rotated(x, turn), dx=rotated(dy, turn.conj()))
    assert_within(dict(y=1.67e-3, dx=1.65e-3), dict(y=y, dx=dx), expected)


@pytest.mark.parametrize("chunk", [T, 8], ids=["one chunk", "32 chunks"])
def test_cross_entropy(chunk):
    """Logits and the head's gradient are float32 until a result is rounded, in however many chunks."""
    V = 96
    x, head = rounded(normal(0, B, T, D)), rounded(normal(1, D, V) / 4)
    targets, mask = np.random.default_rng(2).integers(0, V, (B, T)), np.random.default_rng(3).random((B, T)) < 0.7
    loss, dx, dhead = gradients(
        lambda x, head: cross_entropy(x, head, jnp.asarray(targets, jnp.int32), mask, chunk), x, head, dy=np.float32(1)
    )
    assert loss.dtype == jnp.float32 and dx.dtype == dhead.dtype == jnp.bfloat16
    x, head = wide(x, head)
    logits = x @ head
    logits -= logits.max(axis=-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    hit = np.eye(V)[targets]
    dlogits = (np.exp(log_p) - hit) * mask[..., None]
    expected = dict(
        loss=-(log_p * hit * mask[..., None]).sum(), dx=dlogits @ head.T, dhead=np.einsum("btd,btv->dv", x, dlogits)
    )
    assert_within(dict(loss=1e-6, dx=2.0e-3, dhead=1.96e-3), dict(loss=loss, dx=dx, dhead=dhead), expected)


def test_embedding():
    """A table's gradient sums all occurrences of a token in float32: here 64 of each."""
    V = 8
    tokens, dy = np.random.default_rng(0).integers(0, V, (B, T)), rounded(1 + normal(1, B, T, D))
    _, dtable = gradients(lambda table: embed(table, jnp.asarray(tokens, jnp.int32)), rounded(normal(2, V, D)), dy=dy)
    assert dtable.dtype == jnp.bfloat16
    (dy,) = wide(dy)
    expected = np.einsum("btv,btd->vd", np.eye(V)[tokens], dy)
    assert_within(dict(dtable=1.78e-3), dict(dtable=dtable), dict(dtable=expected))


@pytest.mark.parametrize("chunk", [T, 8], ids=["one chunk", "32 chunks"])
def test_feedforward(chunk):
    """The weights' gradients are summed over chunks in float32. (Products are bfloat16, as in a plain SwiGLU.)"""
    F = 96
    x, dy = rounded(normal(0, B, T, D)), rounded(1 + normal(1, B, T, D))
    weights = tuple(rounded(normal(2 + i, *shape) / 8) for i, shape in enumerate(((D, F), (D, F), (F, D))))
    y, dweights, dx = gradients(lambda w, x: blockwise_feedforward(gated, w, x, chunk), weights, x, dy=dy)
    found = dict(zip(("y", "dx", "dgate", "dup", "ddown"), (y, dx, *dweights), strict=True))
    assert all(array.dtype == jnp.bfloat16 for array in found.values())
    x, dy, gate, up, down = wide(x, dy, *weights)
    g, u = x @ gate, x @ up
    sigmoid = 1 / (1 + np.exp(-g))
    dh = dy @ down.T
    dg, du = dh * u * (sigmoid + g * sigmoid * (1 - sigmoid)), dh * g * sigmoid
    outer = lambda a, b: np.einsum("bti,btj->ij", a, b)  # noqa: E731
    expected = dict(
        y=(g * sigmoid * u) @ down,
        dx=dg @ gate.T + du @ up.T,
        dgate=outer(x, dg),
        dup=outer(x, du),
        ddown=outer(g * sigmoid * u, dy),
    )
    weights = dict(dgate=3.04e-3, dup=3.01e-3, ddown=3.03e-3)
    if jax.__version_info__ >= (0, 11):  # XLA's bfloat16 products on CPUs lose more of long sums than in 0.10.2
        weights = {
            T: dict(dgate=7.36e-3, dup=7.57e-3, ddown=7.53e-3),
            8: dict(dgate=3.81e-3, dup=3.88e-3, ddown=3.79e-3),
        }[chunk]
    assert_within(dict(y=4.69e-3, dx=4.88e-3) | weights, found, expected)


def test_gathered_weights():
    """Gathered in bfloat16; the devices' gradients, here bfloat16, are summed and scattered in float32."""
    n, size = 8, 30  # of 32: padding too
    w, dy = normal(0, 32, D), rounded(1 + normal(1, n, size, D))

    def per_device(w, dy):
        whole, vjp = jax.vjp(lambda w: gather_weight(w, ("sp",), -2, size, jnp.bfloat16), w)
        return whole[None], *vjp(dy[0])

    whole, dw = jit(jax.shard_map(per_device, mesh=ring_mesh(n), in_specs=P("sp"), out_specs=P("sp")))(w, dy)
    assert whole.dtype == jnp.bfloat16 and dw.dtype == jnp.float32
    assert (np.asarray(whole) == rounded(w)[:size]).all() and (dw[size:] == 0).all()
    (dy,) = wide(dy)
    assert_within(dict(dw=1e-7), dict(dw=dw[:size]), dict(dw=dy.sum(axis=0)))
