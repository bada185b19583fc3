"""Products with a layer's weights, whose gradients stay in float32 until they are summed over the devices.

A gathered weight has the compute dtype, and so would its gradient: float32 sums would be rounded, only to be summed
again. So the gradient goes to a stand-in, zeros in float32 that nothing reads. Beside the adapter of a frozen weight
(LoRA, Hu et al. 2021), only its two factors get gradients: for y = x W with W = W0 + A B, dA = xᵀ (dy Bᵀ) and
dB = (x A)ᵀ dy. The gradient of W, which is as large as W, is never computed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, PyTree

from ringformer.ops.varying_axes import vary, vary_like, varying_axes


class LayerWeight(NamedTuple):
    """A weight as a layer uses it, and what gets its gradient: the stand-in, the factors of an adapter, or nothing."""

    w: Any
    """The weight in the compute dtype, with its adapter added, [*inputs, *outputs]. It gets no gradient."""
    stand_in: Float32[Array, "..."] | None = None
    """Array of the shape of w that nothing reads."""
    a: Float32[Array, "... r"] | None = None
    """First factor, [*inputs, r]."""
    b: Float32[Array, "r ..."] | None = None
    """Second factor, [r, *outputs]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.w.shape


def in_dtype(parameter: nnx.Param[Any], dtype: DTypeLike) -> jax.Array | LayerWeight:
    """Return a parameter's array in a dtype, or its `LayerWeight`, which has the compute dtype already."""
    value = parameter.get_value()
    return value if _is_weight(value) else value.astype(dtype)


def product(
    x: Float[Array, "B T ..."], weight: Float[Array, "..."] | LayerWeight, inputs: int = 1
) -> Float[Array, "B T ..."]:
    """Multiply x by a weight, whose first `inputs` dimensions are those of its input features.

    The gradients that go with a `LayerWeight` are float32.
    """
    if not isinstance(weight, LayerWeight):
        return jnp.tensordot(x, weight, inputs)
    return _product(inputs, *vary((x, weight), varying_axes(x, weight)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(inputs, x, weight):
    return jnp.tensordot(x, weight.w, inputs)


def _forward(inputs, x, weight):
    return _product(inputs, x, weight), (x, without_stand_ins(weight))


def _backward(inputs, residuals, dy):
    x, weight = residuals
    outputs = weight.w.ndim - inputs
    dx = _times_transposed(dy, weight.w, outputs).astype(x.dtype)
    if weight.stand_in is not None:
        return dx, LayerWeight(None, _of_weight(x, dy))
    if weight.a is None or weight.b is None:
        return dx, None
    a = weight.a.astype(x.dtype)
    b = weight.b.astype(x.dtype)
    da = _of_weight(x, _times_transposed(dy, b, outputs))
    db = _of_weight(jnp.tensordot(x, a, inputs), dy)
    return dx, LayerWeight(None, None, da, db)


_product.defvjp(_forward, _backward)


def _times_transposed(y: Float[Array, "B T ..."], w: Float[Array, "..."], outputs: int) -> jax.Array:
    """Multiply y by the transpose of a weight whose last `outputs` dimensions are those of its output features."""
    last = range(-outputs, 0)
    of_y = [y.ndim + i for i in last]
    of_w = [w.ndim + i for i in last]
    return jnp.tensordot(y, w, (of_y, of_w))


def _of_weight(x: Float[Array, "B T ..."], dy: Float[Array, "B T ..."]) -> jax.Array:
    """Return the gradient of a weight, float32 [*inputs, *outputs]."""
    return jnp.tensordot(x, dy, ((0, 1), (0, 1)), preferred_element_type=jnp.float32)


def of_outputs(function: Callable[[jax.Array], jax.Array], weight: Any) -> Any:
    """Apply a function of output features to an array, or to the parts of a `LayerWeight` that have them."""
    if not _is_weight(weight):
        return function(weight)
    w, stand_in, b = jax.tree.map(function, (weight.w, weight.stand_in, weight.b))
    return weight._replace(w=w, stand_in=stand_in, b=b)


def of_inputs(function: Callable[[jax.Array], jax.Array], weight: Any) -> Any:
    """Apply a function of input features to an array, or to the parts of a `LayerWeight` that have them."""
    if not _is_weight(weight):
        return function(weight)
    w, stand_in, a = jax.tree.map(function, (weight.w, weight.stand_in, weight.a))
    return weight._replace(w=w, stand_in=stand_in, a=a)


def without_stand_ins(weights: PyTree) -> PyTree:
    """Replace stand-ins by empty arrays: what is kept for a backward need not hold their zeros."""

    def emptied(x: Any) -> Any:
        if not _is_weight(x) or x.stand_in is None:
            return x
        return x._replace(stand_in=jnp.zeros(0, jnp.float32))

    return jax.tree.map(emptied, weights, is_leaf=_is_weight)


def with_stand_ins(trained: PyTree, frozen: PyTree) -> PyTree:
    """Put zeros back in what trains, of the shapes of what does not (`split_weights`)."""

    def filled(x: Any, w: Any) -> Any:
        if not _is_weight(x) or x.stand_in is None:
            return x
        return x._replace(stand_in=vary_like(jnp.zeros(w.shape, jnp.float32), w))

    return jax.tree.map(filled, trained, frozen, is_leaf=_is_weight)


def split_weights(weights: PyTree) -> tuple[PyTree, PyTree]:
    """Divide weights into a tree of what gets gradients and a tree of what does not; `join_weights` is the inverse."""
    trained = jax.tree.map(lambda x: x._replace(w=None) if _is_weight(x) else x, weights, is_leaf=_is_weight)
    frozen = jax.tree.map(lambda x: x.w if _is_weight(x) else None, weights, is_leaf=_is_weight)
    return trained, frozen


def join_weights(trained: PyTree, frozen: PyTree) -> PyTree:
    """Return the weights that `split_weights` divided."""
    return jax.tree.map(lambda x, w: x._replace(w=w) if _is_weight(x) else x, trained, frozen, is_leaf=_is_weight)


def _is_weight(x: Any) -> bool:
    return isinstance(x, LayerWeight)
