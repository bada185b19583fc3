"""Which memory settings are tried, and which one is kept."""

from dataclasses import replace

import pytest

from ringformer.estimate.choices import memory_settings
from ringformer.estimate.choices.candidates import candidates, counted, neighbours, offloading
from ringformer.estimate.choices.memory_settings import (
    compile_first_accepted,
    likely_settings,
    possible_settings,
    with_outputs_that_fit,
)
from ringformer.estimate.closed_forms.training import computation_seconds, host_bytes, peak_bytes, state_bytes
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import MemorySettings, Workload, preset_workload
from ringformer.models.families.llama import LlamaConfig, preset

WORKLOAD = Workload(LlamaConfig(**preset("llama_7b")), find_target("v5e-256"), "1,1,1,256", 2**23)


@pytest.mark.parametrize("name", ["llama_3b", "llama_7b", "llama_13b", "llama_30b", "llama_65b", "llama3_8b"])
def test_settings_are_such_as_the_model_takes(name):
    settings = list(possible_settings(LlamaConfig(**preset(name))))
    assert settings[0] == MemorySettings() and len(set(settings)) == len(settings) >= 3
    for s in settings:
        LlamaConfig(**preset(name) | vars(s))


def test_each_of_them_needs_less_memory():
    """From the fastest on; at 8M tokens of 7B on v5e-256 the first does not fit, two that should are tried, and the
    smallest ends the list."""
    peaks = [peak_bytes(WORKLOAD.with_settings(s)) for s in possible_settings(WORKLOAD.model)]
    assert peaks == sorted(peaks, reverse=True) and peaks[0] > WORKLOAD.target.budget
    *fastest, smallest = likely_settings(WORKLOAD)
    assert len(fastest) == 2
    assert all(peak_bytes(WORKLOAD.with_settings(s)) <= WORKLOAD.target.budget for s in fastest)
    assert peak_bytes(WORKLOAD.with_settings(smallest)) == peaks[-1]


def test_groups_of_heads_can_be_exchanged():
    """Each group of 16 devices has heads for all of them: 32 heads make two groups at most."""
    exchanged = replace(WORKLOAD, model=replace(WORKLOAD.model, ulysses=16))
    assert max(s.head_groups for s in likely_settings(WORKLOAD)) > 2
    assert all(s.head_groups <= 2 for s in likely_settings(exchanged))


def test_without_a_ring_only_the_chunks_that_were_asked_for():
    model = replace(WORKLOAD.model, attention="blockwise", q_chunk=512, head_groups=4)
    assert likely_settings(replace(WORKLOAD, model=model)) == [MemorySettings(q_chunk=512)]


def test_the_first_that_is_accepted_is_kept(monkeypatch):
    """And the last if none is; each is announced before it is compiled."""
    settings = [MemorySettings(g) for g in (1, 4, 8)]
    seen = []
    monkeypatch.setattr(memory_settings, "compile_apart", lambda w, generate_code: w.model.head_groups)
    for accepted, kept in ((4, 4), (16, 8)):
        seen.clear()
        workload, estimate = compile_first_accepted(
            WORKLOAD, settings, lambda e, least=accepted: e >= least, lambda w: seen.append(w.settings)
        )
        assert workload.model.head_groups == estimate == kept
        assert seen == [s for s in settings if s.head_groups <= kept]


def test_of_those_that_are_accepted_a_preferred_one_is_kept(monkeypatch):
    """Else the first of them, and not the last."""
    settings = [MemorySettings(g) for g in (1, 4, 8, 16)]
    monkeypatch.setattr(memory_settings, "compile_apart", lambda w, generate_code: w.model.head_groups)
    for preferred, kept in ((8, 8), (32, 4)):
        workload, estimate = compile_first_accepted(
            WORKLOAD, settings, lambda e: e >= 4, lambda w: None, prefers=lambda e, least=preferred: e >= least
        )
        assert workload.model.head_groups == estimate == kept


def kept_in_host(**changes) -> Workload:
    """Qwen3-32B at 1M tokens on 8xH100, with its state and what its layers keep in the host's memory."""
    settings = {"offload": True, "fetch_ahead": False, "remat": "attention", "head_groups": 4}
    workload = preset_workload("qwen3_32b", find_target("8xH100"), 2**20, **settings | changes)
    workload = replace(workload, mesh_dim="1,1,2,4", batch_size=1).with_kernel()[0]
    return offloading(workload, "state")


def of_the_host(workload: Workload) -> float:
    return host_bytes(workload) + state_bytes(workload)


def test_as_many_layers_keep_their_outputs_as_the_host_can_have():
    """One layer more does not fit; the seconds are between those of all layers and of none."""
    whole = kept_in_host()
    some = with_outputs_that_fit(whole)
    assert some is not None
    without = some.model.full_remat_layers
    assert of_the_host(some) <= whole.target.host_bytes < of_the_host(kept_in_host(full_remat_layers=without - 1))
    none = kept_in_host(remat="full")
    seconds = [computation_seconds(w) for w in (whole, some, none)]
    share = without / whole.model.num_layers
    assert seconds[1] == pytest.approx(seconds[0] + share * (seconds[2] - seconds[0]))
    assert with_outputs_that_fit(some) is None, "it fits"
    assert with_outputs_that_fit(none) is None, "it keeps no outputs"
    assert with_outputs_that_fit(offloading(whole, "all")) is None, "gradients leave from one scan"


def test_settings_of_some_kept_layers_have_no_groups_of_layers():
    model = kept_in_host(full_remat_layers=26).model
    assert {s.remat_group for s in possible_settings(model)} == {1}
    nearby = list(neighbours(counted(kept_in_host(full_remat_layers=26))))
    assert nearby and {c.workload.model.remat_group for c in nearby} == {1}


def test_a_plan_counts_them():
    """The fastest candidate that fits by the closed forms keeps the outputs of some layers, and says so."""
    goal = preset_workload("qwen3_32b", find_target("8xH100"), 2**20)
    possible = [c for c in candidates(replace(goal, batch_size=1)) if not c.reason_against]
    fastest = possible[0].workload.model
    assert fastest.remat == "attention" and 0 < fastest.full_remat_layers < fastest.num_layers
    assert f"full_remat_layers {fastest.full_remat_layers}" in str(possible[0])
