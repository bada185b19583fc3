"""Options of `ring_attention` for the layers of a kind."""

from typing import Any

from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.layer_kinds import LayerKind
from ringformer.ops.kernels.block_kernels import Kernel, window_fault
from ringformer.ops.kernels.kernel_tools import LANES
from ringformer.ops.layouts import PARTS
from ringformer.ops.work_list import default_chunk

FEWEST_IN_WINDOW = {"pallas": 512, "xla": 128}
"""Tokens of the smallest chunks for a window, by kernel: smaller ones waste more of the kernel's time than larger ones
of the window. cuDNN has no chunks."""


def attention_options(c: DecoderConfig, kind: LayerKind, tokens: int, *, documents: bool, parts: int) -> dict[str, Any]:
    """Return the options of `ring_attention` for the layers of a kind: scale, window, kernel and chunks.

    If only some layers have a window, their chunks are at most a quarter of it, or `FEWEST_IN_WINDOW` tokens. XLA
    computes windows that the kernel does not support.

    Args:
      tokens: tokens of a rank of the ring. documents: True if there are segment ids.
      parts: parts that all ranks have of the sequence; 1 without a ring.
    """
    kernel = kernel_of(c, kind.window, tokens, documents, parts)
    chunks = {"q_chunk": c.q_chunk, "k_chunk": c.k_chunk}
    if kind.window and len(c.windows) > 1 and kernel in FEWEST_IN_WINDOW:
        most = max(FEWEST_IN_WINDOW[kernel], kind.window // 4 // LANES * LANES)
        chunks = {name: min(chunk or default_chunk(tokens), most) for name, chunk in chunks.items()}
    return {"scale": c.logit_scale, "window": kind.window or None, "kernel": kernel, **chunks}


def kernel_of(c: DecoderConfig, window: int, tokens: int, documents: bool, parts: int) -> Kernel:
    """Return the kernel of the layers with a window, 0 for full attention; arguments as in `attention_options`."""
    if c.kernel == "auto":
        return "xla"
    part = tokens if parts == 1 else tokens // PARTS[c.layout]
    limits = 0 < window < parts * part
    if limits and window_fault(c.kernel, window, part if parts > 1 else None, documents):
        return "xla"
    return c.kernel
