"""Closed forms of a train step: seconds and bytes from counts alone, without a compiler. Every number is modelled."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from ringformer.estimate.seconds.overlap import Schedule
from ringformer.estimate.seconds.program_seconds import efficiency
from ringformer.estimate.workloads.link_rates import hop_rate
from ringformer.estimate.workloads.training import Workload
from ringformer.hardware import Chip
from ringformer.models.attention_options import attention_options
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.flops import (
    PAIR_BACKWARD,
    PAIR_FORWARD,
    PAIR_LOGITS_AGAIN,
    executed_attention_flops,
    executed_flops,
    forward_runs,
    keys_in_window,
)
from ringformer.models.layer_kinds import LayerKind
from ringformer.ops.head_exchange import key_copies
from ringformer.ops.layouts import Layout
from ringformer.ops.work_list import default_chunk
from ringformer.parallel.mesh import AXIS_NAMES
from ringformer.parallel.parameters import abstract_model, shard_weights
from ringformer.train.adafactor import sharded_matrices

CLOSED_FORM = "closed form"
"""Start of `StepTime.source` for seconds that are not based on a compiled program."""

LOGITS_ON_CHIP = {"v4": 32 * 2**20, "v5e": 32 * 2**20, "v6e": 32 * 2**20}
"""Largest float32 logits of a chunk pair, in bytes, that the TPU compiler keeps on the chip, by generation. In every
program compiled so far, larger logits spill to HBM. On other generations, all logits do."""

SPILLED = {"tpu": (3.4, 4.2), "gpu": (6.5, 11.0)}
"""HBM bytes per byte of a chunk pair's logits, (forward, backward), if the logits spill. They were read from compiled
programs: v5e for TPU, A100 for GPU. (The range on A100 is 5.2 to 8.0 forward, 9.7 to 12.2 backward.)"""

ATTENTION_BYTES = {"tpu": (8, 28), "gpu": (24, 24), "cudnn": (32, 24)}
"""Bytes of attention's backward pass by kind of chip, or kernel: for each element of the queries [T, H d] and, with a
ring, for each element of its keys, which are computed, sent and received at once with their float32 gradients."""

QK_NORM_BYTES = 8
"""Bytes more for each element of the queries that are normalised, beside cuDNN's arrays (Qwen3-32B in
results/larger_models.json)."""

ELEMENTWISE_BYTES = {"D": 220, "F": 60, "V": 16}
"""HBM bytes that a train step on a GPU moves outside of products and chunk pairs: of each token, for each of the D and
F features of each layer, and for each of the V logits. They were read from compiled steps of LLaMA 1B and 3B. On TPUs,
the share of the peak in products includes them."""

CUDNN_TILE = 128
"""Queries of a tile of cuDNN's attention, which computes whole tiles at both edges of a window (assumed)."""

VANILLA_BYTES = {"tpu": 8, "gpu": 12}
"""Bytes of vanilla attention for each element of its logits, by kind of chip."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the target."""

    compute: float
    exposed: float
    """Seconds of communication that the schedule leaves exposed, at the link's full rate."""
    tokens: int
    source: str = ""
    """Description of what `compute` is based on."""
    floor: float = 0.0
    """Lower bound (roofline): each instruction takes its FLOPs at the peak or its bytes, whichever is longer."""
    serial: float = 0.0
    """Upper bound: no data moves while an instruction computes, so both times add up."""
    host: float = 0.0
    """Seconds that a GPU waits for its host. The upper bound includes them, the lower bound does not."""

    @property
    def step(self) -> float:
        return self.compute + self.exposed + self.host

    @property
    def at_least(self) -> float:
        """Lower bound, exposed communication included."""
        return self.floor + self.exposed

    @property
    def at_most(self) -> float:
        """Upper bound, exposed communication included."""
        return self.serial + self.exposed + self.host

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step

    def days(self, tokens: float) -> float:
        """Return the days it takes to train on `tokens`."""
        return tokens / self.tokens_per_second / 86400


