"""ringformer: exact attention over sequences of millions of tokens, sharded along a ring of devices.

Arrays at public boundaries are [B, T, H, d]. Shape letters, everywhere: B batch, T query length and S key length
(local to a device unless said otherwise), D model width, H query heads, K key heads, d head dim, F feed-forward
width, V vocabulary, L layers.
"""

from ringformer.models.llama import Axes, Llama, LlamaConfig
from ringformer.models.llama_presets import preset
from ringformer.ops.blockwise_feedforward import blockwise_feedforward
from ringformer.ops.cross_entropy import cross_entropy
from ringformer.ops.layouts import enter, leave, permutation
from ringformer.ops.ring_attention import ring_attention, sharded_ring_attention

__all__ = [
    "Axes",
    "Llama",
    "LlamaConfig",
    "blockwise_feedforward",
    "cross_entropy",
    "enter",
    "leave",
    "permutation",
    "preset",
    "ring_attention",
    "sharded_ring_attention",
]
