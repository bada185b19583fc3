"""The search over lengths, with a compiler that is a formula."""

from dataclasses import replace

import pytest

from ringformer.estimate import memory_settings
from ringformer.estimate.closed_forms import peak_bytes
from ringformer.estimate.longest_context import attempt, longest_start, next_length
from ringformer.estimate.memory_settings import possible_settings
from ringformer.estimate.overlap import Rates, Schedule
from ringformer.estimate.program_estimate import Estimate
from ringformer.estimate.workload import Workload
from ringformer.paper.max_context import cells


def estimate_of(workload: Workload, *, fits: bool, peak_bytes: int = 2**30, host_bytes: int = 0) -> Estimate:
    """An estimate by a compiler that is a formula; its step takes a second."""
    return Estimate(
        fits=fits, peak_bytes=peak_bytes, hbm_bytes=workload.target.chip.hbm_bytes, budget=workload.target.budget,
        host_bytes=host_bytes, usual_host_bytes=workload.target.chip.host_bytes, argument_bytes=0,
        temp_bytes=peak_bytes, schedule=Schedule([], 0.6, Rates(1.0, 1.0, 1.0)), max_link_hops=1, compile_seconds=1.0,
    )  # fmt: skip


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
        memory_settings, "compile_apart",
        lambda w, generate_code: estimate_of(w, fits=True, host_bytes=w.seq_len * 2**14),
    )  # fmt: skip
    (cell,) = (cell for cell in cells() if cell.name == "v5e-256/7b/ring/offload/m=1")
    said = []
    answers = [attempt(cell.workload(n), said.append) for n in (2**20, 2**21, 2**22)]
    assert [(a["fits"], a["fits_host"]) for a in answers] == [(True, True), (True, True), (False, False)]
    assert said[0] == answers[0]["command"] and "collectives" not in answers[0]


@pytest.mark.parametrize("attention", ["ring", "blockwise"])
def test_the_search_begins_at_the_longest_that_the_closed_form_lets_fit(attention):
    (cell,) = (cell for cell in cells() if cell.row.name == "v5e-256/7b" and cell.attention == attention
               and cell.regime.name == "float32" and cell.sequences != 1)  # fmt: skip
    workload = cell.workload(1024)
    length = longest_start(workload)
    settings = list(possible_settings(workload.model)) if attention == "ring" else [workload.settings]
    for seq_len, fits in ((length, True), (2 * length, False)):
        there = replace(workload, seq_len=seq_len)
        assert fits == any(peak_bytes(there.with_settings(s)) <= workload.target.budget for s in settings)
