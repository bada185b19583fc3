"""LLaMA checkpoints of Hugging Face in and out, block by block: neither way holds a whole model in host memory."""

from ringformer.convert.exporting import to_hf
from ringformer.convert.importing import from_hf
from ringformer.convert.verification import verify

__all__ = ["from_hf", "to_hf", "verify"]
