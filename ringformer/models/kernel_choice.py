"""Which kernel computes a model's attention on a chip, and in which chunks: what `kernel="auto"` stands for."""

from dataclasses import replace

import jax.numpy as jnp

from ringformer.hardware import CHIPS, Chip
from ringformer.models.interface import ModelConfig
from ringformer.models.llama_config import LlamaConfig
from ringformer.ops.kernels.block_kernels import Kernel, check_kernel, check_shapes
from ringformer.ops.kernels.chunk_sizes import chunk_sizes
from ringformer.ops.kernels.flash_attention import vmem_bytes
from ringformer.ops.kernels.kernel_tools import LANES

JUDGED = ("v4", "v5e", "v5p", "v6e")
"""The TPUs in whose machine code the kernels were counted, with heads of at most 128 features and `USUAL` chunks
(docs/performance.md)."""

USUAL, USUAL_HEAD = (1024, 1024), 128
"""Tokens of chunks of queries and keys that were not tuned, and the largest head that was counted with them."""
FEWEST = 256
"""Queries or keys of a chunk, at least, where larger ones do not fit a chip."""
VMEM = 16 * 2**20
"""On-chip memory of a TPU that is none of `CHIPS`: that of the smallest."""


def with_kernel(
    model: ModelConfig, platform: str, chip: Chip | None, local_tokens: int, masks: bool = False
) -> tuple[ModelConfig, str]:
    """The model with a kernel that such devices have, and a line that says which, in which chunks, and why; nothing of
    a family that has no choice.

    auto is pallas on TPUs for which it was judged or its chunks were tuned (`ringformer tune`), in bfloat16; cudnn on
    GPUs, for what cuDNN can compute; else xla. Chunks of pallas that the model leaves open are the tuned ones, else
    1024 x 1024, at most an eighth of a rank's tokens, halved until the kernels fit the chip's VMEM.

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
        (q_chunk, k_chunk), how = _chunks(model, generation, chip, local_tokens)
        model = replace(model, q_chunk=q_chunk, k_chunk=k_chunk)
        why += f"; chunks of {q_chunk} queries and {k_chunk} keys, {how}"
    return model, f"kernel {kernel}: {why}"


def _chosen(model: LlamaConfig, platform: str, generation: str, masks: bool) -> tuple[Kernel, str]:
    """What auto stands for, and why."""
    wanted: Kernel
    if platform == "tpu":
        wanted = "pallas"
    elif platform == "gpu":
        wanted = "cudnn"
    else:
        return "xla", f"there are kernels for TPU and GPU, none for {platform}"
    try:
        _check(model, wanted, platform, masks, CHIPS.get(generation))
    except ValueError as error:
        return "xla", str(error)
    if wanted == "pallas" and model.compute_dtype != "bfloat16":
        return "xla", f"kernel='pallas' was judged in bfloat16, not in {model.compute_dtype}"
    judged = generation in JUDGED and model.head_dim <= USUAL_HEAD
    if wanted == "pallas" and not judged and chunk_sizes(generation, model.head_dim) is None:
        return "xla", f"kernel='pallas' was not judged on {generation} with heads of {model.head_dim}"
    return wanted, f"the fastest on {generation}"


def _chunks(model: LlamaConfig, generation: str, chip: Chip | None, local_tokens: int) -> tuple[tuple[int, int], str]:
    """Tokens of chunks of queries and of keys, and where they come from. Of what is too large for the chip's VMEM the
    queries are halved first, whose arrays grow with the heads that share a key head."""
    tuned = chunk_sizes(generation, model.head_dim)
    most = max(512, local_tokens // 8 // LANES * LANES)
    q_chunk, k_chunk = (min(n, most) for n in tuned or USUAL)
    while q_chunk > FEWEST and not _fits(model, chip, q_chunk, k_chunk):
        q_chunk = max(FEWEST, q_chunk // 2 // LANES * LANES)
    while k_chunk > FEWEST and not _fits(model, chip, q_chunk, k_chunk):
        k_chunk = max(FEWEST, k_chunk // 2 // LANES * LANES)
    return (q_chunk, k_chunk), f"tuned for {generation}" if tuned else "not tuned"


def _fits(model: LlamaConfig, chip: Chip | None, q_chunk: int, k_chunk: int) -> bool:
    heads, dtype = model.num_heads // model.num_kv_heads, jnp.dtype(model.compute_dtype)
    return vmem_bytes(heads, model.head_dim, (q_chunk, k_chunk), dtype) <= _vmem(chip)


def _vmem(chip: Chip | None) -> int:
    return chip.tensor_cores.vmem_bytes if chip and chip.tensor_cores else VMEM


def _check(model: LlamaConfig, kernel: Kernel, platform: str, masks: bool, chip: Chip | None) -> None:
    check_kernel(kernel, jnp.dtype(model.compute_dtype), platform, chip)
    cores = chip.multiprocessors if chip else None
    check_shapes(kernel, model.head_dim, masks, cores.compute_capability if cores else None)
    if kernel == "pallas" and not _fits(model, chip, FEWEST, FEWEST):
        raise ValueError(
            f"kernel='pallas' does not fit {_vmem(chip) / 2**20:.0f} MiB of on-chip memory with "
            f"{model.num_heads // model.num_kv_heads} query heads a key head of {model.head_dim} features; "
            "kernel='xla' does"
        )
