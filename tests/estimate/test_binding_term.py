"""A report on a workload that does not fit: the term that binds, and what would change it, by closed forms."""

from dataclasses import replace

import pytest

from ringformer.estimate.choices.candidates import counted, offloading
from ringformer.estimate.closed_forms.training import memory, peak_bytes
from ringformer.estimate.reports.binding_term import ADAPTERS, binding_text, held_by_host, remedies, twice_as_large
from ringformer.estimate.workloads.targets import find_target, with_host_memory
from ringformer.estimate.workloads.training import preset_workload
from ringformer.hardware import GiB
from ringformer.runs.config import OptimizerConfig

MOMENTS = OptimizerConfig(offload="moments")


def workload(model: str, target: str, seq_len: int, **settings):
    return preset_workload(model, find_target(target), seq_len, **settings).with_kernel()[0]


def test_a_model_whose_state_fills_the_devices_says_so_at_any_length():
    """Qwen3-32B on 8xH100: half the sequence changes nothing, and is not proposed."""
    lines = binding_text(workload("qwen3_32b", "8xH100", 1024))
    assert "weights, moments and gradients, 76.3 of 72.9 GiB" in lines[0] and "so no length fits" in lines[0]
    assert [line.split(": ")[0].strip() for line in lines[2:]] == [
        "optimizer.offload=moments",
        "optimizer.offload=state",
        "optimizer.offload=all",
        "adapters (lora.rank=16, bfloat16 base)",
        "16xH100",
    ]
    assert "-30.5 GiB, +0.52 s a step; should fit" in lines[2]


@pytest.mark.parametrize("seq_len", [2**20, 2**22])
def test_the_numbers_are_those_of_the_workloads_that_are_proposed(seq_len):
    w = workload("llama_7b", "v5e-16", seq_len)
    lines = binding_text(w)
    offloaded = replace(w, optimizer=MOMENTS)
    saved = peak_bytes(w) - peak_bytes(offloaded)
    assert saved == pytest.approx(8 * w.trained_params / 16)
    longer = counted(offloaded).time.step - counted(w).time.step
    assert longer == pytest.approx(saved / w.target.chip.host_bandwidth, rel=1e-6)
    assert f"optimizer.offload=moments: {-saved / GiB:+.1f} GiB, {longer:+,.2f} s a step" in lines[2]
    adapters = peak_bytes(replace(w, lora=ADAPTERS)) - peak_bytes(w)
    assert f"{adapters / GiB:+.1f} GiB" in lines[5]
    half = peak_bytes(replace(w, seq_len=seq_len // 2))
    assert f"{seq_len // 2:,} tokens: {(half - peak_bytes(w)) / GiB:+.1f} GiB" in lines[-1]
    assert ("should fit" in lines[-1]) == (half <= w.target.budget)


def test_the_largest_part_is_named():
    w = workload("llama_7b", "v5e-16", 2**22)
    parts = memory(w)
    largest = max(parts, key=lambda name: parts[name])
    assert f"{largest}, {parts[largest] / GiB:.1f} of 15.8 GiB" in binding_text(w)[0]


def test_the_host_binds_too_and_host_gib_changes_that():
    w = workload("llama_7b", "v5e-16", 2**19, offload=True, head_groups=8)
    small = replace(w, target=with_host_memory(w.target, 10))
    assert binding_text(w) == []
    assert "what binds is the host's memory" in binding_text(small)[0] and "of 10" in binding_text(small)[0]


def of_host_alone(model: str, target: str, seq_len: int, host_gib: float | None, **settings):
    """A workload with its state in host memory, which is what binds."""
    settings = {"offload": True, "fetch_ahead": False, "head_groups": 4, "remat": "attention"} | settings
    w = replace(workload(model, target, seq_len, **settings), mesh_dim="1,1,2,4")
    return offloading(replace(w, target=with_host_memory(w.target, host_gib)), "state")


def test_what_would_change_the_hosts_memory_is_counted_there():
    """Qwen3-32B at 1M with all of attention's outputs: each proposal needs less of the host."""
    w = of_host_alone("qwen3_32b", "8xH100", 2**20, None)
    lines = binding_text(w)
    assert "what binds is the host's memory: 303.5 GiB" in lines[0]
    assert [line.split(": ")[0].strip() for line in lines[2:]] == [
        "optimizer.offload=moments",
        "optimizer.offload=none",
        "model.full_remat_layers=26",
        "adapters (lora.rank=16, bfloat16 base)",
        "16xH100",
        "524,288 tokens",
    ]
    for words, other in remedies(w, of_host=True):
        other.check()
        assert held_by_host(other) < held_by_host(w), words
    some = dict(remedies(w, of_host=True))["model.full_remat_layers=26"]
    more = (held_by_host(some) - held_by_host(w)) / GiB
    (line,) = [line for line in lines if "full_remat_layers" in line]
    assert f": {more:+.1f} GiB, +" in line and line.endswith("should fit") and binding_text(some) == []


def test_where_no_layers_can_be_chosen_all_recompute():
    """Layers of several kinds, which keep too much."""
    w = of_host_alone("gemma3_27b", "8xH100", 2**20, 150)
    proposed = dict(remedies(w, of_host=True))
    assert held_by_host(proposed["model.remat=full"]) < held_by_host(w)
    assert not any("full_remat_layers" in words for words in proposed)


def test_what_a_compiler_needed_more_counts():
    w = workload("llama_7b", "v5e-256", 2**20)
    excess = 1.01 * w.target.budget / peak_bytes(w)
    lines = binding_text(w, excess)
    assert "what binds is the device's memory" in lines[0] and f"needed {excess:.2f} times" in lines[1]
    assert "should fit" in lines[3]


def test_what_fits_binds_nothing():
    assert binding_text(workload("llama_7b", "v5e-256", 2**20)) == []


@pytest.mark.parametrize(
    ("target", "larger"),
    [
        ("8xH100", "16xH100"),
        ("1xH100", "2xH100"),
        ("v5e-16", "v5e-32"),
        ("v4-1024", "v4-2048"),
        ("v5e-256", None),
        ("6xH100", None),
        ("4xH100", "8xH100"),
    ],
)
def test_twice_as_large(target, larger):
    found = twice_as_large(find_target(target))
    assert (found and found.name) == larger


def test_host_memory_must_be_some():
    with pytest.raises(ValueError, match="--host_gib=0 must be positive"):
        with_host_memory(find_target("8xH100"), 0)


def test_what_is_proposed_is_accepted():
    """Adapters train in float32 even where weights did not, and have no gradients that could leave."""
    w = workload("llama3_70b", "4xH100", 8192)
    narrow = replace(w, optimizer=OptimizerConfig(params_dtype="bfloat16"))
    for words, other in remedies(narrow):
        other.check()
        assert peak_bytes(other) < peak_bytes(narrow), words
    adapted = [words for words, _ in remedies(replace(w, lora=ADAPTERS))]
    assert sum("offload" in words for words in adapted) <= 1
