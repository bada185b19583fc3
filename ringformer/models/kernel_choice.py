"""Choice of the attention kernel and its chunks for a chip: the meaning of `kernel="auto"`."""

from dataclasses import replace

import jax.numpy as jnp

from ringformer.hardware import CHIPS, Chip
from ringformer.models.attention_options import kernel_of
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.interface import ModelConfig
from ringformer.ops.kernels.block_kernels import (
    Kernel,
    check_both_ways,
    check_head_size,
    check_kernel,
    check_masks,
    window_fault,
)
from ringformer.ops.kernels.chunk_sizes import chunk_sizes
from ringformer.ops.kernels.flash_attention import vmem_bytes
from ringformer.ops.kernels.kernel_tools import LANES
from ringformer.ops.layouts import PARTS
from ringformer.ops.work_list import default_chunk

JUDGED = ("v4", "v5e", "v5p", "v6e")
"""Generations of TPU for which the kernels' machine code was evaluated (docs/performance.md), with heads of at most 128
features and `USUAL` chunks."""

USUAL = (1024, 1024)
USUAL_HEAD = 128
"""Tokens of untuned chunks of queries and of keys, and the largest head size that was evaluated with these chunks."""
FEWEST = 256
"""Fewest queries or keys of a chunk to which larger chunks are halved if they do not fit a chip."""
CPU_CHUNK = 256
"""Most queries and keys of a chunk on CPUs, unless the model sets chunks. Attention over 16,384 tokens took half of the
CPU-seconds that chunks of 1,024 took, over 4,096 tokens two thirds (float32, 4 heads of 64)."""
VMEM = 16 * 2**20
"""Bytes of on-chip memory to assume for a TPU that is not in `CHIPS`: the least of all TPUs."""


def with_kernel(
    model: ModelConfig,
    platform: str,
    chip: Chip | None,
    local_tokens: int,
    masks: bool = False,
    ring_size: int = 1,
    tp: int = 1,
) -> tuple[ModelConfig, str]:
    """Choose the kernel and chunks of a model for a device; also return a line with the choice and its reason, empty
    for families without a choice.

    auto means pallas in bfloat16 on TPUs for which it was evaluated or tuned (`ringformer tune`), cudnn on GPUs if
    cuDNN can compute the model, and xla otherwise. If the model sets no chunks for pallas, this chooses the tuned ones,
    or else 1024 x 1024; it limits them to `_largest_chunk`, and halves them until the kernels fit the chip's VMEM.
    On CPUs, chunks that the model does not set have at most `CPU_CHUNK` tokens.

    Args:
      platform: "cpu", "gpu" or "tpu". chip: None if it is not in `CHIPS`.
      local_tokens: tokens of a sequence on a rank of the ring.
      masks: True if there are segment ids, which then ascend (`ringformer.data`).
      ring_size: ranks of the ring. tp: devices that share the heads.

    Raises:
      ValueError: the model names a kernel that cannot compute it on this device; the message names one that can.
    """
    if not isinstance(model, DecoderConfig):
        return model, ""
    generation = next((name for name, each in CHIPS.items() if each is chip), "")
    halves = None
    if model.ring == "both_ways" and ring_size > 1 and 0 in model.windows:
        halves = model.held_key_heads(tp)
    parts = model.sequence_parts(ring_size)
    kernel, why = _chosen(model, platform, generation, masks, halves, local_tokens, parts)
    if model.kernel != "auto":
        why = "as configured"
        if model.kernel == "xla" != kernel:
            why += f"; auto would be {kernel}"
        kernel = model.kernel
    _check(model, kernel, platform, masks, chip, halves, local_tokens, parts)
    model = replace(model, kernel=kernel)
    if kernel == "pallas" and model.q_chunk is None and model.k_chunk is None:
        most = _largest_chunk(model, local_tokens, ring_size)
        (q_chunk, k_chunk), how = _chunks(model, generation, chip, most)
        model = replace(model, q_chunk=q_chunk, k_chunk=k_chunk)
        why += f"; chunks of {q_chunk} queries and {k_chunk} keys, {how}"
    no_chunks = model.q_chunk is None and model.k_chunk is None
    if platform == "cpu" and no_chunks and default_chunk(local_tokens) > CPU_CHUNK:
        model = replace(model, q_chunk=CPU_CHUNK, k_chunk=CPU_CHUNK)
        why += f"; chunks of {CPU_CHUNK} queries and keys, the fastest on CPUs"
    if model.window and kernel_of(model, model.window, local_tokens, masks, parts) != kernel:
        why += f"; xla computes the {model.windows[model.window]} layers with a window"
    return model, f"kernel {kernel}: {why}"


