"""Cross-entropy through the output head, chunk by chunk: the [T, V] logits never exist.

The gradients are computed in the forward pass, while a chunk's logits are at hand: three matmuls instead of the
four of recomputation. What is kept for the backward is their size alone, dx [T, D] and dhead [D, V].
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ringformer.ops.feedforward import join, split
from ringformer.ops.vma import vary, vary_like, varying_axes


def cross_entropy(x: jax.Array, head: jax.Array, targets: jax.Array, mask: jax.Array, chunk: int) -> jax.Array:
    """The sum over the local tokens with mask of -log softmax(x head)[target].

    Args:
      x: [B, T, D], float.
      head: [D, V] of x's dtype.
      targets: int32 [B, T], in [0, V).
      mask: bool [B, T].
      chunk: tokens per chunk; the last may be shorter.

    Returns:
      A float32 scalar: this device's sum, not divided by anything. Differentiable in x and head.
    """
    axes = varying_axes(x, head, targets, mask)
    return _cross_entropy(chunk, *vary((x, head, targets, mask), axes))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(chunk, x, head, targets, mask):
    return _over_chunks(lambda total, c: (total + _chunk_loss(head, *c)[0], None), head, chunk, x, targets, mask)[0]


def _forward(chunk, x, head, targets, mask):
    def one(carry, c):
        total, dhead = carry
        x = c[0]
        loss, dlogits = _chunk_loss(head, *c)
        dx = jnp.einsum("btv,dv->btd", dlogits, head, preferred_element_type=jnp.float32).astype(x.dtype)
        dhead += jnp.einsum("btd,btv->dv", x, dlogits, preferred_element_type=jnp.float32)
        return (total + loss, dhead), dx

    zero = vary_like(jnp.zeros(head.shape, jnp.float32), head)
    (total, dhead), dx = _over_chunks(one, head, chunk, x, targets, mask, zero)
    return total, (dx, dhead.astype(head.dtype))


def _backward(chunk, gradients, dtotal):
    dx, dhead = gradients
    return (dx * dtotal).astype(dx.dtype), (dhead * dtotal).astype(dhead.dtype), None, None


_cross_entropy.defvjp(_forward, _backward)


def _chunk_loss(head, x, targets, mask):
    """The chunk's summed loss, and its gradient by the logits in x's dtype."""
    logits = jnp.einsum("btd,dv->btv", x, head, preferred_element_type=jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    hit = targets[..., None] == jnp.arange(logits.shape[-1])
    loss = jnp.where(mask, lse[..., 0] - jnp.where(hit, logits, 0.0).sum(axis=-1), 0.0).sum()
    dlogits = jnp.where(mask[..., None], jnp.exp(logits - lse) - hit, 0.0)
    return loss, dlogits.astype(x.dtype)


def _over_chunks(one, head, chunk, x, targets, mask, *more):
    """Scan `one` over the chunks of (x, targets, mask); carry (total, *more), or total alone without more."""
    total = vary_like(jnp.zeros((), jnp.float32), head)
    carry = (total, *more) if more else total
    parts = [split(a, chunk) for a in (x, targets, mask)]
    chunks, rests = ([part[i] for part in parts] for i in (0, 1))
    ys = y_rest = None
    if chunks[0] is not None:
        carry, ys = lax.scan(one, carry, tuple(chunks))
    if rests[0] is not None:
        carry, y_rest = one(carry, tuple(rests))
    return carry, (join(ys, y_rest) if more else None)
