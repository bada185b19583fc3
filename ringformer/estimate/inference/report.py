"""Reports on inference: JSON objects and text."""

from typing import NamedTuple

from ringformer.estimate.closed_forms import StepTime, step_time
from ringformer.estimate.compiler.collectives import collectives_table, group_json, grouped, inference_purpose
from ringformer.estimate.inference.closed_forms import cache_bytes, floor_seconds, prefill_memory, weight_bytes
from ringformer.estimate.inference.workload import DECODE, FIRST_CHUNK, LOADING, PREFILL, InferenceWorkload
from ringformer.estimate.program_estimate import Estimate
from ringformer.estimate.report import common_numbers, fields, heading, largest_buffers
from ringformer.estimate.time_report import figures, purposes_text
from ringformer.hardware import GiB


class PrefillTime(NamedTuple):
    """Modelled seconds of a whole context's prefill."""

    seconds: float
    exposed: float
    """Part of `seconds`: communication that the schedules leave exposed."""
    first: float
    """The first chunk."""
    last: float
    """The last chunk."""


def prefill_time(workload: InferenceWorkload, estimates: dict[str, Estimate]) -> PrefillTime | None:
    """Return the time of prefill from the compiled first and last chunk; the times of chunks between them are
    interpolated by the number of slots that each chunk attends to. None if the first or last chunk has no schedule."""
    last = _step(workload, estimates.get(PREFILL))
    first = last if workload.chunks == 1 else _step(workload, estimates.get(FIRST_CHUNK))
    if first is None or last is None:
        return None
    slots = [workload.attended_slots(i) for i in range(workload.chunks)]
    later = sum(slots) / slots[-1] if slots[-1] else 0.0
    compute, exposed = (
        workload.chunks * a + (b - a) * later for a, b in ((first.compute, last.compute), (first.exposed, last.exposed))
    )
    return PrefillTime(compute + exposed, exposed, first.step, last.step)


def inference_json(workload: InferenceWorkload, program: str, estimates: dict[str, Estimate]) -> dict:
    """Return bytes per device and modelled seconds of a whole context's prefill or of a decode step. Null: the compiler
    did not report this."""
    e = estimates[program]
    s, time, loading = e.schedule, _step(workload, e), estimates.get(LOADING)
    shape = fields(workload, "mesh_dim", "seq_len", "batch_size") | fields(workload.model, "kernel", "compute_dtype")
    numbers = {
        **fields(e, "program", "hbm_bytes"),
        **common_numbers(e),
        "fits": all(e.fits for e in estimates.values()),
        "untried_kernels": any(e.untried_kernels for e in estimates.values()),
        "weight_bytes": weight_bytes(workload),
        "cache_bytes": cache_bytes(workload),
        "loading_peak_bytes": loading and loading.peak_bytes,
        "seconds_source": time and time.source,
        "exposed_seconds": time and time.exposed,
        "collectives_executed": s and sum(t.count for t in s.transfers),
        "collective_groups": s and [group_json(g) for g in grouped(s.transfers, inference_purpose)],
    }
    own = _decode_json(workload, time) if program == DECODE else _prefill_json(workload, estimates)
    return shape | own | numbers


def inference_text(title: str, workload: InferenceWorkload, program: str, estimates: dict[str, Estimate]) -> str:
    """Return the report on a compiled program of inference, the verdict first."""
    e = estimates[program]
    s, time, lines = e.schedule, _step(workload, e), heading(title, workload, e)
    held = f"weights {weight_bytes(workload) / GiB:.2f} GiB, cache {cache_bytes(workload) / GiB:.2f} GiB"
    if s is None or time is None or e.temp_bytes is None:
        return "\n".join([*lines, f"  by count: {held}", *(_parts(workload) if program == PREFILL else [])])
    lines += [f"  {held}, temporaries {e.temp_bytes / GiB:.2f} GiB", *largest_buffers(e.peak_buffers)]
    lines += _decode_text(workload, time) if program == DECODE else _prefill_text(workload, estimates)
    lines += [f"    {time.source}"] if time.compute else []
    count = sum(t.count for t in s.transfers)
    if loading := estimates.get(LOADING):
        lines.append(f"  before that, the {LOADING} {loading.verdict}: {loading.peak_bytes / GiB:.2f} GiB")
    lines += [
        *purposes_text(s),
        f"  {count:,.0f} collectives; their latency is not modelled: a microsecond each adds {count * 1e-3:,.2f} ms",
        *("  " + line for line in collectives_table(s.transfers, inference_purpose)),
        f"  compiled and scheduled in {e.compile_seconds:.0f} s; --json lists every collective",
    ]
    return "\n".join(lines)


def _step(workload: InferenceWorkload, estimate: Estimate | None) -> StepTime | None:
    if estimate is None or estimate.schedule is None:
        return None
    tokens = 1 if estimate.program == DECODE else workload.chunk
    return step_time(estimate.schedule, workload.batch_size * tokens)


def _prefill_json(workload: InferenceWorkload, estimates: dict[str, Estimate]) -> dict:
    time = prefill_time(workload, estimates)
    return {
        "prefill_chunk": workload.chunk,
        "chunks": workload.chunks,
        "prefill_seconds_model": time and time.seconds,
        "prefill_exposed_seconds": time and time.exposed,
        "first_chunk_seconds_model": time and time.first,
        "last_chunk_seconds_model": time and time.last,
        "tokens_per_second_model": time and workload.step_tokens / time.seconds,
    }


def _decode_json(workload: InferenceWorkload, time: StepTime | None) -> dict:
    return {
        "decode_seconds_model": time and time.step,
        "tokens_per_second_model": time and time.tokens_per_second,
        "floor_seconds": floor_seconds(workload),
    }


def _prefill_text(workload: InferenceWorkload, estimates: dict[str, Estimate]) -> list[str]:
    time = prefill_time(workload, estimates)
    if time is None:
        return []
    several = f" in {workload.chunks:,} chunks of {workload.chunk:,} tokens" if workload.chunks > 1 else ""
    lines = [
        f"  modelled {figures(time.seconds)} s for the whole context{several}, including {time.exposed:,.3g} s of "
        f"exposed communication; {figures(workload.step_tokens / time.seconds)} tokens per second"
    ]
    if workload.chunks > 1:
        lines.append(f"    first chunk {figures(time.first)} s, last chunk {figures(time.last)} s (details below)")
    return lines


def _decode_text(workload: InferenceWorkload, time: StepTime) -> list[str]:
    floor, rows = floor_seconds(workload), workload.batch_size
    of_rows = f" in each of {rows} rows" if rows > 1 else ""
    return [
        f"  modelled {figures(time.step * 1e3)} ms per token{of_rows}, including {time.exposed * 1e3:,.3g} ms of "
        f"exposed communication; {figures(time.tokens_per_second)} tokens per second",
        f"    at least {figures(floor * 1e3)} ms: weights and cache read once at the memory's rate",
    ]


def _parts(workload: InferenceWorkload) -> list[str]:
    lines = ["  memory by the closed form; smaller chunks (--prefill_chunk) need less:"]
    parts = sorted(prefill_memory(workload).items(), key=lambda item: -item[1])
    return lines + [f"    {size / GiB:6.2f} GiB  {name}" for name, size in parts]
