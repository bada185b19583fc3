"""Values that the fields of a decoder's configuration may have."""

import math
from typing import Any, Literal, get_args

from ringformer.models.own_attention import ATTENTION, REGISTERED, UnknownAttention
from ringformer.ops.kernels.block_kernels import Kernel
from ringformer.ops.layouts import VISIBLE, WINDOWED
from ringformer.ops.ring import RingForm
from ringformer.settings import check_settings

Remat = Literal["full", "attention", "feedforward", "dots", "none"]
MOST_INIT_STD = 1e6
"""Largest standard deviation of fresh weights: float32 holds their products."""
KEEP_HIDDEN: tuple[Remat, ...] = ("feedforward", "dots", "none")
"""Kinds of rematerialisation that keep the feed-forward's hidden products."""
OFFLOADABLE: tuple[Remat, ...] = ("full", "attention")
"""Kinds of rematerialisation whose kept arrays can be offloaded to host memory."""


def check_config(config: Any) -> None:
    """Raise ValueError for a value that no `DecoderConfig` can have, and for values that contradict each other."""
    check_settings(config)
    if config.attention not in (*ATTENTION, *REGISTERED):
        raise UnknownAttention(
            f"unknown attention {config.attention!r}; known: {', '.join((*ATTENTION, *REGISTERED))}; a config file may "
            "register one: --config=FILE"
        )
    choices = {
        "layout": tuple(VISIBLE),
        "ring": get_args(RingForm),
        "remat": get_args(Remat),
        "compute_dtype": ("float32", "bfloat16"),
        "kernel": ("auto", *get_args(Kernel)),
    }
    for field, values in choices.items():
        if getattr(config, field) not in values:
            raise ValueError(f"unknown {field} {getattr(config, field)!r}; known: {', '.join(values)}")
    sizes = "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"
    for field in (*sizes, "ffn_chunk", "loss_chunk", "remat_group", "head_groups", "ulysses"):
        if getattr(config, field) < 1:
            raise ValueError(f"{field}={getattr(config, field)} must be positive")
    if not 0 <= config.init_std <= MOST_INIT_STD:
        raise ValueError(f"init_std={config.init_std} must be at least 0, and at most {MOST_INIT_STD:g}")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"num_heads={config.num_heads} is not a multiple of num_kv_heads={config.num_kv_heads}")
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim} is odd: rotary embedding rotates pairs of features")
    if not 1 < config.rope_theta < math.inf:
        raise ValueError(f"rope_theta={config.rope_theta} must be above 1, 10000 for example")
    if not 0 < config.norm_eps < 1:
        raise ValueError(f"norm_eps={config.norm_eps} must be above 0 and below 1, 1e-6 for example")
    for field in ("q_chunk", "k_chunk"):
        if (chunk := getattr(config, field)) is not None and chunk < 1:
            raise ValueError(f"{field}={chunk} must be positive, or unset")
    if config.window < 0:
        raise ValueError(f"window={config.window} must not be negative: the keys that a query sees at most, or 0")
    if config.window and config.on_ring and config.layout not in WINDOWED:
        raise ValueError(
            f"window={config.window} with layout={config.layout!r}: neighbouring tokens are on all ranks; "
            "layout='zigzag' balances causal work too"
        )
    if config.remat_group > config.num_layers:
        raise ValueError(f"remat_group={config.remat_group} exceeds num_layers={config.num_layers}")
    if config.PARTS.qk_norm == "width" and config.head_groups > 1:
        raise ValueError(
            f"head_groups={config.head_groups} with {type(config).__name__}, whose norm of queries and keys covers all "
            "heads: set head_groups=1"
        )
    if config.num_kv_heads % config.head_groups:
        raise ValueError(f"head_groups={config.head_groups} does not divide num_kv_heads={config.num_kv_heads}")
    if config.offload and config.remat not in OFFLOADABLE:
        raise ValueError(
            f"offload moves layer inputs and attention outputs: remat must be {' or '.join(OFFLOADABLE)}, not "
            f"{config.remat}"
        )
    if config.full_remat_layers:
        _check_full_remat_layers(config)


def _check_full_remat_layers(config: Any) -> None:
    """Raise ValueError if some layers of a decoder cannot recompute their attention while the others keep it."""
    layers = f"full_remat_layers={config.full_remat_layers}"
    if config.full_remat_layers < 0:
        raise ValueError(f"{layers} must not be negative: the first layers whose attention is recomputed")
    if config.remat != "attention" or not config.offload:
        raise ValueError(
            f"{layers} with remat={config.remat} and offload={config.offload}: these are layers whose attention's "
            "outputs need no host memory, so set remat=attention and offload=True"
        )
    if config.full_remat_layers >= config.num_layers:
        raise ValueError(f"{layers} leaves none of num_layers={config.num_layers}: set remat=full")
    if config.remat_group > 1:
        raise ValueError(f"{layers} with remat_group={config.remat_group}: set one of them")
    if not config.has_equal_layers:
        raise ValueError(f"{layers}: the layers of {type(config).__name__} are of several kinds; set it to 0")
