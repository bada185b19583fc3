"""Proposals of an estimate: a cure for a slow step, and keeping the outputs of attention where they fit."""

from dataclasses import replace

import pytest

from ringformer.estimate.closed_forms.training import StepTime, computation_seconds, peak_bytes
from ringformer.estimate.reports.advice import advice
from ringformer.estimate.seconds.overlap import Transfer
from ringformer.estimate.seconds.transfers import ACROSS_GROUPS
from ringformer.estimate.workloads.targets import find_target, with_group_network
from ringformer.estimate.workloads.training import preset_workload
from tests.estimate.search.test_longest_context import estimate_of


def lines(
    seconds=1e6, exposed=0.0, target="8xH100", seq_len=2**17, peak=None, mesh_dim="1,1,1,-1", batch_size=1, **settings
):
    workload = preset_workload("llama3.1_8b", find_target(target), seq_len, **settings)
    workload = replace(workload, mesh_dim=mesh_dim, batch_size=batch_size).with_kernel()[0]
    estimate = estimate_of(workload, fits=True, peak_bytes=round(peak_bytes(workload) if peak is None else peak))
    return advice(workload, estimate, StepTime(seconds, exposed, workload.step_tokens))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"kernel": "xla"}, "MFU is 0%: set kernel=auto, which is cudnn here"),
        ({"layout": "striped"}, "attention runs in XLA's blocks (kernel='cudnn' takes segment ids in the layouts"),
        ({"compute_dtype": "float32"}, "set compute_dtype=bfloat16"),
        ({"exposed": 1e6}, "50% of the step is exposed communication, with 16,384 tokens per rank: use a smaller ring"),
        ({}, "train longer sequences or more of them per step"),
        ({"target": "v3-8"}, "needs Mosaic, which cannot compile it for TPU v3 core"),
    ],
)
def test_a_slow_step_has_a_cure(settings, line):
    slow = lines(**settings)
    assert line in slow[0] and slow[0].startswith("MFU is 0%: ")


def test_what_crosses_between_groups_is_amortised_by_more_sequences():
    workload = preset_workload("llama3_8b", with_group_network(find_target("2x8xH100"), 1.6), 2**13).with_kernel()[0]
    estimate = estimate_of(workload, fits=True)
    assert estimate.schedule is not None
    for wait, cure in ((3e5, "use a smaller ring than sp=8"), (6e5, "train more sequences per step")):
        sent = Transfer(ACROSS_GROUPS, "f32", (1,), 1, 4, True, wait, 0.0, wait, False, "")
        waiting = replace(estimate, schedule=replace(estimate.schedule, transfers=[sent]))
        line = advice(workload, waiting, StepTime(1e6, 1e6, workload.step_tokens))[0]
        assert cure in line, line


def test_short_shards_exchange_heads():
    """1,024 tokens on a device; a step that does exchange them gets no such line."""
    short = {"exposed": 1e6, "target": "v5p-128", "seq_len": 2**16}
    assert "use ulysses=4 or a smaller ring than sp=64" in lines(**short)[0]
    assert "use a smaller ring than sp=64" in lines(**short, ulysses=16)[0]


def test_a_fast_step_needs_none():
    assert lines(seconds=10.0, remat="feedforward") == []


def should_fit(remat: str, before: str) -> str:
    """The proposal to keep more at 128K, in memory and computation by the closed forms."""
    workload = preset_workload("llama3.1_8b", find_target("8xH100"), 2**17).with_kernel()[0]
    kept, less = (replace(workload, model=replace(workload.model, remat=name)) for name in (remat, before))
    share = computation_seconds(kept) / computation_seconds(less)
    assert 0.7 < share < 0.96
    return f"remat={remat} should fit ({peak_bytes(kept) / 2**30:.1f} GiB) and take {share:.0%} of the computation"


def test_more_is_kept_where_it_fits():
    """The feed-forward's products, else the outputs of attention on the device, else those in host memory, else nothing
    more; bytes by the closed form, corrected by what was compiled."""
    assert lines(seconds=10.0) == [should_fit("feedforward", "full")]
    assert lines(seconds=10.0, remat="attention") == [should_fit("feedforward", "attention")]
    (line,) = lines(seconds=10.0, peak=52 * 2**30)
    assert line.startswith("remat=attention should fit (")
    (line,) = lines(seconds=10.0, peak=70 * 2**30)
    assert line.startswith("remat=attention with offload should fit (") and "GiB of host memory) and take" in line
    assert lines(seconds=10.0, peak=200 * 2**30) == []


def test_advice_can_be_followed():
    """Without a ring, with groups of heads, and for attention that has no kernel."""
    (line, *_) = lines(exposed=1e6, mesh_dim="1,8,1,1", batch_size=8)
    assert "smaller ring" not in line and "longer sequences or more of them per step, or use a smaller tp" in line
    (line,) = lines(seconds=10.0, head_groups=4, offload=True)
    assert line.startswith("remat=feedforward without offload should fit (")
    (line,) = lines(seconds=10.0, head_groups=4, offload=True, peak=30 * 2**30)
    assert line.startswith("remat=attention should fit (")
    assert "vanilla attention materializes all logits" in lines(attention="vanilla", kernel="xla")[0]
