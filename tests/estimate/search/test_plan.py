"""The plan: candidates ranked by closed forms, judged by a compiler that is a formula."""

import re
from dataclasses import replace
from functools import partial

import pytest

from ringformer.estimate.choices.candidates import candidates, counted, meshes, neighbours, weighed
from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.reports import run_estimate
from ringformer.estimate.reports.run_estimate import RunCompiler
from ringformer.estimate.search import plan as planning
from ringformer.estimate.search.plan import Plan, longest_plan, longest_plan_within, plan
from ringformer.estimate.search.plan_report import plan_text
from ringformer.estimate.seconds.program_seconds import OTHER, Seconds
from ringformer.estimate.workloads import targets
from ringformer.estimate.workloads.programs import EVALUATION, PROGRAMS, TRAIN_STEP
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import MemorySettings, Workload, preset_workload
from ringformer.ops.layouts import VISIBLE
from tests.estimate.search.test_longest_context import estimate_of

GPUS = find_target("8xA100-80")
PLAIN = 1, "one_way"
"""Devices that exchange heads, and form of the ring, of a plain ring."""


def goal(model, target, seq_len, compute_dtype="bfloat16") -> Workload:
    """A goal that leaves the number of sequences open."""
    return replace(preset_workload(model, target, seq_len, compute_dtype=compute_dtype), batch_size=0)


def asked(log=lambda line: None, **options):
    return RunCompiler(log, **{"generate_code": False} | options)


def compiler(monkeypatch, accepts, code=lambda w, program: 2**20):
    """A compiler that accepts some workloads, and whose machine code has the bytes that `code` says; the list of what
    it is asked for."""
    calls = []

    def compile_apart(w, program=TRAIN_STEP, *, generate_code=False):
        calls.append((w, program, generate_code))
        e = estimate_of(w, fits=accepts(w), peak_bytes=2**36)
        loaded = code(w, program) if generate_code else None
        return replace(
            e, program=program, generated_code=generate_code, code_bytes=loaded, peak_bytes=e.peak_bytes + (loaded or 0)
        )

    monkeypatch.setattr(run_estimate, "compile_apart", compile_apart)
    monkeypatch.setattr(targets, "find_spec", lambda name: "there")
    return calls


def plain(candidate):
    """Whether it is zigzag with nothing that saves memory."""
    model = candidate.workload.model
    way = model.layout, model.ulysses, model.ring
    return candidate.workload.settings == MemorySettings() and not model.offload and way == ("zigzag", *PLAIN)


def likely(wanted):
    """The fastest candidate that fits by the closed forms."""
    return next(c for c in candidates(wanted) if not c.reason_against)


def test_candidates_are_meshes_of_all_devices_fastest_first():
    ranked = candidates(goal("llama_7b", GPUS, 2**17))
    for c in ranked:
        dp, fsdp, tp, sp = c.workload.mesh_shape
        assert dp * fsdp * tp * sp == 8 and c.workload.batch_size == fsdp
    seconds = [c.seconds_per_token for c in ranked]
    assert seconds == sorted(seconds)
    assert plain(ranked[0])  # whatever saves memory costs time


@pytest.mark.slow
def test_several_short_rings_do_the_work_of_one_long_ring():
    """Where hops are hidden a token takes as long in eight rings of 32 as in one of 256, else less."""
    seconds = {}
    for length in (2**15, 2**22):
        ranked = candidates(goal("llama_7b", find_target("v5e-256"), length))
        seconds[length] = {c.workload.mesh_dim: c.seconds_per_token for c in ranked if plain(c)}
    assert seconds[2**22]["1,8,1,32"] == pytest.approx(seconds[2**22]["1,1,1,256"], rel=0.05)
    assert seconds[2**15]["1,8,1,32"] < 0.5 * seconds[2**15]["1,1,1,256"]