def _chosen(
    model: DecoderConfig,
    platform: str,
    generation: str,
    masks: bool,
    halves: int | None,
    local_tokens: int,
    parts: int,
) -> tuple[Kernel, str]:
    """Resolve auto to a kernel, with the reason."""
    wanted: Kernel
    if platform == "tpu":
        wanted = "pallas"
    elif platform == "gpu":
        wanted = "cudnn"
    else:
        return "xla", f"there are kernels for TPU and GPU, none for {platform}"
    try:
        _check(model, wanted, platform, masks, CHIPS.get(generation), halves, local_tokens, parts)
    except ValueError as error:
        return "xla", str(error)
    if wanted == "pallas" and model.compute_dtype != "bfloat16":
        return "xla", f"kernel='pallas' was judged in bfloat16, not in {model.compute_dtype}"
    judged = generation in JUDGED and model.head_dim <= USUAL_HEAD
    if wanted == "pallas" and not judged and chunk_sizes(generation, model.head_dim) is None:
        return "xla", f"kernel='pallas' was not judged on {generation} with heads of {model.head_dim}"
    return wanted, f"the fastest on {generation}"


def _largest_chunk(model: DecoderConfig, local_tokens: int, ring_size: int) -> int:
    """Return the most tokens of a chunk.

    A query needs half of the sequence on average, and the diagonal of its own block wastes half a chunk. So chunks of
    an eighth of the sequence waste an eighth; a chunk larger than a part of the shard would waste more. A window wastes
    a chunk per query, so its chunks are a quarter of it.
    """
    most = min(local_tokens // PARTS[model.layout], ring_size * local_tokens // 8)
    if 0 not in model.windows:
        most = min(most, model.window // 4)
    return max(512, most // LANES * LANES)


def _chunks(model: DecoderConfig, generation: str, chip: Chip | None, most: int) -> tuple[tuple[int, int], str]:
    """Choose the tokens of chunks of queries and of keys, and name their source. Chunks that are too large for the
    chip's VMEM are halved. Chunks of queries come first, because their arrays grow with the number of heads that share
    a key head."""
    tuned = chunk_sizes(generation, model.head_dim)
    q_chunk, k_chunk = (min(n, most) for n in tuned or USUAL)
    while q_chunk > FEWEST and not _fits(model, chip, q_chunk, k_chunk):
        q_chunk = max(FEWEST, q_chunk // 2 // LANES * LANES)
    while k_chunk > FEWEST and not _fits(model, chip, q_chunk, k_chunk):
        k_chunk = max(FEWEST, k_chunk // 2 // LANES * LANES)
    source = f"tuned for {generation}" if tuned else "not tuned"
    return (q_chunk, k_chunk), source


def _fits(model: DecoderConfig, chip: Chip | None, q_chunk: int, k_chunk: int) -> bool:
    heads = model.num_heads // model.num_kv_heads
    dtype = jnp.dtype(model.compute_dtype)
    return vmem_bytes(heads, model.head_dim, (q_chunk, k_chunk), dtype) <= _vmem(chip)


def _vmem(chip: Chip | None) -> int:
    if chip is None or chip.tensor_cores is None:
        return VMEM
    return chip.tensor_cores.vmem_bytes


def _check(
    model: DecoderConfig,
    kernel: Kernel,
    platform: str,
    masks: bool,
    chip: Chip | None,
    halves: int | None,
    local_tokens: int,
    parts: int,
) -> None:
    """Raise ValueError if a kernel cannot compute the model; XLA may compute some layers with a window in its place,
    but not all layers. `halves`: key heads of which half travel each way; None: none do. `parts`: parts that all ranks
    have of a sequence."""
    check_kernel(kernel, jnp.dtype(model.compute_dtype), platform, chip)
    capability = None
    if chip is not None and chip.multiprocessors is not None:
        capability = chip.multiprocessors.compute_capability
    check_head_size(kernel, model.head_dim, capability)
    check_masks(kernel, "ascending" if masks else None, model.layout)
    if model.window and 0 not in model.windows:
        computes = kernel_of(replace(model, kernel=kernel), model.window, local_tokens, masks, parts)
        if computes != kernel:
            raise ValueError(window_fault(kernel, model.window, local_tokens // PARTS[model.layout], masks))
    if halves is not None:
        check_both_ways(kernel, halves)
    if kernel == "pallas" and not _fits(model, chip, FEWEST, FEWEST):
        raise ValueError(
            f"kernel='pallas' does not fit {_vmem(chip) / 2**20:.0f} MiB of on-chip memory with "
            f"{model.num_heads // model.num_kv_heads} query heads a key head of {model.head_dim} features; "
            "kernel='xla' does"
        )
