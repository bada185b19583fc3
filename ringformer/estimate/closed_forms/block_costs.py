"""Closed form of the seconds that blocks of attention take beyond their FLOPs."""

import math

from ringformer.estimate.closed_forms.training import attention_seconds, held_key_heads, itemsize
from ringformer.estimate.seconds.program_seconds import efficiency
from ringformer.estimate.workloads.training import Workload
from ringformer.models.attention_options import attention_options, kernel_of
from ringformer.models.flops import forward_runs, keys_in_window
from ringformer.models.layer_kinds import LayerKind
from ringformer.ops.kernels.chunk_sizes import chunk_sizes
from ringformer.ops.layouts import PARTS

CYCLES_OF_A_PAIR = 400
"""Cycles of a core for each chunk pair of the kernels for TPU, beyond those of its products. Fitted to compiled steps
with chunks of 512 and 1024: LLaMA-3 8B has 380 at 128K on v5e-16, and 380 to 730 at 64K on v5p-128."""


def block_seconds(workload: Workload) -> float:
    """Seconds that the blocks of a step take beyond the FLOPs of their products.

    The kernels for TPU take some cycles more for each chunk pair, and short shards have small chunks; the TensorCores
    of a chip may have unequal shares of the work. On GPUs, each block's output is added to a float32 accumulator (o, or
    dq) in device memory.
    """
    model = workload.model
    target = workload.target
    passes = forward_runs(model)[1] + 1
    chip = target.chip
    if model.kernel == "cudnn":
        blocks = sum(_added_blocks(workload, window) * layers for window, layers in workload.windows.items())
        rows = model.ulysses * workload.local_tokens * workload.accumulate
        features = model.num_heads * model.head_dim / model.ulysses
        rate = efficiency(target.generation, model.kernel, model.head_dim).memory * chip.hbm_bandwidth
        return (itemsize(model) + 8) * passes * blocks * rows * features / rate
    if model.kernel != "pallas" or chip.tensor_cores is None or not (model.q_chunk and model.k_chunk):
        return 0.0
    tuned = chunk_sizes(target.generation, model.head_dim) or (model.q_chunk, model.k_chunk)
    queries = workload.batch_size * workload.seq_len / target.num_devices
    seconds = 0.0
    for window, layers in workload.windows.items():
        tokens = workload.ring_tokens
        kind = LayerKind(window)
        options = attention_options(model, kind, tokens, documents=workload.masks, parts=workload.parts)
        chunks = options["q_chunk"] * options["k_chunk"]
        visible = queries * keys_in_window(window, workload.seq_len)
        pairs = passes * visible / chunks * model.num_heads * layers
        more = max(0.0, 1 - chunks / math.prod(tuned))  # `efficiency` is based on the tuned chunks
        seconds += CYCLES_OF_A_PAIR * pairs * more / (chip.clock_hz * chip.tensor_cores.count)
    return seconds + sum(attention_seconds(workload).values()) * (_core_share(workload) - 1)


def _added_blocks(workload: Workload, window: int) -> float:
    """Count the blocks of a layer that are added to an accumulator by cuDNN's calls; those of a window are a shard, and
    the first tokens of each part."""
    model = workload.model
    if window == 0:
        return min(2, workload.ring_size) if model.ring == "gathered" else workload.ring_size
    tokens = workload.ring_tokens
    if kernel_of(model, window, tokens, workload.masks, workload.parts) != "cudnn":
        return 0
    return 1 + PARTS[model.layout] * window / tokens


def _core_share(workload: Workload) -> float:
    """Return the work of the busier TensorCore of a chip, relative to an equal share: the cores divide the sequences or
    the key heads that a device holds at once. The kernels cut the query heads of a key head in two if their number is
    even and the grid would be odd; otherwise, a single head of a single sequence leaves one of two cores idle."""
    model = workload.model
    tp = workload.mesh_shape[2]
    cores = workload.target.chip.tensor_cores
    heads = held_key_heads(workload)
    divisor = tp * model.head_groups * model.ulysses
    sequences = workload.sequences_at_once
    if heads * sequences % 2 and model.num_heads // divisor // heads % 2 == 0:
        heads *= 2
    count = cores.count if cores else 1
    return min(count * math.ceil(n / count) / n for n in (heads, sequences))
