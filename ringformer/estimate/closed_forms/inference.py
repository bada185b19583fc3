"""Closed forms of inference: bytes, the lower bound of a token's time, and what to compile first."""

from functools import lru_cache
from typing import Any

import jax
from jax.sharding import AbstractMesh

from ringformer.estimate.closed_forms.training import itemsize
from ringformer.estimate.seconds.program_seconds import efficiency
from ringformer.estimate.workloads.inference import InferenceWorkload
from ringformer.inference.cache.chunk_attention import cheaper_to_move
from ringformer.inference.weight_shares import weight_shares
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.flops import PAIR_FORWARD, visible_keys, working_params
from ringformer.parallel.host_memory import device_bytes
from ringformer.parallel.mesh import AXIS_NAMES


def weight_bytes(workload: InferenceWorkload) -> int:
    """Bytes of a device's shares of the weights."""
    return sum(jax.tree.leaves(_weight_bytes(workload.model, workload.mesh_shape)))


def cache_bytes(workload: InferenceWorkload) -> int:
    """Bytes of a device's share of the keys and values: 2 L B S K d elements, split over sp, and over tp up to the
    number of key heads; with int8, 2 L B S K scales more."""
    m = workload.model
    dp, _, tp, _ = workload.mesh_shape
    slots = workload.batch_size // dp * workload.sizes.capacity
    entry = m.head_dim + 4 if workload.cache_dtype == "int8" else m.head_dim * itemsize(m)
    return 2 * m.num_layers * slots * max(1, m.num_kv_heads // tp) * entry


def floor_seconds(workload: InferenceWorkload) -> float:
    """Lower bound of the seconds that one token in every row takes: cache and weights are read once, at the memory's
    rate. Only the tokens' rows of the embedding are read, unless it is also the output head."""
    read = weight_bytes(workload) + cache_bytes(workload)
    if not workload.model.tie_embeddings:
        read -= _weight_bytes(workload.model, workload.mesh_shape)["embed"]
    return read / workload.target.chip.hbm_bandwidth


def prefill_memory(workload: InferenceWorkload) -> dict[str, float]:
    """Bytes on a device during the prefill of a context's last chunk, by purpose.

    Weights, cache and new keys are exact (without chunks, keys are computed directly in the cache). The number of a
    layer's arrays that are alive at once was read from compiled programs.
    """
    m = workload.model
    dp, _, tp, sp = workload.mesh_shape
    item = itemsize(m)
    rows = workload.batch_size // dp
    local = rows * workload.chunk // sp
    heads = m.num_heads // tp
    key_heads = max(1, m.num_kv_heads // tp)
    layer = m.hidden_size * m.head_dim * 2 * (heads + key_heads) + 3 * m.hidden_size * m.intermediate_size / tp
    new = queries = at_once = 0
    if workload.chunks > 1:
        new = 2 * m.num_layers * local * key_heads * m.head_dim * item
        at_once = 2 * max(_window_bytes(workload, window) for window in workload.windows)  # gathered, and in order
        if 0 in workload.windows:
            at_once = max(at_once, 2 * rows * workload.sizes.piece * key_heads * m.head_dim * item)
    if _queries_travel(workload):
        queries = rows * workload.chunk * heads * (m.head_dim * (item + 8) + 12)
    return {
        "weights": weight_bytes(workload),
        "cache": cache_bytes(workload),
        "keys and values of the chunk, before they are in the cache": new,
        "keys and values that are read at once": at_once,
        "weights of a layer, gathered": 2 * item * layer,
        "activations of a layer": local * m.hidden_size * item * 8,
        "queries of the chunk on their way": queries,
    }


def prefill_peak(workload: InferenceWorkload) -> float:
    """Sum of `prefill_memory`."""
    return sum(prefill_memory(workload).values())


def prefill_flops(workload: InferenceWorkload) -> tuple[float, float]:
    """Model FLOPs of a whole context's prefill: of the products with weights, and of attention's pairs."""
    m = workload.model
    tokens = workload.batch_size * workload.seq_len
    pairs = tokens * visible_keys(m, workload.seq_len) * m.num_heads * m.head_dim * m.num_layers
    return 2 * tokens * _read_params(m), PAIR_FORWARD * pairs


def _read_params(model: DecoderConfig) -> float:
    """Parameters that every token meets: all but the head's, because only the last token's logits are computed."""
    return working_params(model) - model.vocab_size * model.hidden_size


def prefill_seconds(workload: InferenceWorkload) -> float:
    """Seconds of a whole context's prefill, from FLOPs at the usual shares of the peak and from the bytes that each
    layer moves for a chunk. Only the ring's transfers count as hidden."""
    m = workload.model
    target = workload.target
    dp, _, tp, sp = workload.mesh_shape
    only_windows = 0 not in m.windows
    kernel = "xla" if m.kernel == "cudnn" and only_windows else m.kernel  # XLA computes the windows of later chunks
    share = efficiency(target.generation, kernel, m.head_dim)
    item = itemsize(m)
    rows = workload.batch_size // dp
    shared = tp * sp  # fsdp does not split work
    weights = _read_params(m)
    products, pairs = prefill_flops(workload)
    compute = products / dp / shared / share.products + pairs / dp / shared / share.forward
    compute /= target.chip.flops(m.compute_dtype)
    layer = weights / m.num_layers / tp * item * (sp > 1)
    tokens = rows * workload.chunk
    enter_leave = 4 * (tokens // sp) * m.hidden_size * item * (tp - 1) / tp
    queries = 0
    if _queries_travel(workload):
        queries = tokens * (m.num_heads // tp) * (m.head_dim * (item + 4) + 4)
    moved = workload.chunks * (m.num_layers * (layer + enter_leave) + workload.windows.get(0, 0) * queries)
    of_windows = sum(layers * _window_bytes(workload, window) for window, layers in workload.windows.items())
    moved += (workload.chunks - 1) * of_windows * (sp > 1)
    return compute + moved / target.ring_bandwidth(shared)


def _queries_travel(workload: InferenceWorkload) -> bool:
    """Return True if the queries of the last chunk travel around the ring."""
    cached = workload.seq_len - workload.chunk
    several = workload.mesh_shape[3] > 1 and cached > 0
    return several and cheaper_to_move(workload.model, workload.chunk, cached) == "queries"


def _window_bytes(workload: InferenceWorkload, window: int) -> int:
    """Return the bytes of the keys and values that a device collects for a chunk in a layer with a window."""
    if not window:
        return 0
    m = workload.model
    dp, _, tp, _ = workload.mesh_shape
    keys = workload.batch_size // dp * (workload.chunk + window) * max(1, m.num_kv_heads // tp)
    return 2 * keys * m.head_dim * itemsize(m)


@lru_cache(maxsize=64)
def _weight_bytes(model: DecoderConfig, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the bytes of a device's share of each weight, in the tree of the weights."""
    mesh = AbstractMesh(shape, AXIS_NAMES)
    return jax.tree.map(lambda share: device_bytes(share.abstract(mesh)), weight_shares(model, mesh))
