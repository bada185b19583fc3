"""Import and export of Hugging Face LLaMA checkpoints, block by block, without a whole model in host memory.

Names are imported on first use (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringformer.convert.export_hf import to_hf as to_hf
    from ringformer.convert.import_hf import from_hf as from_hf
    from ringformer.convert.verify_logits import verify as verify

_HOMES = {"from_hf": "import_hf", "to_hf": "export_hf", "verify": "verify_logits"}
"""Module of each public name."""

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ringformer.convert' has no attribute {name!r}")
    return getattr(import_module(f"ringformer.convert.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
