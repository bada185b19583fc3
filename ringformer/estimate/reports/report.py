"""Reports on the train step: JSON objects and text."""

from collections.abc import Callable
from typing import Any

from ringformer.estimate.closed_forms.training import (
    ADVICE,
    WITHOUT_OFFLOAD,
    computation_time,
    host_bytes,
    memory,
    peak_bytes,
    ring_hops,
    state_bytes,
    step_time,
)
from ringformer.estimate.compiled.peak_buffers import Buffer, PeakBuffers
from ringformer.estimate.compiler.collectives import collectives_table, group_json, grouped, purpose
from ringformer.estimate.compiler.program_estimate import Estimate
from ringformer.estimate.reports.advice import advice
from ringformer.estimate.reports.binding_term import binding_text
from ringformer.estimate.reports.packed_documents import documents_text
from ringformer.estimate.reports.time_report import (
    closed_form_seconds,
    cost_json,
    mfu,
    modelled_time,
    purposes_text,
    seconds_by_purpose,
    seconds_text,
    time_json,
)
from ringformer.estimate.seconds.overlap import Schedule, Transfer
from ringformer.estimate.workloads.targets import Target, compiler_versions, installed_version
from ringformer.estimate.workloads.training import Workload, described
from ringformer.hardware import GiB


def origin(model: str, target: Target) -> dict[str, Any]:
    """Return the model (a preset, a folder or a config's file), the target and the versions behind an estimate."""
    versions = {"ringformer": installed_version("ringformer")} | compiler_versions(target)
    return {"model": model, "target": target.name, "versions": versions}


def estimate_json(workload: Workload, estimate: Estimate | None) -> dict[str, Any]:
    """Return a workload's shape and settings, bytes and seconds of one device and one step, and the cost of its tokens.

    Without an estimate (None), the bytes come from closed forms, and the seconds include only computation. A value is
    null if the compiler stopped before it reported the value, or if only a compiler can report it.
    """
    w = workload
    e = estimate or _counted(w)
    s = e.schedule
    alive = e.peak_buffers
    time = modelled_time(w, e) if estimate else computation_time(w)
    settings: dict[str, Any] = {}
    hops = None
    if workload.has_closed_forms:
        settings = vars(w.settings) | fields(w.model, "offload", "rope_theta")
        if estimate:
            hops = _hops_json(w)
    used: dict[str, float] = {}
    proposals: list[str] = []
    if time:
        used = mfu(w, time)
        if estimate and s:
            proposals = advice(w, estimate, time)
    return {
        "closed_form": estimate is None,
        **fields(w, "mesh_dim", "seq_len", "batch_size", "accumulate", "tokens"),
        **settings,
        **fields(e, "fits", "fits_host", "hbm_bytes", "host_bytes", "generated_code", "untried_kernels"),
        **common_json(e),
        **fields(s, "hidden_permute_bytes", "hidden_exchange_bytes", "exposed_exchange_bytes"),
        "exposed_in_ring_loops_bytes": s and s.exposed_in_ring_loops,
        **time_json(time),
        "closed_form_seconds": computation_time(w).step if w.has_closed_forms else None,
        **fields(s, "exposed_slices_seconds"),
        "step_seconds_by_parts": e.by_parts and step_time(e.by_parts, w.step_tokens).step,
        "step_seconds_bounds": s and time and [time.at_least, time.at_most],
        "mfu_causal_model": used.get("causal"),
        "mfu_palm_model": used.get("palm"),
        "advice": proposals,
        "hops_model": hops,
        "alive_at_peak_bytes": alive and alive.bytes,
        "largest_buffers": alive and [b._asdict() for b in alive.largest],
        "collective_groups": s and [group_json(g) for g in grouped(s.transfers)],
        **cost_json(w, time),
        "passes": w.passes,
    }


def _hops_json(workload: Workload) -> dict[str, Any]:
    hops = {}
    for name, hop in ring_hops(workload).items():
        hops[name] = vars(hop) | {"flops_per_byte": hop.intensity}
    return hops


def _counted(workload: Workload) -> Estimate:
    """Return the estimate of a train step by closed forms."""
    target = workload.target
    peak = peak_bytes(workload)
    return Estimate(
        fits=peak <= target.budget,
        peak_bytes=round(peak),
        hbm_bytes=target.chip.hbm_bytes,
        budget=target.budget,
        state_bytes=round(state_bytes(workload)),
        host_bytes=round(host_bytes(workload)),
        usual_host_bytes=target.host_bytes,
    )


