"""The search over lengths, with a compiler that is a formula."""

from dataclasses import replace

import pytest

from ringformer.estimate.choices import memory_settings
from ringformer.estimate.choices.memory_settings import likely_settings, possible_settings
from ringformer.estimate.closed_forms.training import computation_time, peak_bytes
from ringformer.estimate.compiler.program_estimate import Estimate
from ringformer.estimate.reports import run_estimate
from ringformer.estimate.search.longest_context import (
    attempt,
    counted_longest_within,
    longest_start,
    longest_within,
    next_length,
)
from ringformer.estimate.seconds.link_loads import Network
from ringformer.estimate.seconds.overlap import Schedule
from ringformer.estimate.seconds.program_seconds import OTHER, Rates, Seconds
from ringformer.estimate.workloads.programs import EVALUATION, PROGRAMS, TRAIN_STEP
from ringformer.estimate.workloads.training import Workload
from ringformer.paper.cells import cells


def estimate_of(workload: Workload, *, fits: bool, peak_bytes: int = 2**30, host_bytes: int = 0) -> Estimate:
    """An estimate by a compiler that is a formula; its step takes a second."""
    return Estimate(
        fits=fits,
        peak_bytes=peak_bytes,
        hbm_bytes=workload.target.chip.hbm_bytes,
        budget=workload.target.budget,
        host_bytes=host_bytes,
        usual_host_bytes=workload.target.chip.host_bytes,
        argument_bytes=0,
        temp_bytes=peak_bytes,
        max_link_hops=1,
        compile_seconds=1.0,
        schedule=Schedule([], 0.6, Rates(1.0, Network((), 1.0), 1.0, 0.0), {OTHER: Seconds(overlapped=1.0)}),
    )


def tried(*results):
    return [{"seq_len": n, "fits": fits} for n, fits in results]


def test_next_length():
    assert next_length([], 4096) == 4096
    assert next_length(tried((4096, True)), 4096) == 8192
    assert next_length(tried((4096, False)), 4096) == 2048
    assert next_length(tried((4096, True), (8192, False)), 4096) is None
    assert next_length(tried((4096, False), (2048, True)), 4096) is None
    assert next_length(tried((1024, False)), 4096) is None  # nothing fits


def test_what_a_usual_host_cannot_hold_does_not_fit(monkeypatch):
    """16 KiB a token here: 42 GiB of a v5e's host end before the compiler's limit."""
    monkeypatch.setattr(
        memory_settings,
        "compile_apart",
        lambda w, generate_code: estimate_of(w, fits=True, host_bytes=w.seq_len * 2**14),
    )
    (cell,) = (cell for cell in cells() if cell.name == "v5e-256/7b/ring/offload/m=1")
    said = []
    answers = [attempt(cell.workload(n), said.append) for n in (2**20, 2**21, 2**22)]
    assert [(a["fits"], a["fits_host"]) for a in answers] == [(True, True), (True, True), (False, False)]
    assert said[0] == answers[0]["command"] and "collectives" not in answers[0]


def test_the_longest_within_a_time_is_one_that_fits():
    found = [(1024, True, 1.0), (2048, True, 10.0), (4096, True, 11.0), (8192, False, 10.0), (16384, False, None)]
    attempts = [{"seq_len": n, "fits": fits, "step_seconds_model": seconds} for n, fits, seconds in found]
    assert longest_within(attempts, 10.0)["seq_len"] == 2048
    assert longest_within(attempts)["seq_len"] == 4096
    assert longest_within(attempts, 0.5) is None and longest_within([]) is None


def test_what_was_not_compiled_is_counted():
    """The closed form's longest: its step takes at most so long, and that of the double takes longer."""
    (cell,) = (cell for cell in cells() if cell.name == "v5e-256/7b/ring/bfloat16/m=1")
    length = counted_longest_within(cell.workload(2**26), 3600.0)
    both = (cell.workload(n) for n in (length, 2 * length))
    quick, slow = (computation_time(w.with_settings(likely_settings(w)[0])).step for w in both)
    assert quick <= 3600 < slow
    assert counted_longest_within(cell.workload(length // 4), 3600.0) == length // 4
    assert counted_longest_within(cell.workload(2**26), 1e-9) is None


def test_an_attempt_says_which_programs_were_judged(monkeypatch):
    """The train step, or all of a run; then an evaluation that does not fit is a run that does not."""
    monkeypatch.setattr(memory_settings, "compile_apart", lambda w, generate_code: estimate_of(w, fits=True))
    monkeypatch.setattr(
        run_estimate,
        "compile_apart",
        lambda w, program, generate_code: replace(estimate_of(w, fits=program != EVALUATION), program=program),
    )
    (cell,) = (cell for cell in cells() if cell.name == "v5e-256/7b/ring/offload/m=1")
    step, run = (attempt(cell.workload(2**20), lambda line: None, whole_run=whole) for whole in (False, True))
    assert step["fits"] and [p["program"] for p in step["programs"]] == [TRAIN_STEP]
    assert not run["fits"] and [p["program"] for p in run["programs"]] == list(PROGRAMS)


@pytest.mark.parametrize("attention", ["ring", "blockwise"])
def test_the_search_begins_at_the_longest_that_the_closed_form_lets_fit(attention):
    (cell,) = (
        cell
        for cell in cells()
        if cell.row.name == "v5e-256/7b"
        and cell.attention == attention
        and cell.regime.name == "float32"
        and cell.sequences != 1
    )
    workload = cell.workload(1024)
    length = longest_start(workload)
    settings = list(possible_settings(workload.model)) if attention == "ring" else [workload.settings]
    for seq_len, fits in ((length, True), (2 * length, False)):
        there = replace(workload, seq_len=seq_len)
        assert fits == any(peak_bytes(there.with_settings(s)) <= workload.target.budget for s in settings)
