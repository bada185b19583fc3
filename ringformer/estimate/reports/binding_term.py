"""The term that keeps a run from fitting, and what would change it, in numbers of the closed forms."""

from collections.abc import Iterator
from dataclasses import replace

from ringformer.estimate.choices.candidates import counted, offloading, parts_in_host
from ringformer.estimate.choices.memory_settings import with_outputs_that_fit
from ringformer.estimate.closed_forms.training import memory, peak_bytes, state_bytes
from ringformer.estimate.workloads.targets import Target, find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.hardware import GPUS_OF_A_NODE, SLICES, GiB
from ringformer.parallel.lora import LoraConfig

ADAPTERS = LoraConfig(rank=16, base_dtype="bfloat16")
"""Adapters that a report proposes."""

AT_ANY_LENGTH = {
    "parameters, optimizer and gradients": "weights, moments and gradients",
    "weights of a layer, their gradients, embedding gradient": "one layer's gathered weights and gradients",
}
"""Parts of `memory` that do not depend on the sequence."""


def binding_text(workload: Workload, excess: float = 1.0) -> list[str]:
    """Return lines that name what a workload has too little of, and what would change that; empty if it fits.

    Args:
      excess: factor by which a compiler's bytes exceeded those of the closed form.
    """
    target = workload.target
    candidate = counted(workload)
    host = candidate.host + state_bytes(workload)
    if candidate.peak * excess > target.budget:
        lines = [f"  what binds is the device's memory: {_largest(workload)}"]
        if excess > 1:
            lines.append(f"  the compiler needed {excess:.2f} times the closed form, which counts below")
    elif host > target.host_bytes:
        lines = [
            f"  what binds is the host's memory: {host / GiB:.1f} GiB for each device ({candidate.host / GiB:.1f} "
            f"offloaded, {state_bytes(workload) / GiB:.1f} for a save), of {target.host_bytes / GiB:.0f}"
        ]
    else:
        return []
    lines.append("  what would change that (closed forms):")
    for words, other in remedies(workload):
        lines.append(f"    {words}: {_difference(workload, other, excess)}")
    return lines


def _largest(workload: Workload) -> str:
    """Name the largest part of the memory, and what does not depend on the length."""
    parts = memory(workload)
    name = max(parts, key=lambda part: parts[part])
    budget = workload.target.budget
    fixed = at_any_length(workload)
    largest = f"{AT_ANY_LENGTH.get(name, name)}, {parts[name] / GiB:.1f} of {budget / GiB:.1f} GiB"
    largest += f" ({fixed / GiB:.1f} GiB do not depend on the length"
    return largest + (", so no length fits)" if fixed > budget else ")")


def at_any_length(workload: Workload) -> float:
    """Bytes of a device's memory that do not depend on the sequence."""
    parts = memory(workload)
    return sum(parts[part] for part in AT_ANY_LENGTH)


def remedies(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Yield what would reduce the memory, in words and as a workload."""
    least = peak_bytes(workload)
    for part in parts_in_host(workload):
        other = offloading(workload, part)
        if peak_bytes(other) < least:
            least = peak_bytes(other)
            yield f"optimizer.offload={part}", other
    if fewer := with_outputs_that_fit(workload):
        yield f"model.full_remat_layers={fewer.model.full_remat_layers}", fewer
    if not workload.lora.rank:
        optimizer = replace(workload.optimizer, params_dtype="float32")  # that of adapters
        words = f"adapters (lora.rank={ADAPTERS.rank}, bfloat16 base)"
        yield words, replace(workload, lora=ADAPTERS, optimizer=optimizer)
    if larger := twice_as_large(workload.target):
        dp, fsdp, tp, sp = workload.mesh_shape
        yield larger.name, replace(workload, target=larger, mesh_dim=f"{dp},{fsdp},{tp},{2 * sp}")
    shorter_fits = at_any_length(workload) < workload.target.budget
    if shorter_fits and workload.seq_len % (4 * workload.mesh_shape[3]) == 0:
        yield f"{workload.seq_len // 2:,} tokens", replace(workload, seq_len=workload.seq_len // 2)


def twice_as_large(target: Target) -> Target | None:
    """Return the target of the same chips that has twice as many, if there is one."""
    if target.slices > 1:
        return None
    if target.chip.kind == "gpu":
        twice = 2 * target.num_devices
        if twice > GPUS_OF_A_NODE and twice % GPUS_OF_A_NODE:
            return None
        return replace(find_target(f"{twice}x{target.generation}"), host_gib=target.host_gib)
    for size in SLICES[target.generation]:
        other = find_target(f"{target.generation}-{size}")
        if other.num_devices == 2 * target.num_devices:
            return replace(other, host_gib=target.host_gib)
    return None


def _difference(workload: Workload, other: Workload, excess: float) -> str:
    """Describe what another workload needs, and whether that fits."""
    candidate = counted(other)
    peak = candidate.peak * excess
    saved = (peak_bytes(workload) * excess - peak) / GiB
    words = [f"{-saved:+.1f} GiB"]
    longer = candidate.time.step - counted(workload).time.step
    if longer > 0 and other.seq_len == workload.seq_len and other.target == workload.target:
        words.append(f"{longer:+,.2f} s a step")
    if peak > other.target.budget:
        left = f"still {(peak - other.target.budget) / GiB:.1f} GiB too much"
    elif reason := candidate.impossible:
        left = reason
    else:
        left = "should fit"
    return f"{', '.join(words)}; {left}"
