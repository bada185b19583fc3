"""Settings that an estimate proposes: a faster rematerialisation, and a remedy for a slow step."""

from dataclasses import replace

from ringformer.estimate.choices.candidates import promising
from ringformer.estimate.choices.memory_settings import with_outputs_that_fit
from ringformer.estimate.closed_forms.training import StepTime, computation_seconds, host_bytes, peak_bytes, state_bytes
from ringformer.estimate.compiler.program_estimate import Estimate
from ringformer.estimate.reports.time_report import mfu
from ringformer.estimate.workloads.training import Workload
from ringformer.hardware import GiB
from ringformer.models.config_checks import OFFLOADABLE, Remat

SLOW = 0.2
"""MFU, with causal attention halved, below which an estimate proposes a remedy."""

EXPOSED = 1 / 3
"""Share of a step in exposed communication that explains a low MFU."""


def advice(workload: Workload, estimate: Estimate, time: StepTime) -> list[str]:
    """Return a line for each setting that should make a compiled step faster; empty for models without closed forms."""
    if not workload.has_closed_forms:
        return []
    used = mfu(workload, time)["causal"]
    lines = []
    if used < SLOW:
        lines = [f"MFU is {used:.0%}: {cure}" for cure in _cures(workload, estimate, time)]
    return lines + _rematerialisation(workload, estimate)


def _cures(workload: Workload, estimate: Estimate, time: StepTime) -> list[str]:
    model = workload.model
    if model.compute_dtype == "float32":
        return ["set compute_dtype=bfloat16; float32 has a fraction of the peak, and no kernel"]
    if model.attention == "vanilla":
        return ["use attention=ring: vanilla attention materializes all logits and uses no kernel"]
    if model.kernel == "xla":
        auto, line = replace(workload, model=replace(model, kernel="auto")).with_kernel()
        if auto.model.kernel != "xla":
            return [f"set kernel=auto, which is {auto.model.kernel} here"]
        return [f"attention runs in XLA's blocks ({line.removeprefix('kernel xla: ')})"]
    if time.exposed > EXPOSED * time.step:
        sp = workload.mesh_shape[3]
        tokens = workload.ring_tokens
        cure = "train longer sequences or more of them per step, or use a smaller tp"
        if estimate.schedule and estimate.schedule.exposed_slices_seconds > time.exposed / 2:
            cure = f"most of it crosses between {workload.target.slices_are}, once a step: {_fewer_sums(workload)}"
        elif sp > 1:
            cure = f"use {_way(workload)}a smaller ring than sp={sp}, and the other devices for more sequences (fsdp)"
        return [
            f"{time.exposed / time.step:.0%} of the step is exposed communication, with {tokens:,} tokens per rank: "
            f"{cure}"
        ]
    return ["train longer sequences or more of them per step, so that weights are read less often per token"]


def _fewer_sums(workload: Workload) -> str:
    """Return settings with which what crosses between slices takes a smaller share of a step."""
    more = "train more sequences per step"
    if workload.gradients_in_host:
        return f"{more} (batch_size)"  # such a step has one microbatch
    more += f", e.g. with accumulate={2 * workload.accumulate}"
    if workload.optimizer.reduce_dtype == "float32":
        more += ", or set optimizer.reduce_dtype=bfloat16"
    return more


def _way(workload: Workload) -> str:
    """Return settings with which attention waits less for its keys, and "or"; empty if the workload has the fastest."""
    ways = promising(workload)
    if not ways:
        return ""
    best = ways[0].model
    words = ""
    for name in ("ulysses", "ring"):
        if getattr(best, name) != getattr(workload.model, name):
            words += f"{name}={getattr(best, name)} "
    return words and f"{words}or "


def _rematerialisation(workload: Workload, estimate: Estimate) -> list[str]:
    """Propose to keep more if it should fit: the feed-forward's products, or the attention's outputs, so that the ring
    runs forward only once."""
    model = workload.model
    target = workload.target
    if model.remat not in OFFLOADABLE or model.remat_group > 1:
        return []
    above = estimate.peak_bytes / peak_bytes(workload)  # ratio of the compiler's bytes to the closed form's
    kept: list[tuple[Remat, bool]] = [("feedforward", False)]
    if model.remat == "full":
        kept += [("attention", model.offload), ("attention", True)]
    for remat, offload in kept:
        other = replace(model, remat=remat, offload=offload, full_remat_layers=0)
        faster = replace(workload, model=other)
        faster = with_outputs_that_fit(faster) or faster
        peak = above * peak_bytes(faster)
        host = host_bytes(faster)
        if peak <= target.budget and host + state_bytes(faster) <= target.host_bytes:
            ratio = computation_seconds(faster) / computation_seconds(workload)
            settings = f"remat={remat}"
            if offload != model.offload:
                settings += " with offload" if offload else " without offload"
            if faster.model.full_remat_layers:
                settings += f" and full_remat_layers={faster.model.full_remat_layers}"
            held = f", {host / GiB:.1f} GiB of host memory" if offload else ""
            return [f"{settings} should fit ({peak / GiB:.1f} GiB{held}) and take {ratio:.0%} of the computation"]
    return []