def test_the_fastest_that_is_accepted_is_chosen(monkeypatch):
    compiler(monkeypatch, lambda workload: True)
    found = plan(goal("llama_7b", GPUS, 2**17), asked())
    assert found.chosen.workload.settings == MemorySettings()
    compiler(monkeypatch, lambda workload: workload.model.head_groups > 1)
    refused = plan(goal("llama_7b", GPUS, 2**17), asked(), attempts=100)
    assert refused.chosen.workload.model.head_groups > 1
    assert refused.chosen.seconds_per_token > found.chosen.seconds_per_token
    assert any(why.startswith("compiled") for _, why in refused.refused)
    text = plan_text(refused)
    assert "--config.model.head_groups=4" in text and "rejected candidates" in text


@pytest.mark.slow
def test_the_longest_halves_until_something_is_accepted(monkeypatch):
    compiler(monkeypatch, lambda workload: workload.seq_len <= 2**17)
    found = longest_plan(goal("llama_7b", GPUS, 1), asked())
    assert found.seq_len == 2**17 and found.chosen is not None


@pytest.mark.slow
def test_the_other_end_is_the_longest_whose_step_is_short_enough(monkeypatch):
    """All of its sequences count to the step; what is longer is not even compiled if the closed form says so."""
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    longest = longest_plan(goal("llama_7b", GPUS, 1), asked())
    within = partial(longest_plan_within, longest, asked())
    assert within(2 * longest.step_seconds) is longest
    quick = within(600.0)
    assert quick.seq_len < longest.seq_len and quick.step_seconds <= 600
    doubled = candidates(goal("llama_7b", GPUS, 2 * quick.seq_len))
    assert all(c.reason_against or c.time.step > 600 for c in doubled)
    assert any(why == f"a step takes about {c.time.step:,.0f} s" for c, why in within(1.0).refused)
    assert within(1e-6).chosen is None


def test_a_compiled_step_that_takes_too_long_is_refused(monkeypatch):
    """Here every compiled step takes a second, whatever the closed form says."""
    compiler(monkeypatch, lambda workload: True)
    found = plan(goal("llama_7b", GPUS, 4096), asked(), max_step_seconds=0.9)
    assert found.chosen is None and any(why == "compiled: a step takes 1 s" for _, why in found.refused)
    assert plan(goal("llama_7b", GPUS, 4096), asked(), max_step_seconds=1.1).chosen


def test_what_the_compiler_refuses_corrects_the_closed_forms(monkeypatch):
    """It takes twice as much as they say: the second candidate to be compiled has twice the room."""
    length = 2**19
    peaks = {c.workload: c.peak for c in candidates(goal("llama_7b", GPUS, length))}
    compiled = []

    def compile_apart(workload, program):
        need = 2 * counted(workload).peak
        if program == TRAIN_STEP:
            compiled.append(workload)
        return replace(estimate_of(workload, fits=need <= GPUS.budget, peak_bytes=need), program=program)

    monkeypatch.setattr(targets, "find_spec", lambda name: "there")
    monkeypatch.setattr(run_estimate, "compile_apart", compile_apart)
    found = plan(goal("llama_7b", GPUS, length), asked(thorough=False))
    assert len(compiled) == 2 and found.chosen.workload == compiled[1] and found.excess == pytest.approx(2)
    assert 2 * peaks[compiled[0]] > GPUS.budget >= 2 * peaks[compiled[1]]
    assert list(peaks).index(compiled[0]) < list(peaks).index(compiled[1])  # the faster first
    compiled.clear()
    plan(goal("llama_7b", GPUS, length), asked(), excess=1e9)
    smallest, *nearby = compiled  # is asked, whatever the correction says; then those beside it that should fit
    almost = [w for w, peak in peaks.items() if peak <= 1.05 * min(peaks.values())]
    assert smallest == almost[0]
    assert all(counted(workload).peak <= GPUS.budget for workload in nearby) and nearby


