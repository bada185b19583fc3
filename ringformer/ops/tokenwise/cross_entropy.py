"""Cross-entropy through the output head, chunk by chunk: the [T, V] logits never exist.

The forward pass also computes the gradients while it has a chunk's logits. This takes three matmuls; recomputing the
logits in the backward pass would take four. For the backward pass it keeps only the gradients, dx [T, D] and dhead [D,
V].
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from ringformer.ops.argument_checks import AnyArray
from ringformer.ops.derivative_guards import reverse_mode_only
from ringformer.ops.tokenwise.scan_tokens import scan_tokens
from ringformer.ops.varying_axes import vary, vary_like, varying_axes


def cross_entropy(
    x: Float[Array, "B T D"],
    head: Float[Array, "D V"],
    targets: Int[AnyArray, "B T"],
    mask: Bool[AnyArray, "B T"],
    chunk: int,
) -> Float32[Array, ""]:
    """Sum -log softmax(x head)[target] over the local tokens where mask is true, in nats, without normalization.

    `head` has x's dtype and the targets lie in [0, V). `chunk` tokens are computed at a time; the last chunk may be
    shorter. Differentiable in x and head by reverse mode, and by forward mode over reverse.
    """
    axes = varying_axes(x, head, targets, mask)
    return _cross_entropy(chunk, *reverse_mode_only(vary((x, head, targets, mask), axes), "cross_entropy"))


def token_cross_entropy(
    x: Float[Array, "B T D"], head: Float[Array, "D V"], targets: Int[AnyArray, "B T"], chunk: int
) -> Float32[Array, "B T"]:
    """Compute the loss of each token, -log softmax(x head)[target] in nats; arguments as in `cross_entropy`.

    For evaluation, not for training: its gradient would keep the logits.
    """

    def chunk_losses(_, chunk):
        return None, _token_losses(head, *chunk)[0]

    return scan_tokens(chunk_losses, None, vary((x, targets), varying_axes(x, head, targets)), chunk)[1]


def token_scores(
    x: Float[Array, "B T D"], head: Float[Array, "D V"], targets: Int[AnyArray, "B T"], chunk: int
) -> tuple[Float32[Array, "B T"], Bool[Array, "B T"]]:
    """Compute `token_cross_entropy`, and whether each target is the likeliest token (the first of several)."""

    def chunk_scores(_, chunk):
        losses, logits, _, _ = _token_losses(head, *chunk)
        return None, (losses, logits.argmax(axis=-1) == chunk[1])

    return scan_tokens(chunk_scores, None, vary((x, targets), varying_axes(x, head, targets)), chunk)[1]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(chunk, x, head, targets, mask):
    def add_chunk(total, chunk):
        return total + _chunk_loss(head, *chunk)[0], None

    return scan_tokens(add_chunk, _zero(head), (x, targets, mask), chunk)[0]


def _forward(chunk, x, head, targets, mask):
    def add_chunk(carry, chunk):
        total, dhead = carry
        x = chunk[0]
        loss, dlogits = _chunk_loss(head, *chunk)
        dx = jnp.einsum("btv,dv->btd", dlogits, head, preferred_element_type=jnp.float32).astype(x.dtype)
        dhead += jnp.einsum("btd,btv->dv", x, dlogits, preferred_element_type=jnp.float32)
        return (total + loss, dhead), dx

    (total, dhead), dx = scan_tokens(add_chunk, (_zero(head), _zero(head, head.shape)), (x, targets, mask), chunk)
    return total, (dx, dhead.astype(head.dtype))


def _backward(chunk, gradients, dtotal):
    dx, dhead = gradients
    return (dx * dtotal).astype(dx.dtype), (dhead * dtotal).astype(dhead.dtype), None, None


_cross_entropy.defvjp(_forward, _backward)


def _chunk_loss(head, x, targets, mask):
    """Return the chunk's summed loss, and its gradient with respect to the logits in x's dtype."""
    losses, logits, lse, hit = _token_losses(head, x, targets)
    dlogits = jnp.where(mask[..., None], jnp.exp(logits - lse) - hit, 0.0)
    return jnp.where(mask, losses, 0.0).sum(), dlogits.astype(x.dtype)


def _token_losses(head, x, targets):
    """Return the loss of each token of a chunk [B, t], its logits, their lse, and a one-hot mask of the target."""
    logits = jnp.einsum("btd,dv->btv", x, head, preferred_element_type=jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    hit = targets[..., None] == jnp.arange(logits.shape[-1])
    return lse[..., 0] - jnp.where(hit, logits, 0.0).sum(axis=-1), logits, lse, hit


def _zero(like, shape=()):
    return vary_like(jnp.zeros(shape, jnp.float32), like)
