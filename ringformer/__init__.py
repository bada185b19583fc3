"""ringformer: exact attention over sequences of millions of tokens, sharded along a ring of devices.

Arrays at public boundaries are [B, T, H, d]. Shape letters in all modules: B batch, T query length and S key length
(local to a device unless stated otherwise), D model width, H query heads, K key heads, d head dim, F feed-forward
width, V vocabulary, L layers.

Names are imported on first use (PEP 562): `import ringformer` alone does not load JAX.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringformer.inference.generator import Generator as Generator
    from ringformer.inference.sampling import Sampling as Sampling
    from ringformer.models.decoder import Decoder as Decoder
    from ringformer.models.families.gemma3 import Gemma3Config as Gemma3Config
    from ringformer.models.families.llama import LlamaConfig as LlamaConfig
    from ringformer.models.families.ministral3 import Ministral3Config as Ministral3Config
    from ringformer.models.families.mistral import MistralConfig as MistralConfig
    from ringformer.models.families.olmo3 import Olmo3Config as Olmo3Config
    from ringformer.models.families.qwen2 import Qwen2Config as Qwen2Config
    from ringformer.models.families.qwen3 import Qwen3Config as Qwen3Config
    from ringformer.models.families.seed_oss import SeedOssConfig as SeedOssConfig
    from ringformer.models.families.smollm3 import SmolLM3Config as SmolLM3Config
    from ringformer.models.interface import Axes as Axes
    from ringformer.models.own_attention import register_attention as register_attention
    from ringformer.models.registry import preset as preset
    from ringformer.ops.layouts import enter as enter
    from ringformer.ops.layouts import leave as leave
    from ringformer.ops.layouts import permutation as permutation
    from ringformer.ops.ring_attention import ring_attention as ring_attention
    from ringformer.ops.sharded_ring_attention import sharded_ring_attention as sharded_ring_attention
    from ringformer.ops.tokenwise.blockwise_feedforward import blockwise_feedforward as blockwise_feedforward
    from ringformer.ops.tokenwise.cross_entropy import cross_entropy as cross_entropy
    from ringformer.runs.config import base_config as base_config

    __version__: str

_HOMES = {
    "Axes": "models.interface",
    "Decoder": "models.decoder",
    "Gemma3Config": "models.families.gemma3",
    "Generator": "inference.generator",
    "LlamaConfig": "models.families.llama",
    "Ministral3Config": "models.families.ministral3",
    "MistralConfig": "models.families.mistral",
    "Olmo3Config": "models.families.olmo3",
    "Qwen2Config": "models.families.qwen2",
    "Qwen3Config": "models.families.qwen3",
    "Sampling": "inference.sampling",
    "SeedOssConfig": "models.families.seed_oss",
    "SmolLM3Config": "models.families.smollm3",
    "base_config": "runs.config",
    "blockwise_feedforward": "ops.tokenwise.blockwise_feedforward",
    "cross_entropy": "ops.tokenwise.cross_entropy",
    "enter": "ops.layouts",
    "leave": "ops.layouts",
    "permutation": "ops.layouts",
    "preset": "models.registry",
    "register_attention": "models.own_attention",
    "ring_attention": "ops.ring_attention",
    "sharded_ring_attention": "ops.sharded_ring_attention",
}
"""Public names, each with its module."""

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return metadata.version("ringformer")
    if name not in _HOMES:
        raise AttributeError(f"module 'ringformer' has no attribute {name!r}")
    return getattr(import_module(f"ringformer.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
