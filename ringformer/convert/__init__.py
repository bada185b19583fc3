"""LLaMA checkpoints of Hugging Face in and out, block by block: neither way holds a whole model in host memory."""

from ringformer.convert.export_hf import to_hf
from ringformer.convert.import_hf import from_hf
from ringformer.convert.verify_logits import verify

__all__ = ["from_hf", "to_hf", "verify"]