def step_time(schedule: Schedule, tokens: int) -> StepTime:
    """Return the time of a compiled step from its schedule."""
    seconds = schedule.seconds
    source = str(schedule.rates.efficiency)
    if seconds.counted:
        by = "machine code or HBM bytes" if schedule.rates.cycles else "HBM bytes"  # GPUs write no machine code
        source = f"{seconds.counted / seconds.overlapped:.0%} of the computation by {by}, the rest {source}"
    return StepTime(
        compute=seconds.overlapped,
        exposed=schedule.exposed_seconds,
        tokens=tokens,
        source=source,
        floor=seconds.floor,
        serial=seconds.busy + seconds.memory,
        host=schedule.host_seconds,
    )


def causal_excess(layout: Layout, local: int, ranks: int, chunk: int | None = None) -> float:
    """Return the number of query-key pairs that a ring's busiest ranks compute, relative to an equal share of the
    causal pairs.

    Every hop waits for its busiest rank, so an uneven layout costs up to 2. With m chunks per shard, a block that the
    mask cuts along its diagonal costs 1 + 1/m. A rank's own block is such a block; in the striped layout, every block
    is.
    """
    m = -(-local // (chunk or default_chunk(local)))
    cut = m * (m + 1) / 2
    visiting = {"zigzag": m * m / 2, "striped": cut, "contiguous": m * m}[layout]
    return (cut + (ranks - 1) * visiting) / (ranks * m * m / 2)


def computation_seconds(workload: Workload) -> float:
    """Seconds of one step's computation on its busiest devices, as if all communication were hidden."""
    model = workload.model
    target = workload.target
    each = workload.batch_size / target.num_devices  # a device's share of the work on one sequence
    flops = executed_flops(model, workload.seq_len, frozen=workload.lora.rank > 0)
    rest = (flops - executed_attention_flops(model, workload.seq_len)) * each
    share = efficiency(target.generation, model.kernel, model.head_dim)
    products = rest / (share.products * target.chip.flops(model.compute_dtype))
    return products + _elementwise_seconds(workload) + sum(attention_seconds(workload).values())


def _elementwise_seconds(workload: Workload) -> float:
    """Seconds of one step's work on a GPU outside of products and chunk pairs, which is bound by its memory."""
    model = workload.model
    target = workload.target
    if target.chip.kind != "gpu":
        return 0.0
    of_layer = ELEMENTWISE_BYTES["D"] * model.hidden_size + ELEMENTWISE_BYTES["F"] * model.intermediate_size
    of_token = model.num_layers * of_layer + ELEMENTWISE_BYTES["V"] * model.vocab_size
    tokens = workload.step_tokens / target.num_devices
    share = efficiency(target.generation, model.kernel, model.head_dim)
    return tokens * of_token / (share.memory * target.chip.hbm_bandwidth)


def attention_seconds(workload: Workload) -> dict[str, float]:
    """Seconds of one step's chunk pairs on its busiest devices: "forward", each time that it runs, and "backward"."""
    sums = {"forward": 0.0, "backward": 0.0}
    for window, layers in workload.windows.items():
        for name, seconds in window_seconds(workload, window, layers).items():
            sums[name] += seconds
    return sums


def window_seconds(workload: Workload, window: int, layers: int) -> dict[str, float]:
    """Return the part of `attention_seconds` of the layers with a window, 0 for full attention."""
    model = workload.model
    target = workload.target
    T = workload.seq_len
    peak = target.chip.flops(model.compute_dtype)
    _, forwards = forward_runs(model)
    ranks = workload.ring_size
    tokens = workload.ring_tokens
    kind = LayerKind(window)
    options = attention_options(model, kind, tokens, documents=workload.masks, parts=workload.parts)
    if window:
        chunk = options["q_chunk"] or default_chunk(workload.ring_tokens)
        if options["kernel"] == "cudnn":
            chunk = CUDNN_TILE
        excess = 1 + chunk / window
    else:
        excess = causal_excess(model.layout, T // ranks, ranks, model.q_chunk)
    visible = layers * model.num_heads * T * keys_in_window(window, T) * workload.batch_size / target.num_devices
    parts = {  # passes, FLOPs in all
        "forward": (forwards, PAIR_FORWARD * forwards),
        "backward": (1, PAIR_BACKWARD + PAIR_LOGITS_AGAIN),
    }
    assumed = efficiency(target.generation, options["kernel"], model.head_dim)
    shares = {"forward": assumed.forward, "backward": assumed.backward}
    seconds = {}
    pairs = excess * visible  # of queries, keys, heads
    for (name, (passes, flops)), spilled in zip(parts.items(), SPILLED[target.chip.kind], strict=True):
        memory = 0.0
        if not _logits_on_chip(workload, options):
            memory = 4 * spilled * passes * pairs / (assumed.memory * target.chip.hbm_bandwidth)
        seconds[name] = max(flops * model.head_dim * pairs / (shares[name] * peak), memory)
    return seconds


def computation_time(workload: Workload) -> StepTime:
    """Return the time of a step's computation by the closed form, as if all communication were hidden."""
    assumed = efficiency(workload.target.generation, workload.model.kernel, workload.model.head_dim)
    spilling = "" if workload.model.kernel != "xla" else ", and logits that spill at the memory's rate"
    return StepTime(computation_seconds(workload), 0.0, workload.step_tokens, f"{CLOSED_FORM}: {assumed}{spilling}")


def _logits_on_chip(workload: Workload, options: dict[str, Any]) -> bool:
    """Return True if the logits of one chunk pair stay on the chip, counting all heads that are computed at once.
    `options`: kernel and chunks of the pair."""
    if options["kernel"] != "xla":
        return True
    model = workload.model
    _, _, tp, _ = workload.mesh_shape
    usual = default_chunk(workload.seq_len // workload.ring_size)
    pair = (options["q_chunk"] or usual) * (options["k_chunk"] or usual)
    heads = model.num_heads / (tp * model.ulysses * model.head_groups)
    return 4 * pair * heads <= LOGITS_ON_CHIP.get(workload.target.generation, 0)


def hop_flops(model: DecoderConfig, local: int, *, backward: bool, causal: bool = True) -> float:
    """Attention FLOPs of one device in one hop of a balanced ring, with `local` tokens of one sequence per device.

    Each visible pair of a query and a key takes 4 d FLOPs forward (two products) and 10 d FLOPs backward (five
    products). A causal mask leaves half of the pairs visible.
    """
    pairs = local * local * (0.5 if causal else 1.0)
    each = PAIR_BACKWARD + PAIR_LOGITS_AGAIN if backward else PAIR_FORWARD
    return float(each) * model.head_dim * model.num_heads * pairs


def hop_bytes(model: DecoderConfig, local: int, *, backward: bool) -> float:
    """Bytes that a device sends in one hop: keys and values, plus their float32 gradients in the backward pass."""
    return 2.0 * local * model.num_kv_heads * model.head_dim * (itemsize(model) + 4 * backward)


@dataclass(frozen=True)
class Hop:
    """One hop of the ring on one device, at the peak rates of the device and the link."""

    flops: float
    bytes: float
    compute: float
    """Seconds of computation."""
    link: float
    """Seconds of transfer."""

    @property
    def intensity(self) -> float:
        """FLOPs per byte on the link."""
        return self.flops / self.bytes


def ring_hops(workload: Workload) -> dict[str, Hop]:
    """Return one hop of the ring for each of the keys "forward" and "backward"; empty if no keys hop from rank to
    rank."""
    model = workload.model
    target = workload.target
    tp = workload.mesh_shape[2]
    if 0 not in workload.windows or workload.hops(0) == 0:
        return {}
    hops = {}
    devices = tp * model.ulysses  # that share the heads
    for name in ("forward", "backward"):
        backward = name == "backward"
        flops = hop_flops(model, workload.ring_tokens, backward=backward) / devices
        sent = hop_bytes(model, workload.ring_tokens, backward=backward) * held_copies(workload) / devices
        hops[name] = Hop(flops, sent, flops / target.chip.flops(model.compute_dtype), sent / hop_rate(workload))
    return hops


def held_copies(workload: Workload) -> int:
    """Return the copies of each key head that an exchange of heads makes."""
    model = workload.model
    tp = workload.mesh_shape[2]
    return key_copies(model.ulysses, max(1, model.num_kv_heads // tp // model.head_groups))


def held_key_heads(workload: Workload) -> int:
    """Return the key heads that a device computes at once, copies included."""
    return workload.model.held_key_heads(workload.mesh_shape[2])


def smallest_local_length(model: DecoderConfig, chip: Chip, *, causal: bool = True, backward: bool = False) -> float:
    """Return the smallest local length at which a hop's computation takes as long as its transfer (paper, Table 2).

    The paper's column, F/B, is for the forward without a mask. A balanced causal ring needs 2 (K/H) F/B forward. It
    needs 2.4 (K/H) F/B backward, where it also sends float32 gradients.
    """
    seconds = hop_bytes(model, 1, backward=backward) / chip.link_bandwidth
    return seconds * chip.bf16_flops / hop_flops(model, 1, backward=backward, causal=causal)


def host_bytes(workload: Workload) -> float:
    """Bytes of offloaded activations, state and gradients in host memory, per device. Gradients of the embedding and of
    the head are sent when all layers are done, and take the place of their activations."""
    model = workload.model
    activations = model.offloaded_bytes(workload.local_tokens)
    gradients = offloaded_gradients(workload)
    outside = gradients * 2 * model.vocab_size * model.hidden_size / workload.trained_params
    return activations + gradients - min(activations, outside) + offloaded_state(workload)


def offloaded_state(workload: Workload) -> float:
    """Bytes of a device's shards of the state that are in host memory."""
    offloaded = 0.0
    if workload.optimizer.offloads("moments"):
        offloaded += moment_bytes(workload)
    if workload.weights_in_host:
        offloaded += weight_bytes(workload)
    return offloaded


def offloaded_gradients(workload: Workload) -> float:
    """Bytes of a device's shards of the gradients that are in host memory."""
    return workload.gradients_in_host * gradient_bytes(workload)


def gradient_bytes(workload: Workload) -> float:
    """Bytes of a device's shards of the float32 gradients."""
    return 4 * workload.trained_params / workload.state_shards


def weight_bytes(workload: Workload) -> float:
    """Bytes of a device's shards of the parameters that train, between steps; vectors, which are float32, are not
    counted apart."""
    return jnp.dtype(workload.optimizer.params_dtype).itemsize * workload.trained_params / workload.state_shards


def moment_bytes(workload: Workload) -> float:
    """Bytes of a device's shards of the optimizer's moments, or of Adafactor's statistics."""
    if workload.optimizer.name == "adafactor":
        return statistics_bytes(workload)
    each = sum(jnp.dtype(dtype).itemsize for dtype in workload.optimizer.moment_dtypes)
    return each * workload.trained_params / workload.state_shards


@lru_cache(maxsize=64)
def statistics_bytes(workload: Workload) -> int:
    """Bytes of a device's shards of Adafactor's statistics, padding included: 4 for each row and each column of each
    layer's matrices."""
    mesh = AbstractMesh(workload.mesh_shape, AXIS_NAMES)
    if workload.lora.rank:
        shapes, letters = workload.lora.shapes(workload.model)
    else:
        _, shapes, letters = abstract_model(workload.model)
    statistics = 0
    for matrix in sharded_matrices(letters, shard_weights(shapes, letters, mesh)).values():
        rows = math.prod(matrix.sharding.shard_size(dim, mesh) for dim in matrix.layout.rows)
        columns = math.prod(matrix.sharding.shard_size(dim, mesh) for dim in matrix.layout.columns)
        statistics += matrix.layers * (rows + columns)
    return 4 * statistics


def state_bytes(workload: Workload) -> float:
    """Bytes of a device's shards of the training state: parameters that train, and their moments."""
    return weight_bytes(workload) + moment_bytes(workload)


def memory(workload: Workload) -> dict[str, float]:
    """Bytes of device memory of a train step, by purpose.

    Kept inputs and state are exact. The arrays alive at the peak of a layer's backward pass were fitted to compiled
    programs (results/max_context.json): 7 of [T, D] in the compute dtype, and `ATTENTION_BYTES` for each element of
    the queries [T, H d], divided by the number of head groups. Those are float32 in every compute dtype.
    """
    model = workload.model
    target = workload.target
    local = workload.local_tokens
    tp = workload.mesh_shape[2]
    D = model.hidden_size
    F = model.intermediate_size
    V = model.vocab_size
    item = itemsize(model)
    stream = local * D * item
    layer = (2 * D * model.head_dim * (model.num_heads + model.num_kv_heads) + 3 * D * F) / tp
    of_layer = sum(model.kept_bytes(local))
    here = model.kept_bytes_of_layers(local)
    if model.offload:
        here = model.fetch_ahead * of_layer
    groups, _ = model.remat_groups
    if groups:
        here += model.remat_group * of_layer
    of_queries, of_keys = ATTENTION_BYTES["cudnn" if model.kernel == "cudnn" else target.chip.kind]
    keys = of_keys * model.num_kv_heads / model.num_heads if workload.mesh_shape[3] > 1 else 0
    queries = local * model.num_heads * model.head_dim
    if model.kernel == "cudnn" and model.PARTS.qk_norm:
        of_queries += QK_NORM_BYTES
    working = 7 * stream + (of_queries + keys) * queries / model.head_groups
    chunks = (model.q_chunk or 0) * (model.k_chunk or 0)
    usual = default_chunk(local) ** 2
    if chunks:  # float32 p, its gradient and the logits: the difference from the fitted chunks
        working += 12 * model.num_heads / tp / model.head_groups * (chunks - usual)
    if model.attention in ("vanilla", "memory_efficient"):
        working += 4 * item * local * F / tp
    if model.attention == "vanilla":
        working += VANILLA_BYTES[target.chip.kind] * model.num_heads / tp * local * local
    gathered = 0.0
    # Keys of all ranks, with float32 gradients.
    if model.ring == "gathered" and workload.ring_size > 1 and 0 in workload.windows:
        gathered = hop_bytes(model, 1, backward=True) * local * workload.mesh_shape[3] * held_copies(workload)
        gathered /= model.ulysses * model.head_groups
    # Gradients and as much for the update; as much again for the sum of the microbatch gradients.
    gradients = (3 if workload.accumulate > 1 else 2) * gradient_bytes(workload)
    if workload.weights_in_host:
        # Copies in the narrower dtype; nothing of the update is as large as the parameters.
        copies = weight_bytes(workload) * min(1, item / jnp.dtype(workload.optimizer.params_dtype).itemsize)
        gradients += copies - gradient_bytes(workload)
    of_state = state_bytes(workload) + gradients + workload.frozen_bytes / workload.state_shards
    of_state -= offloaded_state(workload) + offloaded_gradients(workload)
    return {
        "kept layer inputs": here,
        "working set of a layer": working,
        "gathered keys": gathered,
        "weights of a layer, their gradients, embedding gradient": (item + 4) * layer
        + 4 * V * D * (not workload.lora.rank),
        "parameters, optimizer and gradients": of_state,
    }


ADVICE = {
    "kept layer inputs": "--remat_group (two levels), --offload, or more devices on sp",
    "working set of a layer": "--head_groups, or more devices on sp",
    "gathered keys": "--ring=one_way, or more heads exchanged (--ulysses)",
    "weights of a layer, their gradients, embedding gradient": "tp",
    "parameters, optimizer and gradients": "--optimizer_offload, adapters, or more devices on fsdp or sp",
}
"""Settings that reduce each part of `memory`."""

WITHOUT_OFFLOAD = {"parameters, optimizer and gradients": "adapters, or more devices on fsdp or sp"}
"""Settings that replace some of `ADVICE` with an optimizer whose state cannot be offloaded."""


def peak_bytes(workload: Workload) -> float:
    """Sum up `memory`. The sum ranks workloads before compilation, and is the estimate if there is no compiler."""
    return sum(memory(workload).values())


def itemsize(model: DecoderConfig) -> int:
    """Bytes of an element in the compute dtype."""
    return 2 if model.compute_dtype == "bfloat16" else 4
