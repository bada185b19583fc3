"""Reports on the seconds of a step: the sum, its bounds and sources, MFU, and seconds by purpose."""

from functools import partial
from typing import Any

from ringformer.estimate.closed_forms.communication import exposed_seconds
from ringformer.estimate.closed_forms.training import StepTime, computation_time, step_time
from ringformer.estimate.compiler.program_estimate import Estimate
from ringformer.estimate.seconds.overlap import Schedule
from ringformer.estimate.workloads.training import Workload
from ringformer.models.flops import model_flops_per_token


def figures(x: float) -> str:
    """Format a number with four digits, or with all digits before the decimal point."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


_UNITS = ((86400.0, "days", 48.0 * 3600), (3600.0, "hours", 2 * 3600.0), (60.0, "minutes", 120.0), (1.0, "s", 1.0))
"""Seconds of a unit, its name, and the seconds from which durations have it; shorter ones have milliseconds."""


def duration(seconds: float) -> str:
    """Format a duration with three digits in the unit that suits it: "2.51 days", "13.4 hours", "5.2 minutes", "31 s",
    "217 ms"."""
    size, name = _unit(seconds)
    count = seconds / size
    if count >= 1000:
        return f"{count:,.0f} {name}"
    return f"{count:.3g} {name}"


def _unit(seconds: float) -> tuple[float, str]:
    """Return the seconds and the name of the unit that suits a duration."""
    for size, name, least in _UNITS:
        if seconds >= least:
            return size, name
    return 1e-3, "ms"


def seconds_of(x: float) -> str:
    """Format the seconds of a step or a sequence with four digits, short ones in milliseconds."""
    return f"{figures(x)} s" if x >= 0.01 else duration(x)


def step_seconds(seconds: float) -> str:
    """Format the seconds of a step in a table: with a decimal, or with three digits if they are few."""
    if seconds < 0.001:
        return "<0.001"
    if seconds < 10:
        return f"{seconds:.3g}"
    return f"{seconds:,.1f}"


def device_hours(hours: float) -> str:
    """Format device-hours in a table: whole ones, or with two digits if they are few."""
    if hours < 0.01:
        return "<0.01"
    if hours < 10:
        return f"{hours:.2g}"
    return f"{hours:,.0f}"


def device_time(hours: float) -> str:
    """Format device-hours, of which short runs have device-seconds."""
    return f"{figures(hours)} device-hours" if hours >= 0.1 else f"{3600 * hours:.3g} device-seconds"


def modelled_time(workload: Workload, estimate: Estimate) -> StepTime | None:
    """Return the time of a step by its schedule; None if the compiler stopped before it had a schedule."""
    if estimate.schedule is None:
        return None
    return step_time(estimate.schedule, workload.step_tokens)


def time_json(time: StepTime | None) -> dict[str, Any]:
    """Return the seconds of a step, its speed and its source as a JSON object."""
    return {
        "step_seconds_model": time and time.step,
        "tokens_per_second_model": time and time.tokens_per_second,
        "seconds_source": time and time.source,
    }


def mfu(workload: Workload, time: StepTime) -> dict[str, float]:
    """Model FLOPs utilisation of a modelled step in two conventions; empty for a model without closed forms.

    "causal" counts the half of attention that the mask leaves; "palm" counts all of it, as most papers do (PaLM,
    appendix B). At long contexts they differ by a factor of almost 2. Both are relative to the peak of the compute
    dtype, and count no gradients of frozen weights.
    """
    if not workload.has_closed_forms:
        return {}
    target = workload.target
    rate = time.tokens_per_second / (target.num_devices * target.chip.flops(workload.model.compute_dtype))
    flops = partial(model_flops_per_token, workload.model, workload.seq_len, frozen=workload.lora.rank > 0)
    causal = flops(causal=True)
    whole = flops(causal=False)
    return {"causal": rate * causal, "palm": rate * whole}


COSTS = ("hours_model", "days_model", "device_hours_model")
"""Keys of `cost_json`."""


def cost_json(workload: Workload, time: StepTime | None) -> dict[str, Any]:
    """Modelled hours, days and device-hours of the workload's tokens; empty without tokens or time."""
    if time is None or not workload.tokens:
        return {}
    days = time.days(workload.tokens)
    return dict(zip(COSTS, (24 * days, days, 24 * days * workload.target.num_devices), strict=True))


