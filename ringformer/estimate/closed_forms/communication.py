"""Closed forms of the seconds that a train step waits for its communication: keys, heads, weights, host.

Bytes of a layer on a device, with T tokens of a sequence, e bytes an element, r = sp / u ranks of u devices that
exchange heads, and k' = K copied to a multiple of u (`ops/head_exchange.py`); tp divides H and K:

    ring        (r - 1) 2 e T k' d forward, and three times that backward, with float32 gradients
    gathered    r 2 e T k' d in either pass, and twice that in float32 for the gradients
    heads       e T d (2 H + 2 k') in either pass, with cuDNN e T d H more backward; a device keeps 1 / u of it
    window      2 e T k' d forward, of the tokens within the window's reach; float32 gradients too backward, and back
    weights     the layer's parameters in e bytes each time that it runs forward, their gradients in float32 backward
"""

import jax.numpy as jnp

from ringformer.estimate.closed_forms.training import (
    computation_seconds,
    gradient_bytes,
    held_copies,
    held_key_heads,
    hop_bytes,
    itemsize,
    offloaded_gradients,
    offloaded_state,
    ring_hops,
    weight_bytes,
    window_seconds,
)
from ringformer.estimate.seconds.program_seconds import efficiency
from ringformer.estimate.workloads.link_rates import exchange_rate, hop_rate, keys_rate, weights_rate
from ringformer.estimate.workloads.training import Workload
from ringformer.models.flops import WEIGHT_FORWARD, forward_runs
from ringformer.ops.kernels.block_kernels import BLOCK_KERNELS
from ringformer.ops.layouts import PARTS


def exposed_seconds(workload: Workload) -> dict[str, float]:
    """Return the seconds that a step waits for communication that no computation hides, by purpose."""
    computation = computation_seconds(workload)
    return {
        "ring": sum(_hops(workload, window, layers) for window, layers in workload.windows.items()),
        "gathered keys": _gathered(workload, workload.windows.get(0, 0)),
        "head exchange": _exchange(workload),
        "weights": _weights(workload, computation),
        "tensor parallelism": _tensor_parallelism(workload),
        "host": _host(workload, computation),
        "state": _state(workload),
        "slices": _slices(workload),
    }


def _sequences(workload: Workload) -> float:
    """Return the sequences of a step that a device works on."""
    dp, fsdp, _, _ = workload.mesh_shape
    return workload.batch_size / (dp * fsdp)


def attention_passes(workload: Workload, layers: int) -> dict[str, float]:
    """Return how often so many of a step's layers run attention on a sequence, by pass."""
    passes = _sequences(workload) * layers
    return {"forward": forward_runs(workload.model)[1] * passes, "backward": passes}


def _hops(workload: Workload, window: int, layers: int) -> float:
    if window:
        return _window(workload, window, layers)
    return _ring(workload, layers)


def _ring(workload: Workload, layers: int) -> float:
    ranks = workload.ring_size
    attention = window_seconds(workload, 0, layers)
    exposed = 0.0
    for name, hop in ring_hops(workload).items():
        link = (ranks - 1) * attention_passes(workload, layers)[name] * hop.link
        exposed += max(0.0, link - attention[name] * (ranks - 1) / ranks)
    return exposed


