"""Costs of layers of several kinds, in closed forms and in programs compiled for a TPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from ringformer.estimate.choices.candidates import candidates
from ringformer.estimate.closed_forms.communication import exposed_seconds
from ringformer.estimate.closed_forms.training import (
    attention_seconds,
    computation_seconds,
    hop_bytes,
    window_seconds,
)
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import described, preset_workload
from ringformer.models.flops import executed_attention_flops, executed_flops, forward_runs, model_flops_per_token
from ringformer.models.kernel_choice import with_kernel
from ringformer.models.registry import preset_config
from ringformer.runs.config import DataConfig
from tests.hlo import on_tpu

T = 2**15
SMALL = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_heads": 4, "num_kv_heads": 2}
SMALL |= {"num_layers": 13, "window": 1024, "layer_types": "WWWWWF"}


def gemma(target="v5e-8", **changes):
    model = replace(preset_config("gemma3_1b", **SMALL | changes), compute_dtype="bfloat16")
    workload = preset_workload("gemma3_1b", find_target(target), T)
    return replace(workload, model=model).with_kernel()[0]


def test_seconds_and_waits_are_sums_over_the_kinds():
    """Eleven layers in a window and two without: as models of these layers alone."""
    mixed, full = gemma(), gemma(layer_types="F", window=0, num_layers=2)
    assert mixed.windows == {1024: 11, 0: 2}
    chunks = {"q_chunk": 512, "k_chunk": 512}
    windowed = replace(
        gemma(layer_types="W", num_layers=11), model=replace(gemma(layer_types="W").model, num_layers=11)
    )
    windowed = replace(windowed, model=replace(windowed.model, **chunks))
    for name, seconds in attention_seconds(mixed).items():
        parts = attention_seconds(full)[name], attention_seconds(windowed)[name]
        assert seconds == pytest.approx(sum(parts))
        assert window_seconds(mixed, 0, 2)[name] == pytest.approx(parts[0])
    waits = [exposed_seconds(w)["ring"] for w in (mixed, full, windowed)]
    assert waits[0] == pytest.approx(waits[1] + waits[2])


@pytest.mark.slow
@on_tpu
def test_a_compiled_step_has_the_flops_and_bytes_of_its_kinds():
    """FLOPs within the chunks that cover the masks; permuted bytes of the full layers' hops and the windows' keys."""
    workload = gemma()
    step = compile_apart(workload)
    schedule, model = step.schedule, workload.model
    needed = executed_flops(model, T) / 8
    excess = executed_attention_flops(model, T) / 8
    assert needed <= schedule.flops <= needed + 0.5 * excess
    passes = forward_runs(model)[1], 1
    local = T // 8
    keys, both = (hop_bytes(model, local, backward=backward) for backward in (False, True))
    full = 2 * 7 * (passes[0] * keys + both)
    part = 1023 / local  # of a shard's tokens, of either part of zigzag
    windowed = 11 * 2 * part * (passes[0] * keys + both)
    moved = schedule.hidden_permute_bytes + schedule.exposed_permute_bytes
    assert moved == pytest.approx(full + windowed, rel=0.1)


def test_xla_computes_windows_of_packed_documents_on_gpus():
    """cuDNN computes windows without segment ids; the line on the kernel says so."""
    model = preset_config("gemma3_12b", head_dim=128)
    place = "gpu", find_target("8xH100").chip, 2**16
    chosen, line = with_kernel(model, *place, True, 8)
    assert chosen.kernel == "cudnn" and "xla computes the 40 layers with a window" in line
    chosen, line = with_kernel(model, *place, False, 8)
    assert chosen.kernel == "cudnn" and "window" not in line
    alone, line = with_kernel(preset_config("mistral_7b_v0.1"), *place, True, 8)
    assert alone.kernel == "xla" and "cudnn" in line


@pytest.mark.parametrize("name", ["olmo3_7b", "gemma3_12b", "gemma3_27b"])
def test_the_page_has_the_seconds_of_windows_on_gpus(name):
    """At 128K on 8xH100: with segment ids, XLA computes the windows; without, cuDNN does."""
    tokens = 2**17
    packed = preset_workload(name, find_target("8xH100"), tokens, remat="attention", compute_dtype="bfloat16")
    data = DataConfig(store="documents", packed_attention="sequence")
    workloads = [w.with_kernel()[0] for w in (packed, replace(packed, data=data))]
    (window, layers), *_ = [item for item in workloads[0].windows.items() if item[0]]
    peak = workloads[0].target.chip.flops("bfloat16")
    due = model_flops_per_token(workloads[0].model, tokens, causal=True) * tokens / 8
    seconds = [sum(window_seconds(w, window, layers).values()) for w in workloads]
    mfu = [due / peak / computation_seconds(w) for w in workloads]
    row = f"| {name} | {window:,} in {layers} of {workloads[0].model.num_layers} layers "
    row += f"| {seconds[0]:.2f} | {seconds[1]:.2f} | {mfu[0]:.1%} | {mfu[1]:.1%} |"
    assert row in (Path(__file__).parents[2] / "docs" / "performance.md").read_text()


def test_candidates_leave_out_what_a_family_has_not():
    """Striped shards have no windows, and a norm over all heads no groups of heads."""
    workload = preset_workload("olmo3_7b", find_target("v5e-64"), 2**18)
    found = candidates(replace(workload, batch_size=0))
    assert {c.workload.model.layout for c in found} == {"zigzag", "contiguous"}
    assert {c.workload.model.head_groups for c in found} == {1}


def test_reports_name_the_windows():
    assert described(preset_config("gemma3_12b")) == "window 1,024 in 40 of 48 layers"
    assert described(preset_config("mistral_7b_v0.1")) == "window 4,096"
