"""The plan: candidates ranked by closed forms, judged by a compiler that is a formula."""

import pytest

from ringformer.estimate import closed_forms, longest_context, targets
from ringformer.estimate import plan as planning
from ringformer.estimate.closed_forms import (
    StepTime,
    causal_excess,
    hop,
    peak_bytes,
    step_time,
)
from ringformer.estimate.longest_context import Saving
from ringformer.estimate.overlap import Rates, Schedule
from ringformer.estimate.plan import as_text, candidates, longest_plan, plan
from ringformer.estimate.targets import target
from ringformer.models.flops import executed_attention_flops, executed_flops
from ringformer.models.llama_config import LlamaConfig
from ringformer.models.llama_presets import preset
from ringformer.ops.layouts import PARTS, VISIBLE
from ringformer.ops.work_list import cut_axis, visible_pairs

GPUS = "8xA100-80"


def compiler(monkeypatch, accepts):
    def run(command):
        options = dict(word[2:].split("=") for word in command if "=" in word)
        return {
            "fits": accepts(options),
            "peak_bytes": 2**36,
            "hbm_bytes": 2**36,
            "host_bytes": 0,
            "exposed_in_ring_loops_bytes": 0,
            "step_seconds_model": 1.0,
            "tokens_per_second_model": 1.0,
        }

    monkeypatch.setattr(longest_context, "run", run)
    monkeypatch.setattr(targets, "find_spec", lambda name: "there")


def test_candidates_are_meshes_of_all_devices_fastest_first():
    found = candidates("llama_7b", target(GPUS), 2**17, "bfloat16", 8)
    for c in found:
        dp, fsdp, tp, sp = (int(x) for x in c.case.mesh_dim.split(","))
        assert dp * fsdp * tp * sp == 8 and c.case.batch_size == fsdp
    seconds = [c.seconds_per_token for c in found]
    assert seconds == sorted(seconds)
    assert found[0].saving == Saving() and not found[0].case.offload  # whatever saves memory costs time


def test_several_short_rings_do_the_work_of_one_long_ring():
    """Where hops are hidden a token takes as long in eight rings of 32 as in one of 256, else less."""
    seconds = {}
    for length in (2**15, 2**22):
        found = candidates("llama_7b", target("v5e-256"), length, "bfloat16", 256)
        usual = [c for c in found if c.saving == Saving() and not c.case.offload and c.case.layout == "zigzag"]
        seconds[length] = {c.case.mesh_dim: c.seconds_per_token for c in usual}
    assert seconds[2**22]["1,8,1,32"] == pytest.approx(seconds[2**22]["1,1,1,256"], rel=0.05)
    assert seconds[2**15]["1,8,1,32"] < 0.5 * seconds[2**15]["1,1,1,256"]


def test_the_fastest_that_is_accepted_is_chosen(monkeypatch):
    compiler(monkeypatch, lambda options: True)
    found = plan("llama_7b", GPUS, 2**17, "bfloat16", lambda line: None)
    assert found.chosen.saving == Saving()
    compiler(monkeypatch, lambda options: int(options["head_groups"]) > 1)
    refused = plan("llama_7b", GPUS, 2**17, "bfloat16", lambda line: None, attempts=100)
    assert refused.chosen.saving.head_groups > 1
    assert refused.chosen.seconds_per_token > found.chosen.seconds_per_token
    assert any(why.startswith("compiled") for _, why in refused.refused)
    text = as_text("llama_7b", GPUS, refused)
    assert "--config.model.head_groups=4" in text and "why not the others" in text


def test_the_longest_halves_until_something_is_accepted(monkeypatch):
    compiler(monkeypatch, lambda options: int(options["seq_len"]) <= 2**17)
    found = longest_plan("llama_7b", GPUS, "bfloat16", lambda line: None)
    assert found.seq_len == 2**17 and found.chosen is not None


def test_what_the_compiler_refuses_corrects_the_closed_forms(monkeypatch):
    """It takes twice as much as they say: the second candidate to be compiled has twice the room."""
    compiler(monkeypatch, None)
    length, goal = 2**19, target(GPUS)
    by_command = {
        tuple(c.case.command(length, c.saving)): c for c in candidates("llama_7b", goal, length, "bfloat16", 8)
    }
    compiled = []

    def run(command):
        candidate = by_command[tuple(command)]
        compiled.append(candidate)
        return {"fits": 2 * candidate.peak <= goal.budget, "peak_bytes": 2 * candidate.peak}

    monkeypatch.setattr(longest_context, "run", run)
    found = plan("llama_7b", GPUS, length, "bfloat16", lambda line: None)
    assert len(compiled) == 2 and found.chosen == compiled[1] and found.excess == pytest.approx(2)
    assert 2 * compiled[0].peak > goal.budget >= 2 * compiled[1].peak
    assert compiled[0].seconds_per_token < compiled[1].seconds_per_token
    compiled.clear()
    plan("llama_7b", GPUS, length, "bfloat16", lambda line: None, excess=1e9)
    (smallest,) = compiled  # is asked, whatever the correction says
    assert smallest.peak == min(c.peak for c in by_command.values())