def seconds_by_purpose(schedule: Schedule) -> dict[str, float]:
    """Seconds of a step by purpose, largest first."""
    seconds = {name: spent.overlapped for name, spent in schedule.purposes.items()}
    seconds["exposed communication"] = schedule.exposed_seconds
    if schedule.host_seconds:
        seconds["waiting for the host"] = schedule.host_seconds
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def seconds_text(workload: Workload, estimate: Estimate, time: StepTime, by_documents: bool) -> list[str]:
    """Return the lines on a compiled step's seconds, bounds and source, its speed, and the cost of the tokens. If a
    step's estimate is based on its own machine code, they include the seconds that it would have without this code.

    Args:
      by_documents: True if the report has the seconds and the cost by the documents of a store: then these lines are of
        one document a sequence, and have no cost.
    """
    speed = f"  {figures(time.tokens_per_second)} tokens per second"
    if used := mfu(workload, time):
        speed += (
            f"; MFU {used['causal']:.1%} with attention halved for its causal mask, {used['palm']:.1%} without (PaLM's "
            "convention)"
        )
        if workload.lora.rank:
            speed += "; frozen weights count no gradient"
    across = ""
    if estimate.schedule and estimate.schedule.exposed_slices_seconds:
        across = f", {estimate.schedule.exposed_slices_seconds:,.3g} s of it across {workload.target.slices_are}"
    waiting = f", {seconds_of(time.host)} of waiting for the host" if time.host else ""
    lines = [
        f"{_modelled(time, by_documents)}, from the batch on the devices to the updated state:",
        f"    {seconds_of(time.compute)} of computation, {time.exposed:,.3g} s of communication that the schedule "
        f"leaves exposed{across}{waiting}",
        f"    {time.source}",
        f"    at least {seconds_of(time.at_least)} by bytes and FLOPs at the peak, at most "
        f"{seconds_of(time.at_most)} if no data moves while an instruction computes",
        speed,
    ]
    if not by_documents:
        lines += _cost(workload, time)
    if estimate.by_parts:
        parts = step_time(estimate.by_parts, workload.step_tokens).step
        lines.append(
            f"  by the machine code of a layer's attention, compiled alone, it would be {seconds_of(parts)} "
            f"({parts / time.step - 1:+.1%})"
        )
    return lines


def closed_form_seconds(workload: Workload, by_documents: bool) -> list[str]:
    """Return the lines on the seconds of a step that was not compiled; `by_documents` as in `seconds_text`."""
    time = computation_time(workload)
    speed = f"{figures(time.tokens_per_second)} tokens per second"
    lines = [f"{_modelled(time, by_documents)} ({time.source}), {speed}"]
    if workload.has_closed_forms and workload.target.slices > 1:
        across = exposed_seconds(workload)["slices"]
        slices = workload.target.slices_are
        lines.append(f"  not counted in that: {across:,.3g} s a step for sums of gradients across {slices}")
    if not by_documents:
        lines += _cost(workload, time)
    return lines


def _modelled(time: StepTime, by_documents: bool) -> str:
    """Return the first words on the seconds of a step; `by_documents` as in `seconds_text`."""
    step = f"modelled {seconds_of(time.step)} per step"
    if by_documents:
        step = f"with one document a sequence, {step}"
    return f"  {step}"


def _cost(workload: Workload, time: StepTime) -> list[str]:
    """Return the line on the cost of the workload's tokens; empty without tokens."""
    if not workload.tokens:
        return []
    hours, _, device_hours = cost_json(workload, time).values()
    return [f"  {workload.tokens:.3g} tokens: {duration(3600 * hours)}, {device_time(device_hours)}, modelled"]


def purposes_text(schedule: Schedule) -> list[str]:
    """Return the lines of `seconds_by_purpose` and, if a GPU waits for its host, lines that say how often and where."""
    seconds = seconds_by_purpose(schedule)
    whole = sum(seconds.values())
    digits = 3 if whole >= 0.1 else 6
    lines = ["  seconds by purpose:"]
    for name, spent in seconds.items():
        if spent > 5e-4 * whole:
            lines.append(f"    {spent:>10,.{digits}f} s {spent / whole:>6.1%}  {name}")
    if waits := schedule.host_waits:
        most_first = sorted(waits.items(), key=lambda item: -item[1])
        named = ", ".join(f"{count:,.0f} in {name}" for name, count in most_first)
        each = schedule.rates.efficiency.host_wait
        counted = "not included in the seconds above"
        if each:
            counted = f"{each * 1e6:.3g} microseconds each in the seconds above"
        lines.append(f"  loops wait for the host at most {sum(waits.values()):,.0f} times, {counted}: {named}")
    return lines
