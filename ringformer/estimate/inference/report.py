"""Reports on inference: JSON objects and text."""

from dataclasses import replace
from typing import Any

from ringformer.estimate.closed_forms.inference import (
    cache_bytes,
    floor_seconds,
    prefill_flops,
    prefill_memory,
    weight_bytes,
)
from ringformer.estimate.closed_forms.training import StepTime, step_time
from ringformer.estimate.compiler.collectives import group_json, grouped, inference_purpose
from ringformer.estimate.compiler.program_estimate import Estimate
from ringformer.estimate.reports.report import common_json, fields, heading, memory_parts, scheduled_text
from ringformer.estimate.reports.time_report import figures, purposes_text, seconds_of
from ringformer.estimate.workloads.inference import DECODE, FIRST_CHUNK, LOADING, PREFILL, InferenceWorkload
from ringformer.hardware import GiB


def prefill_time(workload: InferenceWorkload, estimates: dict[str, Estimate]) -> StepTime | None:
    """Return the time of a whole context's prefill, from the compiled first and last chunk. The times of the chunks
    between them are interpolated by the number of slots that each attends to. None if the first or last chunk has no
    schedule."""
    first, last = _first_and_last(workload, estimates)
    if first is None or last is None:
        return None
    slots = [workload.attended_slots(i) for i in range(workload.chunks)]
    later = sum(slots) / slots[-1] if slots[-1] else 0.0
    compute = workload.chunks * first.compute + (last.compute - first.compute) * later
    exposed = workload.chunks * first.exposed + (last.exposed - first.exposed) * later
    host = workload.chunks * first.host + (last.host - first.host) * later
    return StepTime(compute, exposed, workload.step_tokens, host=host)


def _first_and_last(
    workload: InferenceWorkload, estimates: dict[str, Estimate]
) -> tuple[StepTime | None, StepTime | None]:
    """Return the times of the first and the last chunk of a prefill."""
    first = PREFILL if workload.chunks == 1 else FIRST_CHUNK
    return _step(workload, estimates.get(first)), _step(workload, estimates.get(PREFILL))


def inference_json(workload: InferenceWorkload, program: str, estimates: dict[str, Estimate]) -> dict[str, Any]:
    """Return the bytes per device and the modelled seconds, either of a whole context's prefill or of a decode step. A
    value is null if the compiler did not report it."""
    e = estimates[program]
    s = e.schedule
    time = _step(workload, e)
    loading = estimates.get(LOADING)
    shape = fields(workload, "mesh_dim", "seq_len", "batch_size") | fields(workload.model, "kernel", "compute_dtype")
    numbers = {
        **fields(e, "program", "hbm_bytes"),
        **common_json(e),
        "fits": all(e.fits for e in estimates.values()),
        "untried_kernels": any(e.untried_kernels for e in estimates.values()),
        "weight_bytes": weight_bytes(workload),
        "cache_bytes": cache_bytes(workload),
        "loading_peak_bytes": loading and loading.peak_bytes,
        "seconds_source": time and time.source,
        "exposed_seconds": time and time.exposed,
        "collectives_executed": s and s.executions,
        "collective_groups": s and [group_json(g) for g in grouped(s.transfers, inference_purpose)],
    }
    own = _decode_json(workload, time) if program == DECODE else _prefill_json(workload, estimates)
    return shape | own | numbers


