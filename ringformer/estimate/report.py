"""Reports on the train step: JSON objects and text."""

from importlib.metadata import PackageNotFoundError
from typing import Any

import ringformer
from ringformer.estimate.closed_forms import (
    ADVICE,
    Hop,
    StepTime,
    host_bytes,
    memory,
    peak_bytes,
    ring_hops,
    state_bytes,
    step_time,
)
from ringformer.estimate.compiler.collectives import collectives_table, group_json, grouped
from ringformer.estimate.compiler.peak_buffers import PeakBuffers
from ringformer.estimate.program_estimate import Estimate
from ringformer.estimate.seconds.overlap import Transfer
from ringformer.estimate.targets import Target, compiler_versions
from ringformer.estimate.time_report import (
    closed_form_seconds,
    computation_time,
    cost_json,
    mfu,
    modelled_time,
    seconds_by_purpose,
    seconds_text,
    time_json,
)
from ringformer.estimate.workload import Workload
from ringformer.hardware import GiB


def origin(model: str, target: Target) -> dict[str, Any]:
    """Return the model (a preset or a config's file), the target and the versions behind an estimate."""
    try:
        own: str | None = ringformer.__version__
    except PackageNotFoundError:  # a clone that is not installed
        own = None
    return {"model": model, "target": target.name, "versions": {"ringformer": own} | compiler_versions(target)}


def estimate_json(workload: Workload, estimate: Estimate) -> dict:
    """Return a compiled workload's settings, and the bytes and seconds of one device and one step. Null: the compiler
    stopped before it reported this."""
    time = modelled_time(workload, estimate)
    settings, hops = (vars(workload.settings), ring_hops(workload)) if workload.has_closed_forms else ({}, {})
    return settings | _numbers(workload, estimate, time, hops) | cost_json(workload, time)


def closed_form_json(workload: Workload) -> dict:
    """Return the numbers of `estimate_json` from closed forms; null for numbers that only a compiler can report."""
    target, peak = workload.target, peak_bytes(workload)
    counted = Estimate(
        fits=peak <= target.budget,
        peak_bytes=round(peak),
        hbm_bytes=target.chip.hbm_bytes,
        budget=target.budget,
        state_bytes=round(state_bytes(workload)),
        host_bytes=round(host_bytes(workload)),
        usual_host_bytes=target.chip.host_bytes,
    )
    time = computation_time(workload)
    numbers = _numbers(workload, counted, time=None) | time_json(time)
    return {"closed_form": True} | numbers | cost_json(workload, time)


def stage_json(workload: Workload, estimate: Estimate | None) -> dict:
    """Return a stage's shape and settings, bytes per device, modelled seconds per step, days and device-hours.

    Without a compiler (None), the numbers are closed forms and the seconds count computation alone.
    """
    w, m = workload, workload.model
    shape = fields(w, "seq_len", "batch_size", "accumulate", "mesh_dim", "tokens")
    settings = fields(m, "head_groups", "remat_group", "offload", "rope_theta") if w.has_closed_forms else {}
    time: StepTime | None
    if estimate is None:
        time = computation_time(w)
        numbers = closed_form_json(w)
    else:
        time = modelled_time(w, estimate)
        numbers = {"closed_form": False} | _numbers(w, estimate, time)
    return {"stage": w.name} | shape | settings | numbers | cost_json(w, time)


def _numbers(workload: Workload, estimate: Estimate, time: StepTime | None, hops: dict[str, Hop] | None = None) -> dict:
    s, alive = estimate.schedule, estimate.peak_buffers
    used = mfu(workload, time) if time else {}
    return {
        **fields(estimate, "fits", "fits_host", "hbm_bytes", "host_bytes", "generated_code", "untried_kernels"),
        **common_numbers(estimate),
        "hidden_permute_bytes": s and s.hidden_permute_bytes,
        "exposed_in_ring_loops_bytes": s and s.exposed_in_ring_loops,
        **time_json(time),
        "step_seconds_by_parts": estimate.by_parts and step_time(estimate.by_parts, workload.step_tokens).step,
        "step_seconds_bounds": time and time.floor and [time.floor + time.exposed, time.serial + time.exposed],
        "mfu_causal_model": used.get("causal"),
        "mfu_palm_model": used.get("palm"),
        "hops_model": hops and {name: vars(h) | {"flops_per_byte": h.intensity} for name, h in hops.items()},
        "alive_at_peak_bytes": alive and alive.bytes,
        "largest_buffers": alive and [b._asdict() for b in alive.largest],
        "collective_groups": s and [group_json(g) for g in grouped(s.transfers)],
    }


