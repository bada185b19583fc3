"""The plan: candidates ranked by closed forms, judged by a compiler that is a formula."""

from functools import partial

import pytest

from ringformer.estimate import plan as planning
from ringformer.estimate import targets
from ringformer.estimate.plan import candidates, longest_plan, longest_plan_within, plan, plan_text
from ringformer.estimate.targets import find_target
from ringformer.estimate.workload import MemorySettings
from ringformer.ops.layouts import VISIBLE
from tests.estimate.test_longest_context import estimate_of

GPUS = find_target("8xA100-80")


def compiler(monkeypatch, accepts):
    monkeypatch.setattr(planning, "compile_step_apart", lambda w: estimate_of(w, fits=accepts(w), peak_bytes=2**36))
    monkeypatch.setattr(targets, "find_spec", lambda name: "there")


def plain(candidate):
    """Whether it is zigzag with nothing that saves memory."""
    model = candidate.workload.model
    return candidate.workload.settings == MemorySettings() and not model.offload and model.layout == "zigzag"


def test_candidates_are_meshes_of_all_devices_fastest_first():
    ranked = candidates("llama_7b", GPUS, 2**17, "bfloat16")
    for c in ranked:
        dp, fsdp, tp, sp = c.workload.mesh_shape
        assert dp * fsdp * tp * sp == 8 and c.workload.batch_size == fsdp
    seconds = [c.seconds_per_token for c in ranked]
    assert seconds == sorted(seconds)
    assert plain(ranked[0])  # whatever saves memory costs time


def test_several_short_rings_do_the_work_of_one_long_ring():
    """Where hops are hidden a token takes as long in eight rings of 32 as in one of 256, else less."""
    seconds = {}
    for length in (2**15, 2**22):
        ranked = candidates("llama_7b", find_target("v5e-256"), length, "bfloat16")
        seconds[length] = {c.workload.mesh_dim: c.seconds_per_token for c in ranked if plain(c)}
    assert seconds[2**22]["1,8,1,32"] == pytest.approx(seconds[2**22]["1,1,1,256"], rel=0.05)
    assert seconds[2**15]["1,8,1,32"] < 0.5 * seconds[2**15]["1,1,1,256"]


def test_the_fastest_that_is_accepted_is_chosen(monkeypatch):
    compiler(monkeypatch, lambda workload: True)
    found = plan("llama_7b", GPUS, 2**17, "bfloat16", lambda line: None)
    assert found.chosen.workload.settings == MemorySettings()
    compiler(monkeypatch, lambda workload: workload.model.head_groups > 1)
    refused = plan("llama_7b", GPUS, 2**17, "bfloat16", lambda line: None, attempts=100)
    assert refused.chosen.workload.model.head_groups > 1
    assert refused.chosen.seconds_per_token > found.chosen.seconds_per_token
    assert any(why.startswith("compiled") for _, why in refused.refused)
    text = plan_text("llama_7b", GPUS, refused)
    assert "--config.model.head_groups=4" in text and "why not the others" in text


def test_the_longest_halves_until_something_is_accepted(monkeypatch):
    compiler(monkeypatch, lambda workload: workload.seq_len <= 2**17)
    found = longest_plan("llama_7b", GPUS, "bfloat16", lambda line: None)
    assert found.seq_len == 2**17 and found.chosen is not None


def test_the_other_end_is_the_longest_whose_step_is_short_enough(monkeypatch):
    """All of its sequences count to the step; what is longer is not even compiled if the closed form says so."""
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    longest = longest_plan("llama_7b", GPUS, "bfloat16", lambda line: None)
    within = partial(longest_plan_within, longest, "llama_7b", GPUS, "bfloat16", lambda line: None)
    assert within(2 * longest.step_seconds) is longest
    quick = within(600.0)
    assert quick.seq_len < longest.seq_len and quick.step_seconds <= 600
    doubled = candidates("llama_7b", GPUS, 2 * quick.seq_len, "bfloat16")
    assert all(c.reason_against or c.step_seconds > 600 for c in doubled)
    assert any(why == f"a step takes about {c.step_seconds:,.0f} s" for c, why in within(1.0).refused)
    assert within(1e-6).chosen is None


def test_a_compiled_step_that_takes_too_long_is_refused(monkeypatch):
    """Here every compiled step takes a second, whatever the closed form says."""
    compiler(monkeypatch, lambda workload: True)
    found = plan("llama_7b", GPUS, 4096, "bfloat16", lambda line: None, max_step_seconds=0.9)
    assert found.chosen is None and any(why == "compiled: a step takes 1 s" for _, why in found.refused)
    assert plan("llama_7b", GPUS, 4096, "bfloat16", lambda line: None, max_step_seconds=1.1).chosen


