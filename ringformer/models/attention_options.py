"""Options of `ring_attention` for the layers of a kind."""

from typing import Any

from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.layer_kinds import LayerKind
from ringformer.ops.kernels.block_kernels import BLOCK_KERNELS
from ringformer.ops.kernels.kernel_tools import LANES
from ringformer.ops.work_list import default_chunk

FEWEST_IN_WINDOW = {"pallas": 512, "xla": 128}
"""Tokens of the smallest chunks for a window: smaller ones waste more of the kernel's time than larger ones of the
window."""


def attention_options(c: DecoderConfig, kind: LayerKind, tokens: int) -> dict[str, Any]:
    """Return the options of `ring_attention` for the layers of a kind: scale, window, kernel and chunks.

    If only some layers have a window, their chunks are at most a quarter of it, or `FEWEST_IN_WINDOW` tokens, and
    kernels without windows leave them to XLA.

    Args:
      tokens: tokens of a rank of the ring.
    """
    kernel = "xla" if c.kernel == "auto" else c.kernel
    chunks = {"q_chunk": c.q_chunk, "k_chunk": c.k_chunk}
    if kind.window and len(c.windows) > 1:
        kernel = "xla" if BLOCK_KERNELS[kernel].whole_parts else kernel
        most = max(FEWEST_IN_WINDOW[kernel], kind.window // 4 // LANES * LANES)
        chunks = {name: min(chunk or default_chunk(tokens), most) for name, chunk in chunks.items()}
    return {"scale": c.logit_scale, "window": kind.window or None, "kernel": kernel, **chunks}
