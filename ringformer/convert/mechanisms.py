"""Mechanisms of a model that no family of ringformer has, in words, from the keys of its config.json."""

from collections.abc import Iterator
from typing import Any

EXPERTS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
EXPERTS_A_TOKEN = "num_experts_per_tok", "experts_per_token", "moe_topk", "num_experts_per_token", "moe_k"

LAYERS = {
    "linear": "linear layers",
    "mamba": "state-space layers",
    "conv": "convolution layers",
    "chunked": "chunked attention",
    "recurrent": "recurrent layers",
}
"""Mechanism by a part of a name in `layer_types`."""

PREFIXES = {"linear_": "linear layers", "mamba_": "state-space layers", "ssm_": "state-space layers"}
"""Mechanism by the first letters of a key."""

VALUES = {
    "kv_lora_rank": "latent attention",
    "index_topk": "sparse attention",
    "attn_logit_softcapping": "capped logits",
    "final_logit_softcapping": "capped logits",
    "layer_norm_eps": "layer norms with a mean",
    "layer_norm_epsilon": "layer norms with a mean",
    "residual_multiplier": "scaled residuals",
    "attention_multiplier": "scaled attention",
    "alibi": "position biases",
    "n_positions": "learned positions",
    "parallel_attn": "attention beside the feed-forward",
    "use_parallel_residual": "attention beside the feed-forward",
}
"""Mechanism by a key that is set."""


def mechanisms(hf: dict[str, Any]) -> str:
    """Return the mechanisms that no family has, "128 experts, 8 a token; linear layers", or "" if none is known.

    `hf` is a config.json; the keys of a text model inside it count, too.
    """
    text = hf.get("text_config")
    keys = hf | text if type(text) is dict else hf
    return "; ".join(dict.fromkeys(_mechanisms(keys)))


def _first_set(keys: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the value of the first of the names that is set; None if none is."""
    for name in names:
        if keys.get(name):
            return keys[name]
    return None


def _mechanisms(keys: dict[str, Any]) -> Iterator[str]:
    experts = _first_set(keys, EXPERTS)
    chosen = _first_set(keys, EXPERTS_A_TOKEN)
    if experts:
        yield f"{experts} experts, {chosen} a token" if chosen else f"{experts} experts"
    for key, name in VALUES.items():
        if keys.get(key) is True:
            yield name
        elif keys.get(key):
            yield f"{name} ({key}={keys[key]!r})"
    part = keys.get("partial_rotary_factor", 1)
    if part not in (None, 1):
        yield f"rotation of a part of each head (partial_rotary_factor={part!r})"
    types = keys.get("layer_types")
    if type(types) is list:
        for layer in types:
            for part_of_name, name in LAYERS.items():
                if part_of_name in str(layer):
                    yield name
    for key, value in keys.items():
        for prefix, name in PREFIXES.items():
            if key.startswith(prefix) and value:
                yield name
    if keys.get("is_encoder_decoder"):
        yield "an encoder"