@pytest.mark.slow
def test_what_the_compiler_refuses_leaves_candidates_with_more_in_host_memory(monkeypatch):
    """Qwen3-32B at 1M tokens: compiled, weights on the devices take 1.4 times the closed form, the others what it
    says."""
    tried = []

    def compile_apart(workload, program):
        need = counted(workload).peak * (1.4 if workload.optimizer.offload == "moments" else 1.0)
        if program == TRAIN_STEP:
            tried.append(workload)
        fits = need <= workload.target.budget
        return replace(estimate_of(workload, fits=fits, peak_bytes=round(need)), program=program)

    monkeypatch.setattr(targets, "find_spec", lambda name: "there")
    monkeypatch.setattr(run_estimate, "compile_apart", compile_apart)
    target = find_target("8xH100")
    found = plan(goal("qwen3_32b", target, 2**20), asked(thorough=False))
    assert tried[0].optimizer.offload == "moments" and found.excess == pytest.approx(1.4)
    assert found.chosen and found.chosen.workload.optimizer.offload == "state"


def test_the_longest_doubles_as_long_as_something_is_accepted(monkeypatch):
    """Closed forms may be wrong on the safe side: where their longest fits, the double is tried."""
    closed = 2**12
    while any(not c.reason_against for c in candidates(goal("llama_7b", GPUS, 2 * closed))):
        closed *= 2
    compiler(monkeypatch, lambda workload: workload.seq_len <= 2 * closed)
    assert longest_plan(goal("llama_7b", GPUS, 1), asked()).seq_len == 2 * closed


def test_a_plan_ends_with_the_machine_code_of_every_program_of_its_winner(monkeypatch):
    calls = compiler(monkeypatch, lambda workload: True)
    found = plan(goal("llama_7b", GPUS, 2**17), asked(generate_code=True, thorough=False))
    winner = found.chosen.workload
    assert calls == [(winner, program, code) for code in (False, True) for program in PROGRAMS]
    assert "FITS: every program of the run and its saves, compiled to machine code" in plan_text(found)
    calls.clear()
    quick = plan(goal("llama_7b", GPUS, 2**17), asked())
    assert quick.chosen == found.chosen and not any(code for _, _, code in calls)
    assert "scheduled; machine code not tried" in plan_text(quick)


@pytest.mark.parametrize(("refused", "expected"), [(None, 4), (4, 2)])
def test_what_is_nearby_and_faster_is_taken(monkeypatch, refused, expected):
    """The compiler's seconds are 10 with one head group, 5 with two, 1 with four and 8 with eight: from neighbour to
    neighbour to four. A neighbour that does not fit is not."""
    seconds = {1: 10.0, 2: 5.0, 4: 1.0, 8: 8.0}

    def compile_apart(w, program=TRAIN_STEP, *, generate_code=False):
        plain_chunks = w.model.q_chunk is None and w.settings.remat_group == 1
        spent = {OTHER: Seconds(overlapped=seconds.get(w.model.head_groups, 20.0) if plain_chunks else 20.0)}
        e = estimate_of(w, fits=w.model.head_groups != refused)
        return replace(e, schedule=replace(e.schedule, purposes=spent))

    monkeypatch.setattr(run_estimate, "compile_apart", compile_apart)
    monkeypatch.setattr(targets, "find_spec", lambda name: "there")
    found = plan(goal("llama_7b", GPUS, 2**17), asked())
    assert found.chosen.workload.model.head_groups == expected


def test_neighbours_halve_and_double():
    """Groups of heads that divide the heads of a tp rank, layers of a remat group, chunks: none of them twice."""
    (middle,) = (
        c
        for c in candidates(goal("llama_7b", GPUS, 2**17))
        if c.workload.mesh_dim == "1,1,1,8"
        and c.workload.settings == MemorySettings(head_groups=8)
        and not c.workload.model.offload
        and (c.workload.model.layout, c.workload.model.remat, c.workload.model.kernel) == ("zigzag", "full", "xla")
    )
    plain = [c.workload for c in neighbours(middle) if (c.workload.model.ulysses, c.workload.model.ring) == PLAIN]
    assert [w.settings for w in plain] == [MemorySettings(head_groups=g) for g in (16, 4)] + [MemorySettings(8, 2)] + [
        MemorySettings(8, q_chunk=c, k_chunk=c) for c in (2048, 512)
    ]


def test_neighbours_exchange_heads_among_half_or_twice_the_devices_or_have_another_ring():
    """Unless that is much slower by the closed form: the plain ring of 7B at 64K is."""
    whole = replace(goal("llama_7b", find_target("v5p-128"), 2**16), batch_size=1)
    mesh = next(meshes(whole))
    (eight,) = (c for c in weighed(mesh) if (c.workload.model.ulysses, c.workload.model.ring) == (8, "one_way"))
    found = [(c.workload.model.ulysses, c.workload.model.ring) for c in neighbours(eight)]
    assert set(found) - {(8, "one_way")} == {(16, "one_way"), (8, "both_ways"), (8, "gathered")}
    sixteen = next(c for c in neighbours(eight) if c.workload.model.ulysses == 16)
    assert sixteen.workload.model.q_chunk > mesh.with_kernel()[0].model.q_chunk  # chosen for the longer shard


ONE_SEQUENCE = [
    ("llama3_8b", "v5p-128", 2**16, {(4, "one_way")}),
    ("llama_7b", "v5p-128", 2**16, {(16, "one_way")}),
    ("llama3_8b", "v5e-16", 2**17, {PLAIN}),
    ("llama_13b", "32xH100", 2**19, {(8, "one_way")}),
]
"""Model, target, tokens, and the ways that a plan for one sequence may choose. Short shards want exchanged heads: 1,024
tokens on a device of v5p. 8,192 tokens with four queries a key head hide a ring. Between nodes, eight networks beat
one."""


@pytest.mark.parametrize(("model", "target", "seq_len", "ways"), ONE_SEQUENCE)
def test_the_way_to_compute_attention_follows_from_the_tokens_of_a_device(monkeypatch, model, target, seq_len, ways):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)  # by the closed form
    found = plan(replace(goal(model, find_target(target), seq_len), batch_size=1), asked())
    chosen = found.chosen.workload
    assert chosen.mesh_shape[3] == chosen.target.num_devices and chosen.batch_size == 1
    assert (chosen.model.ulysses, chosen.model.ring) in ways
    text = plan_text(found)
    assert f"--config.model.ulysses={chosen.model.ulysses} --config.model.ring={chosen.model.ring}" in text
    assert f"mesh {chosen.mesh_dim} batch 1: " in text and "plain ring" in text


@pytest.mark.parametrize(("model", "windows"), [("mistral_7b_v0.1", "window 4,096 "), ("olmo3_7b", "window 4,096 in ")])
def test_a_plan_of_a_model_with_windows_lists_its_ways(monkeypatch, model, windows):
    """On a device without a ring the plain ring is the only way."""
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    text = plan_text(plan(replace(goal(model, find_target("v5p-16"), 2**16), batch_size=8), asked()))
    (alone,) = re.findall(r"^    mesh 1,8,1,1 batch 8: plain ring [\d.]+$", text, re.MULTILINE)
    (ring,) = re.findall(r"^    mesh 1,1,1,8 batch 8: (.*)", text, re.MULTILINE)
    assert windows in text.splitlines()[0] and "window" not in alone + ring
    assert "plain ring" in ring and "ulysses 8" in ring


def test_several_sequences_shrink_their_rings(monkeypatch):
    """Eight sequences of 256K on 64 chips: four rings of 16 take less than half of the time of one ring of all. With
    heads exchanged, one ring is as fast, and the plain ring is chosen."""
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    eight = replace(goal("llama_7b", find_target("v5p-128"), 2**18), batch_size=8)
    by_ring = {mesh.mesh_shape[3]: weighed(mesh)[-1].time for mesh in meshes(eight) if mesh.mesh_shape[2] == 1}
    assert set(by_ring) == {8, 16, 32, 64} and {time.tokens for time in by_ring.values()} == {8 * 2**18}
    assert by_ring[16].step < 0.5 * by_ring[64].step  # both plain rings, the slowest way
    chosen = plan(eight, asked()).chosen.workload
    assert chosen.batch_size == 8 and chosen.mesh_shape[3] < 64 and (chosen.model.ulysses, chosen.model.ring) == PLAIN


@pytest.mark.parametrize("how", ["dies", "code is too large"])
def test_what_fails_as_machine_code_is_passed_over(monkeypatch, how):
    """And listed with the reason, of a compiler that dies or of an evaluation that has no room for its code."""
    fastest = likely(goal("llama_7b", GPUS, 2**17)).workload

    def code(w, program):
        if w != fastest or program != EVALUATION:
            return 2**20
        if how == "dies":
            raise CompilerFailure("evaluation: the compiler died (SIGABRT)")
        return 2**36

    compiler(monkeypatch, lambda workload: True, code)
    found = plan(goal("llama_7b", GPUS, 2**17), asked(generate_code=True))
    assert found.chosen.workload != fastest and not found.run.reasons_against
    (why,) = (why for c, why in found.refused if c.workload == fastest)
    assert "evaluation" in why and ("SIGABRT" in why if how == "dies" else "too much" in why)


def test_a_neighbour_that_fails_as_machine_code_leaves_its_candidate(monkeypatch):
    """Four head groups are the fastest and die; what led there is taken, and four groups are not tried twice."""
    died = []

    def compile_apart(w, program=TRAIN_STEP, *, generate_code=False):
        fastest = w.model.head_groups == 4
        if generate_code and fastest:
            died.append(w)
            raise CompilerFailure("train step: the compiler died (SIGABRT)")
        e = estimate_of(w, fits=True)
        seconds = {OTHER: Seconds(overlapped=1.0 if fastest else 10.0)}
        return replace(e, program=program, generated_code=generate_code, schedule=replace(e.schedule, purposes=seconds))

    monkeypatch.setattr(run_estimate, "compile_apart", compile_apart)
    monkeypatch.setattr(targets, "find_spec", lambda name: "there")
    first = likely(goal("llama_7b", GPUS, 2**17))
    four = next(
        c
        for c in candidates(goal("llama_7b", GPUS, 2**17))
        if c.workload == first.workload.with_settings(MemorySettings(head_groups=4))
    )
    monkeypatch.setattr(planning, "neighbours", lambda c: [four])
    found = plan(goal("llama_7b", GPUS, 2**17), asked(generate_code=True), attempts=10)
    assert found.chosen == first and not found.run.reasons_against and died == [four.workload]
    assert next(why for c, why in found.refused if c == four).endswith("the compiler died (SIGABRT)")


def test_a_compiler_that_dies_of_everything_is_no_plan(monkeypatch):
    def code(w, program):
        raise CompilerFailure("train step: the compiler died (SIGABRT)")

    compiler(monkeypatch, lambda workload: True, code)
    with pytest.raises(CompilerFailure, match="SIGABRT"):
        plan(goal("llama_7b", GPUS, 2**17), asked(generate_code=True))


def test_what_a_compiler_is_known_to_die_of_is_no_candidate():
    """33,554,432 tokens of LLaMA-3 8B on 64 chips: 4 GiB of each layer's input on each, if they are offloaded."""
    ranked = candidates(goal("llama3_8b", find_target("v5p-128"), 2**25))
    offloaded = [c for c in ranked if c.workload.model.offload and c.workload.batch_size == 1]
    assert all(c.reason_against for c in offloaded)
    assert any("bf16[524288,4096] on each device, has 4.00 GiB" in c.reason_against for c in offloaded)
    assert any(not c.reason_against for c in ranked)


def test_nothing_fits(monkeypatch):
    compiler(monkeypatch, lambda workload: False)
    found = plan(goal("llama_65b", GPUS, 2**24, "float32"), asked())
    assert found.chosen is None and "no candidate fits" in plan_text(found)


def test_a_plan_on_which_the_compiler_broke_down_is_still_told():
    """A search notes such a length without a candidate, chosen or rejected."""
    text = plan_text(Plan(goal("llama_7b", GPUS, 4096), None, None, []))
    assert "no candidate fits" in text and "the compiler broke down on every candidate" in text


