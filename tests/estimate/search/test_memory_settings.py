"""Which memory settings are tried, and which one is kept."""

from dataclasses import replace

import pytest

from ringformer.estimate.choices import memory_settings
from ringformer.estimate.choices.memory_settings import compile_first_accepted, likely_settings, possible_settings
from ringformer.estimate.closed_forms.training import peak_bytes
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import MemorySettings, Workload
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