def _window(workload: Workload, window: int, layers: int) -> float:
    """The keys of a window move along the sequence under the blocks of a pass; their gradients follow them and, if
    there were several hops, return as far."""
    model = workload.model
    parts = PARTS[workload.model.layout]
    exposed = 0.0
    hops = workload.hops(window)
    reached = min(window - 1, hops * workload.ring_tokens // parts)
    sent = parts * held_copies(workload) / (workload.mesh_shape[2] * model.ulysses)
    keys = sent * hop_bytes(model, reached, backward=False)
    both = sent * hop_bytes(model, reached, backward=True)
    sent_by = {"forward": keys, "backward": keys + (both - keys) * min(hops, 2)}
    for name, seconds in window_seconds(workload, window, layers).items():
        link = attention_passes(workload, layers)[name] * sent_by[name] / hop_rate(workload, window)
        exposed += max(0.0, link - seconds)
    return exposed


def _gathered(workload: Workload, layers: int) -> float:
    """A rank's own block hides a gather, and the sum of the gradients. If the key heads have two halves, what moves for
    one half also hides under the other half's block."""
    model = workload.model
    ranks = workload.ring_size
    exposed = 0.0
    if model.ring != "gathered" or ranks == 1 or layers == 0:
        return 0.0
    devices = workload.mesh_shape[2] * model.ulysses  # that share the heads
    pieces = 2 if BLOCK_KERNELS[model.kernel].has_even_halves(held_key_heads(workload)) else 1
    for name, seconds in window_seconds(workload, 0, layers).items():
        received = hop_bytes(model, workload.ring_tokens, backward=name == "backward") * ranks * held_copies(workload)
        link = attention_passes(workload, layers)[name] * received / devices / keys_rate(workload)
        own = seconds / ranks
        others = seconds * (ranks - 1) / ranks
        exposed += max(0.0, link / pieces - own, link - own - others * (1 - 1 / pieces))
    return exposed


def _exchange(workload: Workload) -> float:
    """Asynchronous exchanges hide under the projections of a layer."""
    model = workload.model
    target = workload.target
    _, _, tp, sp = workload.mesh_shape
    if model.ulysses == 1 or not model.on_ring:
        return 0.0
    tokens = workload.seq_len // sp
    heads = model.num_heads + held_copies(workload) * model.num_kv_heads
    each = itemsize(model) * tokens * model.head_dim / tp / exchange_rate(workload)
    more = {"forward": 0, "backward": 0}
    if model.kernel == "cudnn":
        more["backward"] = model.num_heads
    cores = target.chip.tensor_cores
    hidden = 0.0
    if cores is None or cores.async_all_to_all:
        projected = 2 * model.hidden_size * model.head_dim * (model.num_heads + model.num_kv_heads) / tp
        rate = efficiency(target.generation).products * target.chip.flops(model.compute_dtype)
        hidden = WEIGHT_FORWARD * projected * tokens / rate
    passes = attention_passes(workload, model.num_layers)
    return sum(passes[name] * max(0.0, each * (2 * heads + more[name]) - hidden) for name in passes)


def _weights(workload: Workload, computation: float) -> float:
    """Gathers hide under the layers that run meanwhile; so do the sums of gradients on GPUs, but hardly on TPUs. Chips
    without SparseCores sum by all-reduces, which send twice the bytes (docs/overlap.md)."""
    model = workload.model
    _, fsdp, tp, sp = workload.mesh_shape
    if fsdp * sp == 1:
        return 0.0
    runs = forward_runs(model)[0]
    cores = workload.target.chip.tensor_cores
    passes = workload.accumulate / tp / weights_rate(workload)
    gathers = runs * itemsize(model) * model.num_params * passes
    sums = 4 * workload.trained_params * passes
    forward = computation * runs / (runs + 2)  # a backward takes as long as two forwards
    if cores is None:
        sums = max(0.0, sums - (computation - forward))
    elif not cores.sparse_cores:
        sums *= 2
    return max(0.0, gathers - forward) + sums


def _tensor_parallelism(workload: Workload) -> float:
    """Gathers and scatters over tp of attention and feed-forward: forward, recomputed, backward."""
    model = workload.model
    _, _, tp, sp = workload.mesh_shape
    tokens = _sequences(workload) * workload.seq_len / sp
    moved = 4 * tokens * model.hidden_size * itemsize(model) * (tp - 1) / tp
    return (1 + forward_runs(model)[0]) * model.num_layers * moved / workload.target.ring_bandwidth(tp)


def _host(workload: Workload, computation: float) -> float:
    """Offloaded arrays leave during the forward, and return before a layer's backward."""
    offloaded = workload.model.offloaded_bytes(workload.local_tokens)
    moved = offloaded * workload.accumulate / workload.target.chip.host_bandwidth
    return max(0.0, moved - computation / (forward_runs(workload.model)[0] + 2)) + moved


def _state(workload: Workload) -> float:
    """The state's arrays leave while others arrive; before that, weights arrive to be copied. Gradients, which
    leave under the backward, arrive twice: for their norm and for the update."""
    moved = offloaded_state(workload) + 2 * offloaded_gradients(workload)
    if workload.weights_in_host:
        moved += weight_bytes(workload)
    return moved / workload.target.chip.host_bandwidth


def _slices(workload: Workload) -> float:
    """The gradients' shards are summed over the slices, or groups of GPUs, when all of them are known, and wait for the
    network between those. Each of them counts as one copy of the weights (dp = slices)."""
    target = workload.target
    if target.slices == 1:
        return 0.0
    shard = gradient_bytes(workload) * jnp.dtype(workload.optimizer.reduce_dtype).itemsize / 4
    return 2 * (target.slices - 1) / target.slices * shard / target.slice_bandwidth
