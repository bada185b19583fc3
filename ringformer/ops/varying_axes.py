"""Varying manual axes: a common type for arrays that are combined inside `shard_map`.

Under `check_vma=True`, the type of every array inside a `shard_map` includes the mesh axes along which it may differ.
Loop carries must keep that type, and a `custom_vjp` must return cotangents of the type of its inputs.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.typing import DTypeLike


def varying_axes(*arrays: Any) -> frozenset[str]:
    """Return the mesh axes that any of the arrays varies over; empty outside `shard_map`."""
    return frozenset().union(*map(_varying, jax.tree.leaves(arrays)))


def vary(tree: Any, axes: Iterable[str]) -> Any:
    """Cast every leaf of `tree` to vary over at least `axes`; the transpose sums the gradient over the added axes."""

    def cast(x):
        missing = tuple(sorted(frozenset(axes) - _varying(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def vary_reducing(x: jax.Array, axis: str, dtype: DTypeLike) -> jax.Array:
    """Cast x, which does not vary over an axis, to vary over it; the transpose sums the gradient over it in `dtype`."""
    return lax.pcast(x, axis, to="varying")


def _vary_forward(x, axis, dtype):
    return vary_reducing(x, axis, dtype), None


def _vary_backward(axis, dtype, _, dx):
    return (lax.psum(dx.astype(dtype), axis).astype(dx.dtype),)


vary_reducing.defvjp(_vary_forward, _vary_backward)


def vary_like(tree: Any, *arrays: Any) -> Any:
    """Cast every leaf of `tree` to vary over at least the axes that `arrays` vary over."""
    return vary(tree, varying_axes(*arrays))


def _varying(x) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying
