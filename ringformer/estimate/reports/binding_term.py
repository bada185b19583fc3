"""The term that keeps a run from fitting, and what would change it, in numbers of the closed forms."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ringformer.estimate.choices.candidates import counted, offloading, parts_in_host
from ringformer.estimate.choices.memory_settings import with_outputs_that_fit
from ringformer.estimate.closed_forms.training import host_bytes, memory, peak_bytes, state_bytes
from ringformer.estimate.workloads.targets import Target, find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.hardware import GPUS_OF_A_NODE, SLICES, GiB
from ringformer.parallel.lora import LoraConfig
from ringformer.runs.choices import Offload

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
    host = held_by_host(workload)
    of_host = False
    if peak_bytes(workload) * excess > target.budget:
        lines = [f"  what binds is the device's memory: {_largest(workload)}"]
        if excess > 1:
            lines.append(f"  the compiler needed {excess:.2f} times the closed form, which counts below")
    elif host > target.host_bytes:
        of_host = True
        lines = [
            f"  what binds is the host's memory: {host / GiB:.1f} GiB for each device "
            f"({host_bytes(workload) / GiB:.1f} offloaded, {state_bytes(workload) / GiB:.1f} for a save), of "
            f"{target.host_bytes / GiB:.0f}"
        ]
    else:
        return []
    lines.append("  what would change that (closed forms):")
    for words, other in remedies(workload, of_host=of_host):
        lines.append(f"    {words}: {_difference(workload, other, excess, of_host=of_host)}")
    return lines


def held_by_host(workload: Workload) -> float:
    """Bytes of host memory for each device: what is offloaded, and a save's copy of the state."""
    return host_bytes(workload) + state_bytes(workload)


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


def remedies(workload: Workload, *, of_host: bool = False) -> Iterator[tuple[str, Workload]]:
    """Yield what would reduce the memory, of the device or of the host, in words and as a workload."""
    held = held_by_host if of_host else peak_bytes
    parts: Iterable[Offload] = parts_in_host(workload)
    if of_host:
        parts = reversed(("none", *parts))
    least = held(workload)
    for part in parts:
        other = offloading(workload, part)
        if held(other) < least:
            least = held(other)
            yield f"optimizer.offload={part}", other
    model = workload.model
    if fewer := with_outputs_that_fit(workload):
        yield f"model.full_remat_layers={fewer.model.full_remat_layers}", fewer
    elif of_host and model.remat == "attention" and model.offload:
        yield "model.remat=full", replace(workload, model=replace(model, remat="full", full_remat_layers=0))
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


def _difference(workload: Workload, other: Workload, excess: float, *, of_host: bool) -> str:
    """Describe what another workload needs more of a device's memory, or of its host's, and whether that fits."""
    candidate = counted(other)
    peak = candidate.peak * excess
    more = peak - peak_bytes(workload) * excess
    if of_host:
        more = held_by_host(other) - held_by_host(workload)
    words = [f"{more / GiB:+.1f} GiB"]
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