def inference_text(title: str, workload: InferenceWorkload, program: str, estimates: dict[str, Estimate]) -> str:
    """Return the report on a compiled program of inference, the verdict first."""
    e = estimates[program]
    s = e.schedule
    time = _step(workload, e)
    lines = heading(title, workload, e)
    held = f"weights {weight_bytes(workload) / GiB:.2f} GiB, cache {cache_bytes(workload) / GiB:.2f} GiB"
    if s is None or time is None or e.temp_bytes is None:
        lines.append(f"  by count: {held}")
        if program == PREFILL:
            advice = "memory by the closed form; smaller chunks (--prefill_chunk) need less:"
            lines += memory_parts(advice, prefill_memory(workload))
        return "\n".join(lines)
    details = _decode_text(workload, time) if program == DECODE else _prefill_text(workload, estimates)
    if time.compute:
        details.append(f"    {time.source}")
    if loading := estimates.get(LOADING):
        details.append(f"  before that, the {LOADING} {loading.verdict}: {loading.peak_bytes / GiB:.2f} GiB")
    latency = f"their latency is not modelled: a microsecond each adds {s.executions * 1e-3:,.2f} ms"
    details += [*purposes_text(s), f"  {s.executions:,.0f} collectives; {latency}"]
    held += f", temporaries {e.temp_bytes / GiB:.2f} GiB"
    return "\n".join(lines + scheduled_text(e, s, held, details, inference_purpose))


def _step(workload: InferenceWorkload, estimate: Estimate | None) -> StepTime | None:
    if estimate is None or estimate.schedule is None:
        return None
    if estimate.program == DECODE:
        time = step_time(estimate.schedule, workload.batch_size)
        return replace(time, host=time.host + estimate.schedule.rates.efficiency.token)
    return step_time(estimate.schedule, workload.batch_size * workload.chunk)


def _prefill_json(workload: InferenceWorkload, estimates: dict[str, Estimate]) -> dict[str, Any]:
    time = prefill_time(workload, estimates)
    first, last = _first_and_last(workload, estimates)
    return {
        "prefill_chunk": workload.chunk,
        "chunks": workload.chunks,
        "prefill_seconds_model": time and time.step,
        "prefill_exposed_seconds": time and time.exposed,
        "first_chunk_seconds_model": first and first.step,
        "last_chunk_seconds_model": last and last.step,
        "tokens_per_second_model": time and time.tokens_per_second,
        "mfu_causal_model": time and _causal_mfu(workload, time),
    }


def _causal_mfu(workload: InferenceWorkload, time: StepTime) -> float:
    """Return the share of the devices' peak that the model FLOPs of a prefill take; attention counts the pairs that the
    causal mask leaves."""
    peak = workload.target.num_devices * workload.target.chip.flops(workload.model.compute_dtype)
    return sum(prefill_flops(workload)) / time.step / peak


def _decode_json(workload: InferenceWorkload, time: StepTime | None) -> dict[str, Any]:
    return {
        "decode_seconds_model": time and time.step,
        "tokens_per_second_model": time and time.tokens_per_second,
        "floor_seconds": floor_seconds(workload),
    }


def _prefill_text(workload: InferenceWorkload, estimates: dict[str, Estimate]) -> list[str]:
    time = prefill_time(workload, estimates)
    first, last = _first_and_last(workload, estimates)
    if time is None or first is None or last is None:
        return []
    several = ""
    if workload.chunks > 1:
        several = f" in {workload.chunks:,} chunks of {workload.chunk:,} tokens"
    lines = [
        f"  modelled {seconds_of(time.step)} for the whole context{several}, including {time.exposed:,.3g} s of "
        f"exposed communication; {figures(time.tokens_per_second)} tokens per second, "
        f"MFU (causal) {_causal_mfu(workload, time):.0%}"
    ]
    if several:
        lines.append(f"    first chunk {seconds_of(first.step)}, last chunk {seconds_of(last.step)} (details below)")
    return lines


def _decode_text(workload: InferenceWorkload, time: StepTime) -> list[str]:
    floor = floor_seconds(workload)
    rows = workload.batch_size
    of_rows = f" in each of {rows} rows" if rows > 1 else ""
    of_host = f" and {figures(time.host * 1e3)} ms that bytes do not explain" if time.host else ""
    return [
        f"  modelled {figures(time.step * 1e3)} ms per token{of_rows}, including {time.exposed * 1e3:,.3g} ms of "
        f"exposed communication{of_host}; {figures(time.tokens_per_second)} tokens per second",
        f"    at least {figures(floor * 1e3)} ms: weights and cache read once at the memory's rate",
    ]