def common_json(estimate: Estimate) -> dict[str, Any]:
    """Return numbers of any program, of training or inference."""
    s = estimate.schedule
    return {
        **fields(estimate, "peak_bytes", "argument_bytes", "temp_bytes", "max_link_hops"),
        "headroom_bytes": round(estimate.budget) - estimate.peak_bytes,
        "compile_seconds": estimate.compile_seconds and round(estimate.compile_seconds, 1),
        **fields(s, "flops", "exposed_permute_bytes", "exposed_gather_bytes", "host_waits"),
        "seconds_by_purpose": s and seconds_by_purpose(s),
        "collectives": s and [_transfer_json(t) for t in sorted(s.transfers, key=lambda t: -t.all_bytes)],
    }


def fields(source: Any, *names: str) -> dict[str, Any]:
    """Return attributes by name; null without a source."""
    return {name: source and getattr(source, name) for name in names}


def _transfer_json(t: Transfer) -> dict[str, Any]:
    return {
        **fields(t, "kind", "dtype", "bytes", "asynchronous", "in_ring_loop", "hidden"),
        "shape": list(t.shape),
        "executed": t.count,
        "link_seconds": t.seconds,
        "compute_seconds_meanwhile": t.cover,
    }


def estimate_text(title: str, workload: Workload, estimate: Estimate, documents: dict[str, Any] | None = None) -> str:
    """Return the report on a compiled workload: the verdict first, then the seconds by its store's documents
    (`documents_json`), if it has a store."""
    e = estimate
    s = estimate.schedule
    time = modelled_time(workload, estimate)
    lines = [*heading(title, workload, e), *_by_documents(documents)]
    if s is None or time is None or e.argument_bytes is None or e.temp_bytes is None:
        return "\n".join(lines + _parts(workload))
    held = f"arguments {e.argument_bytes / GiB:.2f} GiB, temporaries {e.temp_bytes / GiB:.2f} GiB"
    if e.host_bytes:
        held += f", host {e.host_bytes / GiB:.2f} GiB per device"
    if not e.fits_host:
        held += f": MORE THAN THE {e.usual_host_bytes / GiB:.0f} GiB OF A HOST"
    ring = (
        f"  {s.flops:.3g} FLOPs per device; ring: {s.hidden_permute_bytes / GiB:,.1f} GiB hidden, "
        f"{s.exposed_permute_bytes / GiB:,.1f} GiB exposed ({s.exposed_in_ring_loops / GiB:,.1f} GiB inside its loops)"
    )
    if exchanged := s.hidden_exchange_bytes + s.exposed_exchange_bytes:
        ring += f"; head exchange: {exchanged / GiB:,.1f} GiB, {s.exposed_exchange_bytes / GiB:,.1f} GiB exposed"
    if e.max_link_hops:
        ring += f"; longest hop {e.max_link_hops} link{'s' * (e.max_link_hops > 1)}"
    details = seconds_text(workload, e, time, documents is not None)
    for line in advice(workload, e, time):
        details.append(f"  try: {line}")
    details += [*purposes_text(s), ring, *_hops_text(workload)]
    return "\n".join(lines + scheduled_text(e, s, held, details))


def _hops_text(workload: Workload) -> list[str]:
    if not workload.has_closed_forms:
        return []
    lines = []
    for name, h in ring_hops(workload).items():
        lines.append(
            f"  one {name} hop at peak rates: {h.compute * 1e3:,.2f} ms of computation over {h.link * 1e3:,.2f} ms of "
            f"transfer ({h.compute / h.link:.2f}x), {h.intensity:,.0f} FLOPs per byte"
        )
    return lines


def _by_documents(documents: dict[str, Any] | None) -> list[str]:
    if not documents:
        return []
    return [f"  {documents_text(documents)}"]


def title(name: str, workload: Workload) -> str:
    """Return the title of a report on a preset or a config's file."""
    shape = f"{workload.batch_size} x {workload.seq_len:,} tokens, mesh {workload.mesh_dim}"
    words = [name, shape, workload.target.name]
    if workload.has_closed_forms:
        words.append(described(workload.model))
    return ", ".join(filter(None, words))