def test_without_its_compiler_a_plan_is_a_closed_form_and_says_so(monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    monkeypatch.setattr(run_estimate, "compile_apart", lambda *call, **kw: pytest.fail("nothing to compile with"))
    said = []
    found = longest_plan(goal("llama_7b", GPUS, 1), asked(said.append))
    assert set(said) == {"the compiler for NVIDIA A100-SXM4-80GB is missing: pip install 'jax[cuda13]'"}
    assert found.chosen.peak <= GPUS.budget
    text = plan_text(found)
    assert "  closed form, not compiled: " in text and f"--config.seq_len={found.seq_len}" in text
    assert any(why.endswith("slower (modelled)") for _, why in found.refused)


def test_a_plan_says_what_its_seconds_are(monkeypatch):
    """Compiled, and by the closed form: FLOPs at a stated share of the peak, in attention and elsewhere."""
    compiler(monkeypatch, lambda workload: True)
    plans = plan(goal("llama_7b", GPUS, 2**15), asked())
    pretended = "tokens/s (FLOPs at 55% of the peak in attention, 85% elsewhere (machine code: "
    assert pretended in plan_text(plans)
    counted = "FLOPs at 61% of the peak in attention, 85% elsewhere (assumed: cuDNN's those of NVIDIA's table of H200"
    assert f"tokens/s (closed form: {counted}" in plan_text(plans._replace(run=None))


@pytest.mark.slow
def test_logits_that_spill_cost_their_bytes():
    """On v5e four groups of heads keep a chunk pair's logits on the chip, one does not: that takes over twice as long,
    and is not the fastest. On v5p both spill."""
    for name, spills in (("v5e-256", False), ("v5p-128", True)):
        ranked = candidates(goal("llama_7b", find_target(name), 2**22))
        seconds = {
            c.workload.model.head_groups: c.seconds_per_token
            for c in reversed(ranked)
            if c.workload.mesh_shape[3] == c.workload.target.num_devices
            and c.workload.model.layout == "zigzag"
            and c.workload.settings.remat_group == 1
            and not c.workload.model.q_chunk
        }
        assert seconds[1] == pytest.approx(seconds[4], rel=0.05) if spills else seconds[1] > 2 * seconds[4]


def test_lengths_that_no_mesh_divides():
    with pytest.raises(ValueError, match="no mesh of 8xA100-80 can divide sequences of 1001 tokens"):
        plan(goal("llama_7b", GPUS, 1001), asked())
    for length in (0, -4096):
        with pytest.raises(ValueError, match=f"seq_len={length} must be at least 1"):
            plan(goal("llama_7b", GPUS, length), asked())


@pytest.mark.slow
def test_kernels_are_candidates():
    """The chip's own is the fastest, with its chunks; XLA's blocks are there too, and need no chunk flags."""
    for target, kernel, chunk in ((GPUS, "cudnn", None), (find_target("v5e-256"), "pallas", 2048)):
        ranked = candidates(goal("llama_7b", target, 2**22))
        assert {c.workload.model.kernel for c in ranked} == {kernel, "xla"}
        assert (ranked[0].workload.model.kernel, ranked[0].workload.model.q_chunk) == (kernel, chunk)
        assert f"zigzag {kernel} " in str(ranked[0])
        plans = Plan(goal("llama_7b", target, 2**22), ranked[0], None, [])
        assert "q_chunk" not in plan_text(plans) and "kernel=" not in plan_text(plans)  # auto chooses both
        slower = next(c for c in ranked if c.workload.model.kernel == "xla")
        assert "--config.model.kernel=xla" in plan_text(plans._replace(chosen=slower))


def test_layouts_and_chunks_are_candidates():
    """Zigzag is the fastest; halves of the usual chunks need less memory. In float32 there is no kernel."""
    whole = goal("llama_7b", GPUS, 2**17)
    ranked = candidates(replace(whole, model=replace(whole.model, compute_dtype="float32")))
    fastest = ranked[0]
    assert fastest.workload.model.layout == "zigzag" and {c.workload.model.layout for c in ranked} == set(VISIBLE)
    smaller = fastest.workload.with_settings(MemorySettings(q_chunk=512, k_chunk=512))
    (halved,) = (c for c in ranked if c.workload == smaller)
    assert halved.peak < fastest.peak and halved.seconds_per_token > fastest.seconds_per_token
    assert " chunk 512 " in str(halved)
