"""A layer of a decoder: norms, attention and feed-forward, each added to the residual stream."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ringformer.models.attention import Attention
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.feedforward import FeedForward
from ringformer.models.interface import Axes
from ringformer.models.layer_scan import SAVED_FEEDFORWARD
from ringformer.models.placement import Placement
from ringformer.models.rms_norm import RMSNorm, normed


class Layer(nnx.Module):
    """Attention and feed-forward, with norms before them, after them or both.

    Both forms also return what `attend` kept (`Attention`).
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        norm = partial(RMSNorm, config.hidden_size, config.norm_eps, config.PARTS.norm_offset)
        before = config.PARTS.norms in ("before", "both")
        after = config.PARTS.norms in ("after", "both")
        self.attention_norm: RMSNorm | None = norm() if before else None
        self.attention: Attention = Attention(config, rngs)
        self.attention_output_norm: RMSNorm | None = norm() if after else None
        self.feedforward_norm: RMSNorm | None = norm() if before else None
        self.feedforward: FeedForward = FeedForward(config, rngs)
        self.feedforward_output_norm: RMSNorm | None = norm() if after else None

    def __call__(
        self, x: Float[Array, "B t D"], placement: Placement, axes: Axes, attend: Callable[..., Any]
    ) -> tuple[Float[Array, "B t D"], Any]:
        """Compute many tokens, in training and prefill. With tp, x and the result are the rank's part t of them."""
        mix = partial(self.attention, placement=placement, axes=axes, attend=attend)
        feed = partial(self.feedforward, axes=axes)
        return self._residual(x, mix, feed)

    def decode(
        self, x: Float[Array, "B D"], placement: Placement, attend: Callable[..., Any]
    ) -> tuple[Float[Array, "B D"], Any]:
        """Compute one token of each row; the module holds the device's shares of the weights (`share_products.py`)."""
        mix = partial(self.attention.decode, placement=placement, attend=attend)
        return self._residual(x, mix, self.feedforward.decode)

    def _residual(self, x, mix: Callable[..., Any], feed: Callable[..., Any]):
        with jax.named_scope("attention"):
            y, kept = mix(x, self.attention_norm)
            x = x + normed(self.attention_output_norm, y)
        with jax.named_scope("feed_forward"):
            y = feed(x, self.feedforward_norm)
            if self.feedforward_output_norm is not None:
                y = checkpoint_name(y, SAVED_FEEDFORWARD)  # its norm's backward reads it
            x = x + normed(self.feedforward_output_norm, y)
        return x, kept