def heading(title: str, workload: Workload, e: Estimate) -> list[str]:
    """Return the title, the verdict with the memory left, and the largest allocations if the program does not fit.

    On TPU, the memory left is what remains of the whole memory; on GPU, of the share that libraries leave.
    """
    budget = workload.target.budget
    left = budget - e.peak_bytes
    free = "free" if left >= 0 else "too much"
    verdict = (
        f"  the {e.program} {e.verdict}: {e.peak_bytes / GiB:.2f} of {e.hbm_bytes / GiB:.2f} GiB on each "
        f"{workload.target.chip.name}; {abs(left) / GiB:.2f} GiB ({abs(left) / budget:.1%}) {free}"
    )
    if budget < e.hbm_bytes:
        verdict += f" of the {budget / GiB:.2f} GiB that a step may use"
    lines = [title, verdict]
    if e.largest:
        lines.append("  largest allocations, as the compiler lists them:")
        for line in e.largest.splitlines()[:24]:
            lines.append(f"    {line}")
    return lines


def scheduled_text(
    e: Estimate, s: Schedule, held: str, details: list[str], purpose: Callable[[Transfer], str] = purpose
) -> list[str]:
    """Return the lines on any scheduled program: the memory that it holds, its largest buffers, details of training or
    inference, its collectives, and how far it was compiled."""
    how = "to machine code" if e.generated_code else "and scheduled"
    lines = [f"  {held}", *_largest_buffers(e.peak_buffers), *details]
    for line in collectives_table(s.transfers, purpose):
        lines.append(f"  {line}")
    lines.append(f"  compiled {how} in {e.compile_seconds:.0f} s; --json lists every collective")
    return lines


def _largest_buffers(alive: PeakBuffers | None) -> list[str]:
    """Return the largest buffers at the peak, one per line; empty if the compiler did not report them."""
    if alive is None:
        return []
    lines = [f"  alive at the peak: {alive.bytes / GiB:.2f} GiB, the rest is fragmentation; the largest buffers:"]
    for b in alive.largest:
        made = b.op_name if b.is_argument else _made_by(b)
        lines.append(f"    {b.bytes / 2**20:>10,.1f} MiB  {b.type:28} {made or b.instruction}")
    return lines


def _made_by(b: Buffer) -> str:
    """Return the place, the primitive and the pass that made a buffer, as far as they are stated."""
    words = [b.source, b.op_name.rpartition("/")[2]]
    if "rematted" in b.op_name:
        words.append("(rematerialised)")
    elif "transpose(" in b.op_name:
        words.append("(backward)")
    return " ".join(filter(None, words))


def closed_form_text(title: str, workload: Workload, documents: dict[str, Any] | None) -> str:
    """Return the report on a run that was not compiled: the results of closed forms, and what they cannot show;
    `documents` as in `estimate_text`."""
    e = _counted(workload)
    chip = workload.target.chip
    lines = [
        title,
        f"  closed form, not compiled: {_should(e.fits)}, {e.peak_bytes / GiB:.1f} of {chip.hbm_bytes / GiB:.2f} GiB",
        *_by_documents(documents),
        *_parts(workload),
        *closed_form_seconds(workload, documents is not None),
        f"  a save beside what is offloaded: {_should(e.fits_host)}, {e.save_host_bytes / GiB:.1f} of "
        f"{workload.target.host_bytes / GiB:.0f} GiB of host memory per device",
        "  not checked without the compiler: evaluation, init, machine code; by count they need less than a train step",
    ]
    return "\n".join(lines)


def _should(fit: bool) -> str:
    return "should fit" if fit else "should not fit"


def _parts(workload: Workload) -> list[str]:
    if not workload.has_closed_forms:
        return []
    settings = ADVICE if workload.optimizer.elementwise else ADVICE | WITHOUT_OFFLOAD
    parts = {f"{name}: {settings[name]}": size for name, size in memory(workload).items()}
    return memory_parts("memory by the closed form, and what reduces it:", parts) + binding_text(workload)


def memory_parts(title: str, parts: dict[str, float]) -> list[str]:
    """Return the title and the parts of a program's memory, one per line, largest first."""
    lines = [f"  {title}"]
    for name, size in sorted(parts.items(), key=lambda item: -item[1]):
        lines.append(f"    {size / GiB:6.2f} GiB  {name}")
    return lines
