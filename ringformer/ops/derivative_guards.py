"""Guards: identity functions that raise a clear error where an op does not support a derivative, or `jax.vmap`.

An op with a `custom_vjp` supports reverse mode, and forward mode over reverse mode, because JAX differentiates its
backward like any other program. This covers `jax.grad`, `jax.hessian`, and Hessian-vector products if the inner
gradient is by every input that the outer tangent moves. An input that only the tangent moves is in forward mode alone,
which a `custom_vjp` does not support.

A guard recognizes the mode by its tangent: forward mode evaluates the tangent, reverse mode transposes it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def reverse_mode_only(tree: Any, name: str) -> Any:
    """Return `tree` unchanged, for the inputs of an op with a `custom_vjp`.

    Forward mode through it raises NotImplementedError. The message has the op's `name` and the modes that work; JAX's
    own error names neither.
    """
    return _guard(_no_evaluation, tree, name)


def once_reversible(tree: Any, name: str) -> Any:
    """Return `tree` unchanged, for the results of a loop whose trip count depends on data.

    Reverse mode through it raises NotImplementedError, because JAX cannot reverse such a loop. Loops inside a
    `custom_vjp` are only reversed by a second reverse mode. The message has the op's `name` and says to use forward
    mode over reverse mode.
    """
    return _guard(_no_transpose, tree, name)


def without_derivatives(tree: Any, name: str, instead: str) -> Any:
    """Return `tree` unchanged, for code inside a `custom_vjp` that has no derivative of its own, such as a kernel.

    Any derivative of it raises NotImplementedError. Only a second derivative of the op differentiates such code, so the
    message says that `name` has no second derivative, and that `instead` has one.
    """

    def refuse(*_):
        raise NotImplementedError(f"{name} has no second derivative: {instead} has")

    return _identity(tree, refuse)


def unbatched(tree: Any, reason: str) -> Any:
    """Return `tree` unchanged, for arrays of an op that JAX cannot batch.

    `jax.vmap` over them, their tangents or their cotangents raises NotImplementedError with the `reason` as its
    message; JAX's own error would not say what to do.
    """
    return jax.tree.map(lambda x: _no_batching.bind(x, name=reason), tree)


def _guard(primitive, tree, name):
    """Pass `tree` through an identity whose tangents pass through the primitive."""
    return _identity(tree, lambda primals, tangents: (*primals, primitive.bind(*tangents, name=name)))


def _identity(tree, jvp):
    """Pass the inexact leaves of `tree` through an identity whose rule for (primals, tangents) is `jvp`."""

    @jax.custom_jvp
    def identity(x):
        return x

    identity.defjvp(jvp)
    return jax.tree.map(lambda x: identity(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x, tree)


def _identity_primitive(primitive_name: str) -> Primitive:
    """Make a primitive that returns its array unchanged and supports every transformation. A guard replaces the rule of
    the one that it refuses."""
    primitive = Primitive(primitive_name)
    primitive.def_impl(lambda x, name: x)
    primitive.def_abstract_eval(lambda x, name: x)
    mlir.register_lowering(primitive, lambda context, x, name: [x])
    batching.defvectorized(primitive)
    ad.deflinear2(primitive, lambda cotangent, x, name: [cotangent])
    return primitive


def _refuse_forward_mode(*_, name):
    raise NotImplementedError(
        f"{name} has no forward-mode derivative (jax.jvp, jax.jacfwd, jax.linearize): take reverse mode (jax.grad, "
        "jax.vjp, jax.jacrev). Forward mode over it works where the inner gradient is by every input that the outer "
        "tangent moves: jax.hessian(f), or jax.jvp(jax.grad(f, argnums=(0, 1, 2)), ...) for Hessian-vector products"
    )


def _refuse_second_reverse(*_, name):
    raise NotImplementedError(
        f"{name} cannot take reverse mode over reverse mode (jax.grad of jax.grad) where a loop's trip count is data, "
        "with segment_ids, with a window, or in the contiguous layout on a ring: take forward mode over reverse mode, "
        "jax.jvp(jax.grad(f), ...) or jax.hessian(f)"
    )


def _refuse_batching(*_, name):
    raise NotImplementedError(name)


_no_evaluation = _identity_primitive("reverse_mode_only")
_no_evaluation.def_impl(_refuse_forward_mode)
mlir.register_lowering(_no_evaluation, _refuse_forward_mode)
_no_transpose = _identity_primitive("once_reversible")
ad.deflinear2(_no_transpose, _refuse_second_reverse)
_no_batching = _identity_primitive("unbatched")
ad.deflinear2(_no_batching, lambda cotangent, x, name: [_no_batching.bind(cotangent, name=name)])
batching.primitive_batchers[_no_batching] = _refuse_batching
