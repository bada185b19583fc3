"""Products with weights that do not train: of a frozen weight with an adapter (LoRA, Hu et al. 2021), only the two
factors get gradients, and the gradient of the weight itself, which is as large as the weight, is never computed.

For y = x W with W = W0 + A B, dA = xᵀ (dy Bᵀ) and dB = (x A)ᵀ dy.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from ringformer.ops.varying_axes import vary, varying_axes


class FrozenWeight(NamedTuple):
    """A weight that does not train, and the factors of its adapter, if it has one."""

    w: Any
    """The weight with its adapter added, [*inputs, *outputs]."""
    a: Float[Array, "... r"] | None = None
    """float32 [*inputs, r]."""
    b: Float[Array, "r ..."] | None = None
    """float32 [r, *outputs]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.w.shape


def in_dtype(parameter: nnx.Param[Any], dtype: DTypeLike) -> jax.Array | FrozenWeight:
    """Return a parameter's array in a dtype, or its `FrozenWeight`, which has the compute dtype."""
    value = parameter.get_value()
    return value if _is_frozen(value) else value.astype(dtype)


def product(
    x: Float[Array, "B T ..."], weight: Float[Array, "..."] | FrozenWeight, inputs: int = 1
) -> Float[Array, "B T ..."]:
    """Multiply x by a weight, whose first `inputs` dimensions are those of its input features.

    The factors of a `FrozenWeight` get their gradients in float32, its `w` none.
    """
    if not isinstance(weight, FrozenWeight):
        return jnp.tensordot(x, weight, inputs)
    return _frozen_product(inputs, *vary((x, weight), varying_axes(x, weight)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _frozen_product(inputs, x, weight):
    return jnp.tensordot(x, weight.w, inputs)


def _forward(inputs, x, weight):
    return _frozen_product(inputs, x, weight), (x, weight)


def _backward(inputs, residuals, dy):
    x, weight = residuals
    outputs = weight.w.ndim - inputs
    dx = _times_transposed(dy, weight.w, outputs).astype(x.dtype)
    if weight.a is None or weight.b is None:
        return dx, None
    a = weight.a.astype(x.dtype)
    b = weight.b.astype(x.dtype)
    da = _of_weight(x, _times_transposed(dy, b, outputs))
    db = _of_weight(jnp.tensordot(x, a, inputs), dy)
    return dx, FrozenWeight(None, da.astype(weight.a.dtype), db.astype(weight.b.dtype))


_frozen_product.defvjp(_forward, _backward)


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
    """Apply a function of output features to an array, or to the parts of a `FrozenWeight` that have them."""
    if not _is_frozen(weight):
        return function(weight)
    b = None if weight.b is None else function(weight.b)
    return weight._replace(w=function(weight.w), b=b)


def without_frozen(weights: PyTree) -> tuple[PyTree, PyTree]:
    """Divide weights into a tree of what trains and a tree of what does not; `joined` is the inverse."""
    trained = jax.tree.map(lambda x: x._replace(w=None) if _is_frozen(x) else x, weights, is_leaf=_is_frozen)
    frozen = jax.tree.map(lambda x: x.w if _is_frozen(x) else None, weights, is_leaf=_is_frozen)
    return trained, frozen


def joined(trained: PyTree, frozen: PyTree) -> PyTree:
    """Return the weights that `without_frozen` divided."""
    return jax.tree.map(lambda x, w: x._replace(w=w) if _is_frozen(x) else x, trained, frozen, is_leaf=_is_frozen)


def _is_frozen(x: Any) -> bool:
    return isinstance(x, FrozenWeight)
