"""Table of the implementations that compute a block of the ring: XLA's own code, or a kernel."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp

from ringformer.hardware import Chip
from ringformer.ops import blockwise_attention
from ringformer.ops.argument_checks import Segments
from ringformer.ops.kernels import cudnn_attention, flash_attention, kernel_tools
from ringformer.ops.layouts import Layout

Kernel = Literal["xla", "pallas", "cudnn"]
"""Names of kernels: xla runs everywhere; pallas: TPU kernels of `flash_attention.py`; cudnn: `cudnn_attention.py`."""


class BlockKernel(NamedTuple):
    """An implementation of the block contract (`ops/blockwise_attention.py`)."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    log_unit: float
    """Unit of logits in the running maximum m."""
    lanes: int
    """Tokens that a chunk's length must be a multiple of; such chunks must not overlap. 1: any chunks."""
    whole_parts: bool = False
    """True if the kernel uses no chunks: a pair then consists of two whole parts of a shard (`layouts.PARTS`)."""
    prepare: Callable[..., Any] = lambda cotangents: cotangents
    """Function that computes, once for all blocks, the cotangents that the backward receives."""
    unroll: int | None = None
    """Hops in one turn of the ring's loop. With two, arrays that a kernel updates in place alternate between two
    buffers; with one, XLA copies them at the end of each turn."""
    adds_gradients: bool = False
    """True if the backward can add the keys' gradients to given ones in place."""
    takes_any_mask: bool = True
    """True if the kernel supports any segment ids and a bias of keys. Otherwise segment ids must ascend along the
    sequence, the mask must be causal, and the parts of the layout must be intervals of the sequence."""

    def has_even_halves(self, key_heads: int) -> bool:
        """Return True if two halves of the key heads are equal and, if two cores of a TPU share a half, even."""
        return key_heads % (4 if self.adds_gradients else 2) == 0


BLOCK_KERNELS: dict[str, BlockKernel] = {
    "xla": BlockKernel(blockwise_attention.block_forward, blockwise_attention.block_backward, 1.0, 1),
    "pallas": BlockKernel(
        flash_attention.block_forward,
        flash_attention.block_backward,
        flash_attention.LOG_UNIT,
        kernel_tools.LANES,
        prepare=flash_attention.prepare,
        unroll=2,
        adds_gradients=True,
    ),
    "cudnn": BlockKernel(
        cudnn_attention.block_forward, cudnn_attention.block_backward, 1.0, 1, whole_parts=True, takes_any_mask=False
    ),
}


def check_kernel(name: str, dtype: jnp.dtype, platform: str | None = None, chip: Chip | None = None) -> None:
    """Raise ValueError if a kernel is unknown, or does not support the dtype, the platform ("cpu", "gpu", "tpu"; None:
    unknown) or the chip (None: unknown). The message names a kernel that does."""
    if name not in BLOCK_KERNELS:
        raise ValueError(f"kernel={name!r}: choose one of {', '.join(get_args(Kernel))}")
    if name == "pallas" and dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"kernel='pallas' computes bfloat16 and float32; kernel='xla' takes {dtype}")
    if name == "pallas" and platform not in (None, "tpu"):
        raise ValueError(f"kernel='pallas' runs on TPU; kernel='xla' runs on {platform} too")
    if name == "pallas" and chip and chip.tensor_cores and not chip.tensor_cores.mosaic:
        raise ValueError(
            f"kernel='pallas' needs Mosaic, which cannot compile it for {chip.name}; kernel='xla' runs there"
        )
    if name == "cudnn" and dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"kernel='cudnn' computes bfloat16 and float16; kernel='xla' takes {dtype}")
    if name == "cudnn" and platform not in (None, "gpu"):
        instead = "'pallas' and 'xla' run" if platform == "tpu" else "'xla' runs"
        raise ValueError(f"kernel='cudnn' runs on GPU; kernel={instead} on {platform}")


def check_head_size(name: str, head_size: int, capability: int | None = None) -> None:
    """Raise ValueError if a kernel does not support the head size; the message names a kernel that does.

    Args:
      capability: the major version of a GPU's compute capability; None: unknown, or not a GPU.
    """
    if name == "cudnn":
        cudnn_attention.check_head_size(head_size, capability)


