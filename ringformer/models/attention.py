"""Causal self-attention of a layer, made of the parts of its family: its parameters, its form for many tokens
(training and prefill) and its form for one token (decoding).

Shape letters as in `decoder.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.initialization import normal
from ringformer.models.interface import Axes
from ringformer.models.layer_scan import REMAT
from ringformer.models.placement import Placement
from ringformer.models.rms_norm import RMSNorm, normed, rms_norm
from ringformer.models.share_products import columns_product, rows_product
from ringformer.models.tensor_parallel import enter_tp, leave_tp
from ringformer.ops.tokenwise.layer_weight import LayerWeight, in_dtype, of_inputs, of_outputs, product

OF_KEY_HEADS = ("wk", "wv", "bk", "bv", "k_norm")
"""Parameters of an `Attention` that have the key heads."""


class Attention(nnx.Module):
    """Causal self-attention with grouped key heads.

    The caller passes `attend(q, k, v)`, which gets rotated q and k, and returns the outputs and anything that it keeps.
    Both forms return the layer's output and what `attend` kept.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.wq: nnx.Param[Any] = normal(config, rngs, "DHd", of_product=True)
        self.wk: nnx.Param[Any] = normal(config, rngs, "DKd", of_product=True)
        self.wv: nnx.Param[Any] = normal(config, rngs, "DKd", of_product=True)
        self.wo: nnx.Param[Any] = normal(config, rngs, "HdD", of_product=True)
        if config.PARTS.bias:
            self.bq: nnx.Param[Any] = self._constant("Hd", 0)
            self.bk: nnx.Param[Any] = self._constant("Kd", 0)
            self.bv: nnx.Param[Any] = self._constant("Kd", 0)
        if config.PARTS.qk_norm:
            of_one_head = config.PARTS.qk_norm == "head"
            neutral = 1 - config.PARTS.norm_offset
            self.q_norm: nnx.Param[Any] = self._constant("d" if of_one_head else "Hd", neutral)
            self.k_norm: nnx.Param[Any] = self._constant("d" if of_one_head else "Kd", neutral)

    def _constant(self, letters: str, value: float) -> nnx.Param[Any]:
        shape = [self.config.sizes[letter] for letter in letters]
        return nnx.Param(jnp.full(shape, value, jnp.float32), letters=letters)

    def __call__(
        self,
        x: Float[Array, "B t D"],
        norm: RMSNorm | None,
        placement: Placement,
        axes: Axes,
        attend: Callable[..., Any],
    ) -> tuple[Float[Array, "B t D"], Any]:
        """Compute many tokens.

        Each group of heads recomputes the norm before it, so the norm's output is never kept. With tp, x and the result
        are the rank's part t of the local tokens T, and the placement covers all T; without tp, t is T.
        """
        c = self.config
        x = enter_tp(x, axes)
        wo = in_dtype(self.wo, x.dtype)
        weights = self._of_the_rank(wo.shape[0], x.dtype, axes)
        of_heads: Callable[..., Any] = partial(self._of_heads, x, norm, placement, attend, axes)
        if c.head_groups == 1:
            o, kept = of_heads(weights)
            y = product(o, wo, 2)
        else:
            # A group's backward recomputes the projections q, k, v; its o, m and l are kept.
            of_heads = jax.checkpoint(of_heads, policy=REMAT["attention"], prevent_cse=False)
            groups = {name: _in_groups(w, c.head_groups) for name, w in weights.items()}
            _, (o, kept) = lax.scan(lambda _, group: (None, of_heads(group)), None, groups)
            grouped = of_inputs(lambda w: rearrange(w, "(g h) d D -> g h d D", g=c.head_groups), wo)
            y = product(rearrange(o, "g b t h d -> b t g h d"), grouped, 3)
        return leave_tp(y, axes), kept

    def decode(
        self, x: Float[Array, "B D"], norm: RMSNorm | None, placement: Placement, attend: Callable[..., Any]
    ) -> tuple[Float[Array, "B D"], Any]:
        """Compute one token of each row; the module holds the device's shares of the weights (`share_products.py`)."""
        c = self.config
        tp = lax.axis_size("tp")
        query_width = c.num_heads // tp * c.head_dim
        key_width = max(1, c.num_kv_heads // tp) * c.head_dim
        shares = [self.wq[...], self.wk[...], self.wv[...]]
        columns = columns_product(normed(norm, x), shares, [query_width, key_width, key_width])
        q, k, v = (rearrange(y, "b (h d) -> b 1 h d", d=c.head_dim) for y in columns)
        weights = {name: getattr(self, name)[...].astype(x.dtype) for name in self._names()}
        q, k, v = self._with_parts(q, k, v, weights, "tp")
        q, k = placement(q, k)
        o, kept = attend(q, k, v)
        return rows_product(rearrange(o, "b 1 h d -> b (h d)").astype(x.dtype), self.wo[...]), kept

    def _names(self) -> list[str]:
        """Return the names of the parameters that each head has a part of, besides the projections."""
        names = ["bq", "bk", "bv"] if self.config.PARTS.bias else []
        if self.config.PARTS.qk_norm == "width":
            names += ["q_norm", "k_norm"]
        return names

    def _of_the_rank(self, heads: int, dtype, axes: Axes) -> dict[str, Any]:
        """Return the parameters that each head has a part of, for a tp rank of so many query heads, [..., h, d].

        With fewer key heads than tp ranks, parameters of key heads are not sharded over tp, and each rank uses one
        head of them.
        """
        c = self.config
        names = ["wq", "wk", "wv", *self._names()]
        weights: dict[str, Any] = {name: in_dtype(getattr(self, name), dtype) for name in names}
        key_heads = max(1, heads * c.num_kv_heads // c.num_heads)  # those that the rank's queries read
        if weights["wk"].shape[1] > key_heads:
            head = lax.axis_index(axes.tp) * c.num_kv_heads // lax.axis_size(axes.tp)
            for name in names:
                if name in OF_KEY_HEADS:
                    weights[name] = of_outputs(
                        lambda w: lax.dynamic_slice_in_dim(w, head, 1, w.ndim - 2), weights[name]
                    )
        return weights

    def _of_heads(self, x: Float[Array, "B T D"], norm, placement, attend, axes, weights: dict[str, Any]):
        """Return the outputs [B, T, h, d] of some heads, whose parts of the parameters are `weights`, and `kept`."""
        x = normed(norm, x)
        q, k, v = (product(x, weights[name]) for name in ("wq", "wk", "wv"))
        q, k, v = self._with_parts(q, k, v, weights, axes.tp)
        q, k = placement(q, k)
        return attend(q, k, v)

    def _with_parts(self, q, k, v, weights: dict[str, Any], tp: str | None):
        """Add biases to q, k and v, and normalise q and k, if the family does; `tp` is the axis that shares heads."""
        parts = self.config.PARTS
        eps = self.config.norm_eps
        if parts.bias:
            q += weights["bq"]
            k += weights["bk"]
            v += weights["bv"]
        if parts.qk_norm == "head":
            q = rms_norm(q, self.q_norm[...], eps, parts.norm_offset)
            k = rms_norm(k, self.k_norm[...], eps, parts.norm_offset)
        if parts.qk_norm == "width":
            q = width_norm(q, weights["q_norm"], eps, tp)
            k = width_norm(k, weights["k_norm"], eps, tp)
        return q, k, v


def _in_groups(weight: Any, groups: int) -> Any:
    """Return a parameter that each head has a part of, by groups of heads: [groups, *inputs, heads of a group, d]."""
    grouped = of_outputs(lambda w: rearrange(w, "... (g h) d -> g ... h d", g=groups), weight)
    if isinstance(grouped, LayerWeight) and grouped.a is not None:
        return grouped._replace(a=jnp.broadcast_to(grouped.a, (groups, *grouped.a.shape)))
    return grouped


def width_norm(x: Float[Array, "B T h d"], scale: Float[Array, "h d"], eps: float, tp: str | None) -> jax.Array:
    """Divide x by the root of its mean square over all heads, those of other tp ranks included, and multiply by the
    scale, in float32; return x's dtype."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=(-2, -1), keepdims=True)
    if tp is not None:
        mean = lax.pmean(mean, tp)
    return (wide * lax.rsqrt(mean + eps) * scale.astype(jnp.float32)).astype(x.dtype)
