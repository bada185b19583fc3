"""Search for the longest context that fits on a target, and for the longest context whose step is short enough to wait
for. Every attempt compiles a context whose length is a power of two."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ringformer.estimate.choices.memory_settings import compile_first_accepted, likely_settings, possible_settings
from ringformer.estimate.closed_forms.training import computation_time, peak_bytes
from ringformer.estimate.compiler.program_estimate import Estimate
from ringformer.estimate.reports.report import estimate_json
from ringformer.estimate.reports.run_estimate import RunEstimate, compile_others, programs_json
from ringformer.estimate.workloads.training import Workload, estimate_command

MAX_STEP_SECONDS = 3600.0
"""Default limit in seconds for a step that is short enough; a day has 24 such steps."""


def attempt(
    workload: Workload, log: Callable[[str], None], *, whole_run: bool = False, generate_code: bool = False
) -> dict[str, Any]:
    """Compile a preset's workload with the first likely memory settings that the compiler accepts, preferring those
    whose schedule hides the ring's loops.

    Returns the `brief_json` of the estimate. If no settings fit, returns the JSON for the smallest settings. A workload
    that offloads more than a usual host holds does not fit either. The entry `programs` lists the programs that were
    judged: the train step or, with `whole_run`, every program of a run. With `generate_code`, they were compiled to
    machine code. Raises CompilerFailure if a compiler broke down.
    """
    workload, estimate = compile_first_accepted(
        workload,
        likely_settings(workload),
        lambda e: e.fits and e.fits_host,
        lambda w: log(estimate_command(w)),
        generate_code,
        prefers=lambda e: e.schedule is None or e.schedule.exposed_in_ring_loops == 0,
    )
    programs = [estimate]
    if whole_run and estimate.fits:
        programs += compile_others(workload, generate_code=generate_code)
    run = RunEstimate(tuple(programs))
    return brief_json(workload, estimate) | programs_json(run) | {"fits": not run.reasons_against}


def brief_json(workload: Workload, estimate: Estimate) -> dict[str, Any]:
    """Return the JSON of a preset's estimate without its lists of collectives and buffers, plus the command that
    reproduces the estimate."""
    answer = estimate_json(workload, estimate)
    for listed in ("collectives", "collective_groups", "largest_buffers"):
        del answer[listed]
    return answer | {"command": estimate_command(workload)}


def next_length(attempts: list[dict[str, Any]], first: int) -> int | None:
    """Return the next length in a search over powers of two that begins at `first`; None: the maximum is known."""
    if not attempts:
        return first
    fitting = _lengths(attempts, fit=True)
    failing = _lengths(attempts, fit=False)
    longer = 2 * max(fitting) if fitting else min(failing) // 2
    if longer in failing or longer < 1024:
        return None
    return longer


def _lengths(attempts: list[dict[str, Any]], *, fit: bool) -> list[int]:
    """Return the lengths of the attempts that fit, or of those that do not."""
    return [a["seq_len"] for a in attempts if a["fits"] == fit]


def longest_start(workload: Workload) -> int:
    """Return the length at which a search begins: the longest power of two that fits by the closed form, with any
    settings."""
    model = workload.model
    length = 1024
    settings = list(possible_settings(model)) if model.on_ring else [workload.settings]

    def fits(seq_len: int) -> bool:
        longer = replace(workload, seq_len=seq_len)
        return any(peak_bytes(longer.with_settings(s)) <= workload.target.budget for s in settings)

    while fits(2 * length):
        length *= 2
    return length


def longest_within(attempts: list[dict[str, Any]], max_step_seconds: float = MAX_STEP_SECONDS) -> dict[str, Any] | None:
    """Return the attempt at the longest context that fits and whose modelled step takes at most `max_step_seconds`;
    None if no attempt qualifies."""
    quick = [a for a in attempts if a["fits"] and a["step_seconds_model"] <= max_step_seconds]
    return max(quick, key=lambda a: a["seq_len"], default=None)


def counted_within(attempts: list[dict[str, Any]], workload: Callable[[int], Workload]) -> int | None:
    """Return the longest context whose step takes at most `MAX_STEP_SECONDS` by the closed form, shorter than all
    attempts that fit; None if a compiled step takes no longer than that. `workload` returns that of a length."""
    fitting = _lengths(attempts, fit=True)
    if not fitting or longest_within(attempts):
        return None
    return counted_longest_within(workload(min(fitting) // 2))


def counted_longest_within(workload: Workload, max_step_seconds: float = MAX_STEP_SECONDS) -> int | None:
    """Return the longest context whose step takes at most `max_step_seconds` by the closed form. The search starts at
    the workload's own context and halves it.

    This is for contexts that were not compiled. The closed form ignores exposed communication, and uses the fastest
    memory settings that should fit. The result is None if even a step of 1024 tokens takes longer.
    """
    length = workload.seq_len
    while length >= 1024:
        shorter = replace(workload, seq_len=length)
        if computation_time(shorter.with_settings(likely_settings(shorter)[0])).step <= max_step_seconds:
            return length
        length //= 2
    return None