def check_masks(name: str, segments: Segments | None, layout: Layout, causal: bool = True, bias: bool = False) -> None:
    """Raise ValueError if a kernel does not support a bias, or segment ids (`segments` None: there are none) in this
    layout. The message names the nearest setting that works."""
    if BLOCK_KERNELS[name].takes_any_mask:
        return
    if bias:
        raise ValueError(f"kernel={name!r} takes no bias; kernel='xla' does")
    if segments is None:
        return
    if segments == "any":
        raise ValueError(
            f"kernel={name!r} takes segment ids only if they ascend along the sequence: pass segments='ascending' if "
            "yours do; kernel='xla' takes any"
        )
    if not causal:
        raise ValueError(f"kernel={name!r} takes segment ids only with causal=True; kernel='xla' takes both")
    if layout == "striped":
        raise ValueError(
            f"kernel={name!r} takes segment ids in the layouts contiguous and zigzag, not in striped, whose shards are "
            "not intervals of the sequence; layout='zigzag' balances causal work too"
        )


def check_ids(name: str, dtype: jnp.dtype) -> None:
    """Raise ValueError if a kernel does not compare segment ids of this dtype; the message says what to pass. Only
    `jax_enable_x64` has ids of 64 bits on devices."""
    if name == "pallas" and dtype.itemsize > 4:
        raise ValueError(
            f"kernel='pallas' compares segment ids of 32 bits; got {dtype}: pass ids.astype(jnp.int32) if they fit; "
            "kernel='xla' compares 64 bits"
        )


def check_both_ways(name: str, key_heads: int) -> None:
    """Raise ValueError if a kernel can send neither half of a device's key heads each way nor half of their tokens."""
    if BLOCK_KERNELS[name].whole_parts and not BLOCK_KERNELS[name].has_even_halves(key_heads):
        raise ValueError(
            f"ring='both_ways' sends half of the key heads each way, and a device has {key_heads}; kernel='xla' can "
            f"cut the tokens instead, kernel={name!r} cannot: use ring='one_way'"
        )


def check_logits(name: str, attend_first: int, logit_softcap: float | None) -> None:
    """Raise ValueError if a kernel supports no first tokens or no soft cap; the message names a kernel that does."""
    if not BLOCK_KERNELS[name].whole_parts:
        return
    if attend_first:
        raise ValueError(f"kernel={name!r} takes no attend_first (attend_first={attend_first}); kernel='xla' does")
    if logit_softcap is not None:
        raise ValueError(f"kernel={name!r} takes no logit_softcap (logit_softcap={logit_softcap}); kernel='xla' does")


def window_fault(name: str, window: int, part: int | None, segments: bool) -> str:
    """Say why a kernel does not support a window, and which does; empty if it does.

    Args:
      part: tokens of a part of a shard; None: there is no other part. segments: True if there are segment ids.
    """
    if not BLOCK_KERNELS[name].whole_parts:
        return ""
    if segments:
        return f"kernel={name!r} takes a window (window={window}) only without segment ids; kernel='xla' takes both"
    if part is not None and window - 1 > part:
        return (
            f"kernel={name!r} takes windows that reach no further than the part before, here at most {part + 1} "
            f"tokens (window={window}); kernel='xla' takes any"
        )
    return ""


OptionalArray = TypeVar("OptionalArray", jax.Array, jax.Array | None)


def padded_parts(
    x: OptionalArray, parts: int, multiple: int, axis: int, mode: Literal["constant", "edge"] = "constant"
) -> OptionalArray:
    """Pad each of the equal parts of an axis to a multiple of `multiple`, with 0 or with the part's last element; None
    stays None."""
    if x is None or not (missing := -(x.shape[axis] // parts) % multiple):
        return x
    shape = x.shape
    split = x.reshape(*shape[:axis], parts, shape[axis] // parts, *shape[axis + 1 :])
    widths = [(0, 0)] * split.ndim
    widths[axis + 1] = (0, missing)
    return jnp.pad(split, widths, mode=mode).reshape(*shape[:axis], -1, *shape[axis + 1 :])


def without_padding(x: jax.Array, parts: int, length: int, axis: int) -> jax.Array:
    """Undo `padded_parts` for an axis that had `length` elements."""
    if x.shape[axis] == length:
        return x
    shape = x.shape
    split = x.reshape(*shape[:axis], parts, shape[axis] // parts, *shape[axis + 1 :])
    kept = jax.lax.slice_in_dim(split, 0, length // parts, axis=axis + 1)
    return kept.reshape(*shape[:axis], length, *shape[axis + 1 :])