def test_what_the_compiler_refuses_corrects_the_closed_forms(monkeypatch):
    """It takes twice as much as they say: the second candidate to be compiled has twice the room."""
    length = 2**19
    peaks = {c.workload: c.peak for c in candidates("llama_7b", GPUS, length, "bfloat16")}
    compiled = []

    def compile_step_apart(workload):
        compiled.append(workload)
        need = 2 * peaks[workload]
        return estimate_of(workload, fits=need <= GPUS.budget, peak_bytes=need)

    monkeypatch.setattr(targets, "find_spec", lambda name: "there")
    monkeypatch.setattr(planning, "compile_step_apart", compile_step_apart)
    found = plan("llama_7b", GPUS, length, "bfloat16", lambda line: None)
    assert len(compiled) == 2 and found.chosen.workload == compiled[1] and found.excess == pytest.approx(2)
    assert 2 * peaks[compiled[0]] > GPUS.budget >= 2 * peaks[compiled[1]]
    assert list(peaks).index(compiled[0]) < list(peaks).index(compiled[1])  # the faster first
    compiled.clear()
    plan("llama_7b", GPUS, length, "bfloat16", lambda line: None, excess=1e9)
    (smallest,) = compiled  # is asked, whatever the correction says
    assert peaks[smallest] == min(peaks.values())


def test_nothing_fits(monkeypatch):
    compiler(monkeypatch, lambda workload: False)
    found = plan("llama_65b", GPUS, 2**24, "float32", lambda line: None)
    assert found.chosen is None and "nothing fits" in plan_text("llama_65b", GPUS, found)


def test_without_its_compiler_a_plan_is_a_closed_form_and_says_so(monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    monkeypatch.setattr(planning, "compile_step_apart", lambda workload: pytest.fail("nothing to compile with"))
    said = []
    found = longest_plan("llama_7b", GPUS, "bfloat16", said.append)
    assert set(said) == {"the compiler for NVIDIA A100-SXM4-80GB is missing: pip install 'jax[cuda13]'"}
    assert found.chosen.peak <= GPUS.budget
    text = plan_text("llama_7b", GPUS, found)
    assert "  closed form, not compiled: " in text and f"--config.seq_len={found.seq_len}" in text
    assert any(why.endswith("slower (modelled)") for _, why in found.refused)


def test_a_plan_says_what_its_seconds_are(monkeypatch):
    """Compiled, and by the closed form: FLOPs at a stated share of the peak, in attention and elsewhere."""
    compiler(monkeypatch, lambda workload: True)
    plans = plan("llama_7b", GPUS, 2**15, "bfloat16", lambda line: None)
    for said in (plans, plans._replace(estimate=None)):
        text = plan_text("llama_7b", GPUS, said)
        assert "tokens/s (FLOPs at 55% of the peak in attention, 85% elsewhere)" in text


def test_logits_that_spill_cost_their_bytes():
    """On v5e four groups of heads keep a chunk pair's logits on the chip, one does not: that takes over twice as long,
    and is not the fastest. On v5p both spill."""
    for name, spills in (("v5e-256", False), ("v5p-128", True)):
        ranked = candidates("llama_7b", find_target(name), 2**22, "bfloat16")
        seconds = {c.workload.model.head_groups: c.seconds_per_token for c in reversed(ranked)
                   if c.workload.mesh_shape[3] == c.workload.target.num_devices and c.workload.model.layout == "zigzag"
                   and c.workload.settings.remat_group == 1 and not c.workload.model.q_chunk}  # fmt: skip
        assert seconds[1] == pytest.approx(seconds[4], rel=0.05) if spills else seconds[1] > 2 * seconds[4]


def test_lengths_that_no_mesh_divides():
    with pytest.raises(ValueError, match="no mesh of 8xA100-80 divides sequences of 1001 tokens"):
        plan("llama_7b", GPUS, 1001, "bfloat16", lambda line: None)
    for length in (0, -4096):
        with pytest.raises(ValueError, match=f"seq_len={length} must be at least 1"):
            plan("llama_7b", GPUS, length, "bfloat16", lambda line: None)


def test_layouts_and_chunks_are_candidates():
    """Zigzag is the fastest; halves of the usual chunks need less memory."""
    ranked = candidates("llama_7b", GPUS, 2**17, "bfloat16")
    fastest = ranked[0]
    assert fastest.workload.model.layout == "zigzag" and {c.workload.model.layout for c in ranked} == set(VISIBLE)
    smaller = fastest.workload.with_settings(MemorySettings(q_chunk=512, k_chunk=512))
    (halved,) = (c for c in ranked if c.workload == smaller)
    assert halved.peak < fastest.peak and halved.seconds_per_token > fastest.seconds_per_token
    assert " chunk 512 " in str(halved)
