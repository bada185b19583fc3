"""Which kernel computes a model's attention on a chip, and in which chunks: what `kernel="auto"` stands for."""

from dataclasses import replace

import jax.numpy as jnp

from ringformer.hardware import CHIPS, Chip
from ringformer.models.interface import ModelConfig
from ringformer.models.llama_config import LlamaConfig
from ringformer.ops.kernels.block_kernels import Kernel, check_kernel, check_shapes
from ringformer.ops.kernels.chunk_sizes import chunk_sizes
from ringformer.ops.kernels.kernel_tools import LANES

JUDGED = ("v4", "v5e", "v5p", "v6e")
"""The TPUs in whose machine code the kernels were counted, with heads of at most 128 features and `USUAL` chunks
(docs/performance.md)."""

USUAL, USUAL_HEAD = (1024, 1024), 128
"""Tokens of chunks of queries and keys that were not tuned, and the largest head that was counted with them."""
SMALLEST = 256
"""Queries of a chunk, at least, however many heads share its keys."""
ROWS, USUAL_ROWS = {"v4": 2048}, 8192
"""Queries of a chunk times the heads that share its keys: what fits the VMEM of v4, which has 16 MiB, with heads of at
most 128 features (larger ones: as many less), and of others."""


def with_kernel(
    model: ModelConfig, platform: str, chip: Chip | None, local_tokens: int, masks: bool = False
) -> tuple[ModelConfig, str]:
    """The model with a kernel that such devices have, and a line that says which, in which chunks, and why; nothing of
    a family that has no choice.

    auto is pallas on TPUs for which it was judged or its chunks were tuned (`ringformer tune`), in bfloat16; cudnn on
    GPUs, for what cuDNN can compute; else xla. Chunks of pallas that the model leaves open are the tuned ones, else
    1024 x 1024, at most an eighth of a rank's tokens, of fewer queries if heads share their keys.

    Args:
      platform: "cpu", "gpu" or "tpu". chip: None if it is none of `CHIPS`.
      local_tokens: of a sequence on a rank of the ring.
      masks: whether there are segment ids.

    Raises:
      ValueError: a kernel that the model names and that cannot compute it here, naming the one that can.
    """
    if not isinstance(model, LlamaConfig):
        return model, ""
    generation = next((name for name, known in CHIPS.items() if known is chip), "")
    kernel, why = _chosen(model, platform, generation, masks)
    if model.kernel != "auto":
        hint = f"; auto would be {kernel}" if model.kernel == "xla" != kernel else ""
        kernel, why = model.kernel, f"as configured{hint}"
    _check(model, kernel, platform, masks, chip)
    model = replace(model, kernel=kernel)
    if kernel == "pallas" and model.q_chunk is None and model.k_chunk is None:
        tuned = chunk_sizes(generation, model.head_dim)
        q_chunk, k_chunk = tuned or USUAL
        most = max(512, local_tokens // 8 // LANES * LANES)
        rows = USUAL_ROWS
        if generation in ROWS:
            rows = ROWS[generation] // -(-model.head_dim // USUAL_HEAD)
        shared = min(q_chunk, max(SMALLEST, rows * model.num_kv_heads // model.num_heads // LANES * LANES))
        model = replace(model, q_chunk=min(shared, most), k_chunk=min(k_chunk, most))
        how = f"tuned for {generation}" if tuned else "not tuned"
        why += f"; chunks of {model.q_chunk} queries and {model.k_chunk} keys, {how}"
    return model, f"kernel {kernel}: {why}"


def _chosen(model: LlamaConfig, platform: str, generation: str, masks: bool) -> tuple[Kernel, str]:
    """What auto stands for, and why."""
    wanted: Kernel
    if platform == "tpu":
        wanted = "pallas"
        if model.compute_dtype != "bfloat16":
            return "xla", f"kernel='pallas' was judged in bfloat16, not in {model.compute_dtype}"
        judged = generation in JUDGED and model.head_dim <= USUAL_HEAD
        if not judged and chunk_sizes(generation, model.head_dim) is None:
            return "xla", f"kernel='pallas' was not judged on {generation} with heads of {model.head_dim}"
    elif platform == "gpu":
        wanted = "cudnn"
    else:
        return "xla", f"there are kernels for TPU and GPU, none for {platform}"
    try:
        _check(model, wanted, platform, masks, CHIPS.get(generation))
    except ValueError as error:
        return "xla", str(error)
    return wanted, f"the fastest on {generation}"


def _check(model: LlamaConfig, kernel: Kernel, platform: str, masks: bool, chip: Chip | None) -> None:
    check_kernel(kernel, jnp.dtype(model.compute_dtype), platform)
    cores = chip.multiprocessors if chip else None
    check_shapes(kernel, model.head_dim, masks, cores.compute_capability if cores else None)
