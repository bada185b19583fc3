"""FLOPs of a decoder's matrix products, by two conventions: as counted for MFU, and as executed.

A weight takes 2 FLOPs per token in the forward and 4 in the backward, for the gradients of the activations and of the
weight. A pair of a query and a key takes, for each of the d features of a head, 4 FLOPs in the forward (the logit, and
its share of the output) and 8 in the backward (the gradients of v, p, q and k). Blockwise attention keeps no logits: it
recomputes them in the backward, which takes 2 more.

The input embedding takes no FLOPs, unless it is also the output head.
"""

from collections.abc import Callable

from ringformer.models.config_checks import KEEP_HIDDEN
from ringformer.models.decoder_config import DecoderConfig

WEIGHT_FORWARD = 2
WEIGHT_BACKWARD = 4
"""FLOPs per weight and token."""

PAIR_FORWARD = 4
PAIR_BACKWARD = 8
PAIR_LOGITS_AGAIN = 2
"""FLOPs per pair of a query and a key, for each head and each feature of the head."""


def model_flops_per_token(config: DecoderConfig, seq_len: int, *, causal: bool = False, frozen: bool = False) -> float:
    """Training FLOPs per token by the convention of MFU, `6 N + 12 L H d T` (PaLM, appendix B).

    These are the FLOPs that the mathematics needs: recomputation does not count. Attention counts all pairs; with
    `causal`, it counts 6 L H d T, only the pairs that a causal mask leaves. With a window, T is the window, less what
    the first queries lack. Weights that are frozen, beside adapters, count 4 N: they have no gradient.
    """
    weights = (WEIGHT_FORWARD + (WEIGHT_FORWARD if frozen else WEIGHT_BACKWARD)) * working_params(config)
    pairs = visible_keys(config, seq_len) if causal else _mean(config, lambda w: min(w or seq_len, seq_len))
    return float(weights + (PAIR_FORWARD + PAIR_BACKWARD) * _pair_features(config) * pairs)


def visible_keys(config: DecoderConfig, seq_len: int) -> float:
    """Return how many keys a query of one causal sequence sees on average, over queries and layers."""
    return _mean(config, lambda window: keys_in_window(window, seq_len))


def keys_in_window(window: int, seq_len: int) -> float:
    """Return how many keys a query of one causal sequence sees on average: half of the sequence (window 0), or a
    window, which the first queries do not fill."""
    window = min(window or seq_len, seq_len)
    return window * (1 - window / (2 * seq_len))


def _mean(config: DecoderConfig, of_window: Callable[[int], float]) -> float:
    return sum(layers * of_window(window) for window, layers in config.windows.items()) / config.num_layers


def forward_runs(config: DecoderConfig) -> tuple[int, float]:
    """Count how often a step runs the forward of a layer's weights, and how often, on average over layers, that of its
    attention. Each runs once, plus once for each level of rematerialisation that does not keep its results."""
    levels = 1 + (config.remat_group > 1)
    of_weights = config.remat in ("dots", "none")
    return 1 + levels - of_weights, levels + _full_remat(config)


def _full_remat(config: DecoderConfig) -> float:
    """Return the share of layers that keep their input only."""
    return 1 if config.remat == "full" else config.full_remat_layers / config.num_layers


def feedforward_products(config: DecoderConfig, *, frozen: bool = False) -> float:
    """Return how many products with the feed-forward's F features a step executes per layer, with the blockwise
    feed-forward: 3 forward; 6 backward, or 3 if the weights are frozen; and those that are computed again.

    The hidden products are computed again unless `remat` keeps them. The whole feed-forward is, for the norm that
    follows it in some families, unless its output is kept, and in groups of layers that are recomputed together.
    """
    again = 0.0
    if config.remat not in KEEP_HIDDEN:
        again += 2
    if config.PARTS.norms != "before":
        again += 3 * _full_remat(config)
    _, single = config.remat_groups
    again += 3 * (1 - single / config.num_layers)
    return 3 + (3 if frozen else 6) + again


def executed_flops(config: DecoderConfig, seq_len: int, *, frozen: bool = False) -> float:
    """FLOPs that a step executes on one causal sequence: those of visible pairs, plus recomputation. Frozen weights get
    no gradient."""
    forwards, _ = forward_runs(config)
    backward = WEIGHT_FORWARD if frozen else WEIGHT_BACKWARD
    weights = float(WEIGHT_FORWARD * forwards + backward) * working_params(config)
    sizes = config.sizes
    of_feedforward = WEIGHT_FORWARD * 3 * sizes["D"] * sizes["F"] * sizes["L"]
    if config.remat == "feedforward":
        weights -= of_feedforward
    if config.PARTS.norms != "before":
        weights += of_feedforward * _full_remat(config)  # again for the norm behind it, and for its own gradients
    return weights * seq_len + executed_attention_flops(config, seq_len)


def executed_attention_flops(config: DecoderConfig, seq_len: int) -> float:
    """Return the part of `executed_flops` that attention takes."""
    visible = _pair_features(config) * seq_len * visible_keys(config, seq_len)
    return executed_pair_flops(config) * visible


def executed_pair_flops(config: DecoderConfig) -> float:
    """FLOPs that a step executes per visible pair of a query and a key, for each head and each feature of the head, on
    average over layers."""
    return PAIR_FORWARD * forward_runs(config)[1] + PAIR_BACKWARD + PAIR_LOGITS_AGAIN


def working_params(config: DecoderConfig) -> int:
    """Number of parameters that multiply each token."""
    return config.num_params - config.vocab_size * config.hidden_size * (not config.tie_embeddings)


def _pair_features(config: DecoderConfig) -> int:
    """Return heads times features, summed over layers: the factor of the FLOPs of a pair of a query and a key."""
    return config.num_layers * config.num_heads * config.head_dim
