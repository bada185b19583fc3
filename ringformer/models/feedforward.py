"""Gated feed-forward of a layer: its parameters, its form for many tokens (training and prefill) and its form for one
token (decoding)."""

from typing import Any

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ringformer.models.config_checks import KEEP_HIDDEN
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.initialization import normal
from ringformer.models.interface import Axes
from ringformer.models.rms_norm import RMSNorm, normed, rms_norm
from ringformer.models.share_products import own_columns_product, own_rows_product
from ringformer.models.tensor_parallel import enter_tp, leave_tp
from ringformer.ops.tokenwise.blockwise_feedforward import (
    ACTIVATIONS,
    SAVED_HIDDEN,
    blockwise_feedforward,
    gated_hidden,
    gated_output,
)
from ringformer.ops.tokenwise.layer_weight import in_dtype


class FeedForward(nnx.Module):
    """SwiGLU or GeGLU, and the norm before it."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.w_gate: nnx.Param[Any] = normal(config, rngs, "DF", of_product=True)
        self.w_up: nnx.Param[Any] = normal(config, rngs, "DF", of_product=True)
        self.w_down: nnx.Param[Any] = normal(config, rngs, "FD", of_product=True)

    def __call__(self, x: Float[Array, "B t D"], norm: RMSNorm | None, axes: Axes) -> Float[Array, "B t D"]:
        """Compute many tokens. The norm and the feed-forward run chunk by chunk (the paper's blockwise feed-forward).

        With tp, x and the result are the rank's part t of the local tokens.
        """
        c = self.config
        activation = ACTIVATIONS[c.PARTS.activation]
        x = enter_tp(x, axes)
        scale = None if norm is None else norm.scale[...]
        projections = tuple(in_dtype(w, x.dtype) for w in (self.w_gate, self.w_up, self.w_down))

        def hidden(weights, x):
            scale, projections = weights
            if scale is not None:
                x = rms_norm(x, scale, c.norm_eps, c.PARTS.norm_offset)
            return gated_hidden(projections, x)

        def output(weights, hidden):
            return gated_output(weights[1], hidden, activation)

        def whole(weights, x):
            return output(weights, hidden(weights, x))

        weights = scale, projections
        if not c.on_ring and c.attention != "blockwise":
            y = output(weights, checkpoint_name(hidden(weights, x), SAVED_HIDDEN))
        elif c.remat in KEEP_HIDDEN:
            y = blockwise_feedforward(output, weights, x, c.ffn_chunk, hidden=hidden)
        else:
            y = blockwise_feedforward(whole, weights, x, c.ffn_chunk)
        return leave_tp(y, axes)

    def decode(self, x: Float[Array, "B D"], norm: RMSNorm | None) -> Float[Array, "B D"]:
        """Compute one token of each row; the module holds the device's shares of the weights (`share_products.py`)."""
        activation = ACTIVATIONS[self.config.PARTS.activation]
        x = normed(norm, x)
        gate = own_columns_product(x, self.w_gate[...])
        up = own_columns_product(x, self.w_up[...])
        return own_rows_product(activation(gate) * up, self.w_down[...])
