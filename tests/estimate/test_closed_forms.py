"""Closed forms by hand: memory, hops, time, what a layout costs."""

from dataclasses import replace

import pytest

from ringformer.estimate.choices.memory_settings import possible_settings
from ringformer.estimate.closed_forms.training import (
    StepTime,
    attention_seconds,
    causal_excess,
    memory,
    peak_bytes,
    ring_hops,
)
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.hardware import GiB
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.models.flops import executed_attention_flops
from ringformer.ops.layouts import PARTS, VISIBLE
from ringformer.ops.work_list import cut_axis, visible_pairs


def test_memory_falls():
    """With each setting that saves it, the fit's own range: 7B, 32,768 tokens on a device of 256."""
    model = LlamaConfig(**preset("llama_7b"))
    workload = Workload(model, find_target("v5e-256"), "1,1,1,256", 256 * 32768)
    peaks = [peak_bytes(workload.with_settings(s)) for s in possible_settings(model)]
    assert peaks == sorted(peaks, reverse=True) and GiB * 12 < peaks[1] < GiB * 15


def test_what_attention_holds_is_float32_in_every_compute_dtype():
    """7B, 32,768 tokens on a device: bfloat16 halves seven arrays of [T, D], and none of those of attention."""
    model = LlamaConfig(**preset("llama_7b"))
    ring = Workload(model, find_target("v5e-256"), "1,1,1,256", 256 * 32768)
    half, whole = (
        memory(replace(ring, model=replace(model, compute_dtype=dtype)))["working set of a layer"]
        for dtype in ("bfloat16", "float32")
    )
    assert whole - half == 7 * 2 * 32768 * 4096


@pytest.mark.parametrize(("target", "each"), [("v5e-256", 28), ("8xH100", 24)])
def test_a_ring_holds_keys_of_the_key_heads(target, each):
    """A quarter of the key heads leaves a quarter of what is computed, sent and received; no ring has none of it."""
    model = LlamaConfig(**preset("llama_7b"))
    n = find_target(target).num_devices
    held = {}
    for heads in (8, 32):
        for mesh_dim in (f"1,1,1,{n}", f"1,{n},1,1"):
            workload = Workload(replace(model, num_kv_heads=heads), find_target(target), mesh_dim, n * 32768, n)
            workload = workload if mesh_dim.endswith(str(n)) else replace(workload, seq_len=32768)
            held[heads, mesh_dim] = memory(workload)["working set of a layer"] / workload.local_tokens / 4096
    ring, alone = f"1,1,1,{n}", f"1,{n},1,1"
    assert held[32, ring] - held[8, ring] == pytest.approx(each * 3 / 4)
    assert held[8, alone] == held[32, alone] == pytest.approx(held[8, ring] - each / 4)


def test_a_hop():
    """131,072 tokens over 8 A100 by hand: 2 T^2 d H causal FLOPs at 312 TFLOP/s, 4 T d H bytes at 300 GB/s; with tp
    half of both; the backward has 2.5 times the FLOPs, and three times the bytes with float32 gradients."""
    model, target = LlamaConfig(**preset("llama_7b")), find_target("8xA100-80")
    ring = Workload(model, target, "1,1,1,8", 131072)
    whole, back = ring_hops(ring).values()
    assert whole.compute == pytest.approx(7.05e-3, rel=1e-3) and whole.link == pytest.approx(0.895e-3, rel=1e-3)
    assert whole.intensity == 16384 / 2
    half = ring_hops(replace(ring, mesh_dim="1,1,2,4", seq_len=131072 // 2))["forward"]
    assert (half.flops, half.bytes) == (whole.flops / 2, whole.bytes / 2)
    assert (back.flops, back.bytes) == (2.5 * whole.flops, 3 * whole.bytes)


def test_days():
    assert StepTime(compute=9.0, exposed=1.0, tokens=1000).days(86400 * 100) == 1.0


@pytest.mark.parametrize("layout", VISIBLE)
@pytest.mark.parametrize("ranks", [1, 4])
def test_what_a_layout_costs_is_the_work_list_of_the_busiest_rank(layout, ranks):
    T, chunk = 512, 64
    cuts = cut_axis(T, PARTS[layout], chunk), cut_axis(T, PARTS[layout], chunk)

    def executed(source):
        return sum(len(pairs.q) for pairs in visible_pairs(layout, source, True, *cuts)) * chunk**2

    hops = (ranks - 1) * max(executed("earlier"), executed("later"))
    expected = (executed("own") + hops) / (ranks * T * T / 2)
    assert causal_excess(layout, T, ranks, chunk) == pytest.approx(expected)


def test_hops_of_a_workload():
    """Each way, within a node over NVLink and beyond it over the network; none without a ring."""
    model, target = LlamaConfig(**preset("llama_7b")), find_target("8xA100-80")
    workload = Workload(model, target, "1,1,2,4", 2**17)
    assert list(ring_hops(workload)) == ["forward", "backward"]
    nodes = find_target("16xA100-80")
    for far in ring_hops(replace(workload, target=nodes, mesh_dim="1,1,2,8", seq_len=2**18)).values():
        assert far.link == far.bytes / nodes.chip.node_bandwidth
    assert ring_hops(replace(workload, mesh_dim="1,8,1,1", batch_size=8)) == {}
    assert ring_hops(replace(workload, model=replace(model, attention="blockwise"))) == {}


def test_attention_within_a_window_is_a_fiftieth_of_that_to_512k():
    """LLaMA-3 8B on 8 ranks: seconds at one rate, so chunk pairs; and the FLOPs that a step needs."""
    model, target = LlamaConfig(**preset("llama3_8b") | {"kernel": "pallas"}), find_target("v5e-8")
    full, windowed = (
        Workload(replace(model, window=window), target, "1,1,1,8", 2**19).with_kernel()[0] for window in (0, 4096)
    )
    assert windowed.model.q_chunk == 1024 and windowed.hops(4096) == 1
    for name, seconds in attention_seconds(full).items():
        assert seconds / attention_seconds(windowed)[name] >= 50
    needed = [executed_attention_flops(w.model, 2**19) for w in (full, windowed)]
    assert needed[0] / needed[1] == pytest.approx(2**19 / 2 / (4096 * (1 - 4096 / 2**20)))


def test_microbatches_need_the_sum_of_their_gradients():
    """4 bytes a parameter over the devices that share the state; their activations are those of one microbatch."""
    model, target = LlamaConfig(**preset("llama_7b")), find_target("8xA100-80")
    one = Workload(model, target, "1,1,1,8", 2**17)
    four = replace(one, batch_size=4, accumulate=4)
    difference = {name: size - memory(one)[name] for name, size in memory(four).items()}
    assert difference.pop("parameters, optimizer and gradients") == pytest.approx(4 * model.num_params / 8)
    assert set(difference.values()) == {0}