def common_numbers(estimate: Estimate) -> dict:
    """Return numbers of any program, of training or inference."""
    s = estimate.schedule
    return {
        **fields(estimate, "peak_bytes", "argument_bytes", "temp_bytes", "max_link_hops"),
        "headroom_bytes": round(estimate.budget) - estimate.peak_bytes,
        "compile_seconds": estimate.compile_seconds and round(estimate.compile_seconds, 1),
        **fields(s, "flops", "exposed_permute_bytes", "exposed_gather_bytes", "host_waits"),
        "seconds_by_purpose": s and seconds_by_purpose(s),
        "collectives": s and [_transfer_json(t) for t in sorted(s.transfers, key=lambda t: -t.bytes * t.count)],
    }


def fields(source: Any, *names: str) -> dict:
    """Return attributes by name; null without a source."""
    return {name: source and getattr(source, name) for name in names}


def estimate_text(title: str, workload: Workload, estimate: Estimate) -> str:
    """Return the report on a compiled workload, the verdict first."""
    e, s, time = estimate, estimate.schedule, modelled_time(workload, estimate)
    lines = heading(title, workload, e)
    if s is None or time is None or e.argument_bytes is None or e.temp_bytes is None:
        return "\n".join(lines + _parts(workload))
    lines += [
        f"  arguments {e.argument_bytes / GiB:.2f} GiB, temporaries {e.temp_bytes / GiB:.2f} GiB"
        + (f", host {e.host_bytes / GiB:.2f} GiB per device" if e.host_bytes else "")
        + ("" if e.fits_host else f": MORE THAN THE {e.usual_host_bytes / GiB:.0f} GiB OF A USUAL HOST"),
        *largest_buffers(e.peak_buffers),
        *seconds_text(workload, e, s, time),
        f"  {s.flops:.3g} FLOPs per device; ring: {s.hidden_permute_bytes / GiB:,.1f} GiB hidden, "
        f"{s.exposed_permute_bytes / GiB:,.1f} GiB exposed ({s.exposed_in_ring_loops / GiB:,.1f} GiB inside its loops)"
        + (f"; longest hop {e.max_link_hops} link{'s' * (e.max_link_hops > 1)}" if e.max_link_hops else ""),
        *_hops(workload),
        *("  " + line for line in collectives_table(s.transfers)),
        f"  compiled {'to machine code' if e.generated_code else 'and scheduled'} in {e.compile_seconds:.0f} s; --json "
        "lists every collective",
    ]
    return "\n".join(lines)


def heading(title: str, workload: Workload, e: Estimate) -> list[str]:
    """Return the title, the verdict and, if the program does not fit, its largest allocations."""
    of_hbm = f"{e.peak_bytes / GiB:.2f} of {e.hbm_bytes / GiB:.2f} GiB on each {workload.target.chip.name}"
    lines = [title, f"  the {e.program} {e.verdict}: {of_hbm}; {_headroom(workload, e)}"]
    if e.largest:
        lines.append("  largest allocations, as the compiler lists them:")
        lines += ["    " + line for line in e.largest.splitlines()[:24]]
    return lines


def closed_form_text(title: str, workload: Workload) -> str:
    """Return the report on a workload that was not compiled."""
    peak, target = peak_bytes(workload), workload.target
    verdict = "should fit" if peak <= target.budget else "should not fit"
    line = f"  closed form, not compiled: {verdict}, {peak / GiB:.1f} of {target.chip.hbm_bytes / GiB:.2f} GiB"
    return "\n".join([title, line, *_parts(workload), *closed_form_seconds(workload)])


