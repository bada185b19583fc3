"""The seconds of a step for a person: what they count on, what they are worth, and where they go."""

from ringformer.estimate.closed_forms import StepTime, computation_seconds, step_time
from ringformer.estimate.program_estimate import Estimate
from ringformer.estimate.seconds.overlap import Schedule
from ringformer.estimate.seconds.program_seconds import efficiency
from ringformer.estimate.workload import Workload
from ringformer.models.flops import model_flops_per_token


def seconds_text(workload: Workload, estimate: Estimate, schedule: Schedule, time: StepTime) -> list[str]:
    """The lines of a report on a compiled step's seconds."""
    return [
        *_time(workload, time),
        *_held_against_parts(workload, estimate, time),
        *where_text(schedule),
        *host_waits_text(schedule),
    ]


def figures(x: float) -> str:
    """A number with four figures, or all of those before the point."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def modelled_time(workload: Workload, estimate: Estimate) -> StepTime | None:
    """The time of a step by its schedule; None if the compiler gave up before it had one."""
    return step_time(estimate.schedule, workload.step_tokens) if estimate.schedule else None


def computation_time(workload: Workload) -> StepTime:
    """The time of a step's computation by the closed form, as if all communication were hidden."""
    assumed = efficiency(workload.target.generation, workload.model.kernel, workload.model.head_dim)
    return StepTime(computation_seconds(workload), 0.0, workload.step_tokens, assumed=assumed, closed_form=True)


def mfu(workload: Workload, time: StepTime) -> dict[str, float]:
    """Model FLOPs utilisation of a modelled step by two conventions; nothing for a model without closed forms.

    "causal" halves attention for its mask, which is what has to be computed; "palm" does not, as most papers print it
    (PaLM, appendix B). At long contexts they differ by almost 2. Of the peak of the compute dtype.
    """
    if not workload.has_closed_forms:
        return {}
    target = workload.target
    rate = time.tokens_per_second / (target.num_devices * target.chip.flops(workload.model.compute_dtype))
    return {
        name: rate * model_flops_per_token(workload.model, workload.seq_len, causal=causal)
        for name, causal in (("causal", True), ("palm", False))
    }


def cost_json(workload: Workload, time: StepTime | None) -> dict:
    """The modelled hours, days and device-hours of the workload's tokens; nothing if there are none, or no time."""
    if time is None or not workload.tokens:
        return {}
    days = time.days(workload.tokens)
    return {"hours_model": 24 * days, "days_model": days, "device_hours_model": 24 * days * workload.target.num_devices}


def where_the_time_goes(schedule: Schedule) -> dict[str, float]:
    """Seconds of a step by what they are for, the most first."""
    seconds = {name: spent.overlapped for name, spent in schedule.purposes.items()}
    seconds["exposed communication"] = schedule.exposed_seconds
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def _time(workload: Workload, time: StepTime) -> list[str]:
    """What a step takes and is worth, each number with what it counts on."""
    used = mfu(workload, time)
    lines = [
        f"  modelled {figures(time.step)} s a step, from the batch on the devices to the updated state:",
        f"    {figures(time.compute)} s of computation, {time.exposed:,.3g} s of communication that the schedule "
        "leaves exposed",
        f"    {time.source}",
        f"    no less than {figures(time.floor + time.exposed)} s by bytes and FLOPs at the peak, no more than "
        f"{figures(time.serial + time.exposed)} s if no data moves while an instruction computes",
        f"  {figures(time.tokens_per_second)} tokens a second"
        + (
            f"; MFU {used['causal']:.1%} with attention halved for its causal mask, {used['palm']:.1%} with all of it "
            "(PaLM's convention)"
            if used
            else ""
        ),
    ]
    return lines + _cost(workload, time)


def closed_form_seconds(workload: Workload) -> list[str]:
    """The lines on the seconds of a step that was not compiled."""
    time = computation_time(workload)
    speed = f"{figures(time.tokens_per_second)} tokens a second"
    return [f"  modelled {figures(time.step)} s a step ({time.source}), {speed}", *_cost(workload, time)]


def _cost(workload: Workload, time: StepTime) -> list[str]:
    """What the workload's tokens take; nothing if there are none."""
    if not workload.tokens:
        return []
    hours, days, device_hours = cost_json(workload, time).values()
    return [
        f"  {workload.tokens:.3g} tokens: {figures(hours)} hours ({days:,.3g} days), {figures(device_hours)} "
        "device-hours, modelled"
    ]


def _held_against_parts(workload: Workload, estimate: Estimate, time: StepTime) -> list[str]:
    """What a step that has its own machine code would be said to take without it."""
    if estimate.by_parts is None:
        return []
    parts = step_time(estimate.by_parts, workload.step_tokens).step
    return [
        f"  held against the machine code of a layer's attention, compiled alone: {figures(parts)} s "
        f"({parts / time.step - 1:+.1%})"
    ]


def where_text(schedule: Schedule) -> list[str]:
    """The lines of `where_the_time_goes`."""
    seconds = where_the_time_goes(schedule)
    whole = sum(seconds.values())
    digits = 3 if whole >= 0.1 else 6
    return ["  where the time goes:"] + [
        f"    {spent:>10,.{digits}f} s {spent / whole:>6.1%}  {name}"
        for name, spent in seconds.items()
        if spent > 5e-4 * whole
    ]


def host_waits_text(schedule: Schedule) -> list[str]:
    """How often a GPU's program waits for its host; nothing if it never does."""
    waits = schedule.host_waits
    if not waits:
        return []
    named = ", ".join(f"{count:,.0f} in {name}" for name, count in sorted(waits.items(), key=lambda item: -item[1]))
    return [
        f"  loops that wait for the host, at most {sum(waits.values()):,.0f} times, which is in none of the "
        f"seconds above: {named}"
    ]