def test_nothing_fits(monkeypatch):
    compiler(monkeypatch, lambda options: False)
    found = plan("llama_65b", GPUS, 2**24, "float32", lambda line: None)
    assert found.chosen is None and "nothing fits" in as_text("llama_65b", GPUS, found)


def test_without_its_compiler_a_plan_is_a_closed_form_and_says_so(monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    monkeypatch.setattr(longest_context, "run", lambda command: pytest.fail("nothing to compile with"))
    said = []
    found = longest_plan("llama_7b", GPUS, "bfloat16", said.append)
    assert set(said) == {"the compiler for NVIDIA A100-SXM4-80GB is missing: pip install 'jax[cuda13]'"}
    assert found.chosen.peak <= target(GPUS).budget
    text = as_text("llama_7b", GPUS, found)
    assert "  closed form, not compiled: " in text and f"--config.seq_len={found.seq_len}" in text
    assert any(why.endswith("slower (modelled)") for _, why in found.refused)


def test_a_plan_counts_on_what_an_estimate_counts_on(monkeypatch):
    """One device's step without a ring: the closed form's time is that of a schedule with its FLOPs, and both say at
    what share of the peak."""
    compiler(monkeypatch, lambda options: True)
    length, goal, model = 2**15, target(GPUS), LlamaConfig(**preset("llama_7b"))
    waste = causal_excess("zigzag", length, 1) - 1
    schedule = Schedule(
        [], executed_flops(model, length, 2) + waste * executed_attention_flops(model, length, 2), Rates(312e12, 1, 1)
    )
    seen = []
    for efficiency, said in ((0.6, "60%"), (0.3, "30%")):
        monkeypatch.setattr(closed_forms, "MATMUL_EFFICIENCY", efficiency)
        found = candidates("llama_7b", goal, length, "bfloat16", 8)
        (one,) = (c for c in found if c.case.mesh_dim == "1,8,1,1" and c.saving == Saving() and not c.case.offload
                  and c.case.layout == "zigzag")  # fmt: skip
        time = step_time(schedule, length)
        assert one.seconds_per_token == pytest.approx(time.step / (8 * length))  # of eight sequences at once
        seen.append(time.step)
        plans = plan("llama_7b", GPUS, length, "bfloat16", lambda line: None)
        assert f"tokens/s (computation at {said} of the peak)" in as_text("llama_7b", GPUS, plans)
        closed = plans._replace(estimate=None)
        assert f"tokens/s (computation at {said} of the peak)" in as_text("llama_7b", GPUS, closed)
    assert seen[1] == pytest.approx(2 * seen[0])


def test_lengths_that_no_mesh_divides():
    with pytest.raises(ValueError, match="no mesh of 8xA100-80 divides sequences of 1001 tokens"):
        plan("llama_7b", GPUS, 1001, "bfloat16", lambda line: None)
    for length in (0, -4096):
        with pytest.raises(ValueError, match=f"seq_len={length} must be at least 1"):
            plan("llama_7b", GPUS, length, "bfloat16", lambda line: None)


def test_closed_forms():
    """Memory falls with each saving."""
    model = LlamaConfig(**preset("llama_7b"))
    settings = [LlamaConfig(**preset("llama_7b") | vars(s)) for s in longest_context.savings(model)]
    peaks = [peak_bytes(c, 32768, devices=256) for c in settings]
    assert peaks == sorted(peaks, reverse=True) and planning.GiB * 12 < peaks[1] < planning.GiB * 15


def test_a_hop():
    """131,072 tokens over 8 A100 by hand: 2 T^2 d H causal FLOPs at 312 TFLOP/s, 4 T d H bytes at 300 GB/s; with tp
    half of both; the backward has 2.5 times the FLOPs, and three times the bytes with float32 gradients."""
    model, goal = LlamaConfig(**preset("llama_7b")), target("8xA100-80")
    one = hop(model, goal, 16384, ranks=8, tp=1, backward=False)
    assert one.compute == pytest.approx(7.05e-3, rel=1e-3) and one.link == pytest.approx(0.895e-3, rel=1e-3)
    assert one.intensity == 16384 / 2
    half = hop(model, goal, 16384, ranks=8, tp=2, backward=False)
    assert (half.flops, half.bytes) == (one.flops / 2, one.bytes / 2)
    back = hop(model, goal, 16384, ranks=8, tp=1, backward=True)
    assert (back.flops, back.bytes) == (2.5 * one.flops, 3 * one.bytes)


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


def test_layouts_and_chunks_are_candidates():
    """Zigzag is the fastest; halves of the usual chunks need less memory."""
    found = candidates("llama_7b", target(GPUS), 2**17, "bfloat16", 8)
    assert found[0].case.layout == "zigzag" and {c.case.layout for c in found} == set(VISIBLE)
    halved = next(c for c in found if c.saving.q_chunk and c.case == found[0].case)
    assert halved.saving.q_chunk == halved.saving.k_chunk == 512
    assert halved.peak < found[0].peak and halved.seconds_per_token > found[0].seconds_per_token
    assert "--q_chunk=512" in halved.case.command(2**17, halved.saving)