def stages_table(stages: list[dict]) -> str:
    """Return a table of `stage_json` results and a line that explains its times."""
    lines = [
        f"{'stage':9}{'context':>10}{'batch':>6}  {'mesh':13}{'peak GiB':>16}{'host GiB':>9}{'s/step':>9}"
        f"{'days':>8}{'device-hours':>14}"
    ]
    for stage in stages:
        fits = "should fit" if stage["closed_form"] or stage["untried_kernels"] else "fits"
        verdict = "DOES NOT FIT" if not stage["fits"] else fits if stage["fits_host"] else "HOST MEMORY DOES NOT FIT"
        gigabytes = f"{stage['peak_bytes'] / GiB:.1f} of {stage['hbm_bytes'] / GiB:.1f}"
        times = [stage["step_seconds_model"], stage.get("days_model"), stage.get("device_hours_model")]
        seconds, days, hours = ("-" if x is None else f"{x:,.{d}f}" for x, d in zip(times, (1, 2, 0), strict=True))
        compiled = f"compiled, {'its kernels not' if stage['untried_kernels'] else 'time modelled'}"
        kind = "not compiled, {}" if stage["closed_form"] else compiled + "; {}"
        how = kind.format(stage["seconds_source"])
        lines.append(
            f"{stage['stage']:9}{stage['seq_len']:>10,}{stage['batch_size']:>6}  {stage['mesh_dim']:13}{gigabytes:>16}"
            f"{stage['host_bytes'] / GiB:>9.1f}{seconds:>9}{days:>8}{hours:>14}  {verdict} ({how})"
        )
    lines.append(
        "s/step: one optimizer step, from the batch on the devices to the updated state; days and device-hours: all "
        "tokens of the stage"
    )
    return "\n".join(lines)


def _headroom(workload: Workload, e: Estimate) -> str:
    """Return how much memory is left for a step: on TPU of the whole memory, on GPU of the share without libraries."""
    budget = workload.target.budget
    left = budget - e.peak_bytes
    of = f" of the {budget / GiB:.2f} GiB that a step may use" if budget < e.hbm_bytes else ""
    return f"{abs(left) / GiB:.2f} GiB ({abs(left) / budget:.1%}) {'free' if left >= 0 else 'too much'}{of}"


def largest_buffers(alive: PeakBuffers | None) -> list[str]:
    """Return the largest buffers at the peak, one per line; empty if the compiler did not report them."""
    if alive is None:
        return []
    lines = [f"  alive at the peak: {alive.bytes / GiB:.2f} GiB, the rest is fragmentation; the largest buffers:"]
    for b in alive.largest:
        made = b.op_name if b.is_argument else " ".join(filter(None, (b.source, _short_name(b.op_name))))
        lines.append(f"    {b.bytes / 2**20:>10,.1f} MiB  {b.type:28} {made or b.instruction}")
    return lines


def _short_name(op_name: str) -> str:
    """Return the end of an op's name, marked if it belongs to the backward pass or to recomputation."""
    again = "rematerialised" if "rematted" in op_name else "backward" if "transpose(" in op_name else ""
    return " ".join(filter(None, (op_name.rpartition("/")[2], again and f"({again})")))


def _hops(workload: Workload) -> list[str]:
    lines = []
    for name, h in (ring_hops(workload) if workload.has_closed_forms else {}).items():
        times = f"{h.compute * 1e3:,.2f} ms of computation over {h.link * 1e3:,.2f} ms of transfer"
        lines.append(
            f"  one {name} hop at peak rates: {times} ({h.compute / h.link:.2f}x), {h.intensity:,.0f} FLOPs per byte"
        )
    return lines


def _parts(workload: Workload) -> list[str]:
    if not workload.has_closed_forms:
        return []
    lines = ["  memory by the closed form, and what reduces it:"]
    for name, size in sorted(memory(workload).items(), key=lambda item: -item[1]):
        lines.append(f"    {size / GiB:6.2f} GiB  {name}: {ADVICE[name]}")
    return lines


def _transfer_json(t: Transfer) -> dict:
    """Return a collective as a JSON object."""
    return {
        **fields(t, "kind", "dtype", "bytes", "asynchronous", "in_ring_loop", "hidden"),
        "shape": list(t.shape),
        "executed": t.count,
        "link_seconds": t.seconds,
        "compute_seconds_meanwhile": t.cover,
    }
