"""Gradients that are sent to the host's memory as soon as they are known."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ringformer.ops.varying_axes import vary_like, varying_axes


def is_in_host(x: jax.Array) -> bool:
    """Return True for a traced array in host memory."""
    return jax.typeof(x).memory_space is jax.memory.Space.Host


def device_stand_ins(tree: Any, like: jax.Array) -> Any:
    """Return a tree whose arrays in host memory are replaced by zeros on the device, which vary as `like` does.

    The gradient of such zeros is summed over the devices that have the same shard, and sent to the host's memory, where
    the backward of the call is: in that of each layer, if a layer calls this.
    """

    def stand_in(x):
        return _stand_in(x, like, tuple(sorted(varying_axes(x)))) if is_in_host(x) else x

    return jax.tree.map(stand_in, tree)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _stand_in(x, like, axes):
    return vary_like(jnp.zeros(x.shape, x.dtype), like)


def _forward(x, like, axes):
    return _stand_in(x, like, axes), None


def _backward(axes, _, dw):
    replicas = varying_axes(dw) - set(axes)
    whole = lax.psum(dw, tuple(sorted(replicas))) if replicas else dw
    return jax.device_put(whole, jax.memory.Space.Host), None


_stand_in.defvjp(_forward, _backward)
