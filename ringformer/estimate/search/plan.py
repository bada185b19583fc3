"""Search for the settings to train with: closed forms rank candidates, and the compiler judges them in that order.
Neighbours of the first accepted candidate are compared by the seconds of their compiled programs.

This module also searches for the longest context that fits, and for the longest one whose step is short enough to wait
for.
"""

import math
from dataclasses import replace
from typing import NamedTuple

from ringformer.estimate.choices.candidates import GAIN, Candidate, candidates, neighbours
from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.compiler.program_estimate import Estimate
from ringformer.estimate.reports.run_estimate import RunCompiler, RunEstimate
from ringformer.estimate.reports.time_report import seconds_of
from ringformer.estimate.workloads.training import Workload
from ringformer.hardware import GiB


class Plan(NamedTuple):
    """The chosen candidate (None if none fits) and its compiled programs (None if the compiler is not installed)."""

    goal: Workload
    """The model, target and length that were planned."""
    chosen: Candidate | None
    run: RunEstimate | None
    refused: list[tuple[Candidate, str]]
    """Rejected candidates, fastest first, each with the reason."""
    excess: float = 1.0
    """Factor by which the compiler's bytes exceeded the closed form's where it rejected a candidate."""

    @property
    def seq_len(self) -> int:
        return self.goal.seq_len

    @property
    def estimate(self) -> Estimate | None:
        """Estimate of the train step."""
        if self.run is None:
            return None
        return self.run.step

    @property
    def step_seconds(self) -> float:
        """Modelled seconds of a step, compiled if possible; infinite if nothing was chosen."""
        if self.chosen is None:
            return math.inf
        return self.chosen.timed(self.estimate).step


ALMOST = 1.05
"""Memory, relative to that of the smallest candidate, of candidates that are judged in its place if they are faster."""


def plan(
    goal: Workload,
    compiler: RunCompiler,
    attempts: int = 8,
    excess: float = 1.0,
    max_step_seconds: float = math.inf,
) -> Plan:
    """Find the fastest settings of a preset for which the compiler accepts all programs, trying at most `attempts` of
    the likely candidates and the neighbours of the first that fits.

    The mesh, the parallelism of attention and the memory settings of `goal` are ignored. A step has `goal.batch_size`
    sequences; 0 leaves their number open. Seconds are compared per token. The chosen settings' modelled step, with all
    of its sequences, takes at most `max_step_seconds`. If the compiler rejects a candidate, the compiled bytes correct
    the closed forms of the candidates that follow. Without the compiler, the fastest settings that fit by the closed
    forms are chosen, and the log says what to install. Raises CompilerFailure if the compiler broke down on every
    candidate.
    """
    target = goal.target
    seq_len = goal.seq_len
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len} must be at least 1; leave it out to plan the longest context")
    if goal.batch_size % target.slices:
        raise ValueError(
            f"batch_size={goal.batch_size} is not a multiple of the {target.slices} {target.slices_are} of "
            f"{target.name}, each of which trains whole sequences"
        )
    ranked = list(candidates(goal))
    if not ranked:
        batch = f"{goal.batch_size} " if goal.batch_size else ""
        raise ValueError(f"no mesh of {target.name} can divide {batch}sequences of {seq_len} tokens; use powers of two")
    slow: list[tuple[Candidate, str]] = []
    unlikely: list[tuple[Candidate, str]] = []
    likely: list[Candidate] = []
    for c in ranked:
        if c.time.step > max_step_seconds:
            slow.append((c, f"a step takes about {c.time.step:,.0f} s"))
        elif reason := c.reason_against:
            unlikely.append((c, reason))
        else:
            likely.append(c)
    refused = slow + unlikely
    if missing := target.missing_compiler:
        compiler.log(missing)
        fastest = likely[0] if likely else None
        return Plan(goal, fastest, None, refused + _slower(likely))
    # Closed forms, even corrected ones, may be wrong about the smallest candidate, so the compiler judges it.
    possible = likely or [c for c, _ in unlikely if not c.impossible]
    least = min((c.peak for c in possible), default=0.0)
    smallest = next((c for c in possible if c.peak <= ALMOST * least), None)  # fastest first
    failures: list[CompilerFailure] = []
    failed: set[Workload] = set()  # when machine code was generated, or in another program than the step
    asked = 0
    waiting = likely
    if smallest and not likely:
        waiting = [smallest]
    for candidate in waiting:
        if candidate is not smallest and candidate.peak * excess > target.budget:
            refused.append((candidate, f"needs about {candidate.peak * excess / GiB:.1f} GiB, after what was compiled"))
            continue
        while asked < attempts and candidate.workload not in failed:
            asked += 1
            best = candidate
            try:
                compiler.log(f"compiling {candidate}, {seq_len:,} tokens")
                step = compiler.scheduled(candidate.workload)
                if not step.fits:
                    refused.append((candidate, f"compiled: needs {step.peak_bytes / GiB:.2f} GiB"))
                    excess = max(excess, step.peak_bytes / candidate.peak)
                    break
                if (seconds := candidate.timed(step).step) > max_step_seconds:
                    refused.append((candidate, f"compiled: a step takes {seconds:,.0f} s"))
                    break
                if compiler.thorough:
                    best = _fastest_nearby(candidate, compiler, failed)
                run = compiler.run(best.workload)
            except CompilerFailure as failure:
                failures.append(failure)
                reason = str(failure)
            else:
                if not run.reasons_against:
                    rest = [c for c in likely if c.seconds_per_token >= best.seconds_per_token]
                    return Plan(goal, best, run, refused + _slower([best, *rest]), excess)
                reason = f"compiled: {'; '.join(run.reasons_against)}"
            failed.add(best.workload)
            refused.append((best, reason))
    if failures and len(failures) == asked:
        raise failures[-1]
    return Plan(goal, None, None, refused, excess)


def _fastest_nearby(candidate: Candidate, compiler: RunCompiler, failed: set[Workload]) -> Candidate:
    """Return the candidate, unless a neighbour fits, has not failed, and has a compiled step that is over 3% faster;
    then repeat from that neighbour.

    Raises CompilerFailure for the candidate, as `RunCompiler.scheduled` does, but not for a neighbour.
    """
    seconds = candidate.timed(compiler.timed(candidate.workload)).step
    for other in neighbours(candidate):
        if other.reason_against or other.workload in failed:
            continue
        compiler.log(f"  {seconds_of(seconds)} per step; compiling its neighbour {other}")
        try:
            step = compiler.timed(other.workload)
        except CompilerFailure as failure:
            compiler.log(f"  {failure}")
            continue
        if step.fits and other.timed(step).step < GAIN * seconds:
            return _fastest_nearby(other, compiler, failed)
    return candidate


def _slower(ranked: list[Candidate]) -> list[tuple[Candidate, str]]:
    """Return the candidates that are slower than the first one, each with the difference."""
    slower = []
    for c in ranked:
        more = c.seconds_per_token / ranked[0].seconds_per_token - 1
        if more > 0:
            slower.append((c, f"{more:.1%} slower (modelled)"))
    return slower


SHORTEST = 2**12
"""Shortest context to plan, in tokens."""


def longest_plan(goal: Workload, compiler: RunCompiler) -> Plan:
    """Return the plan for the longest context, a power of two, for which a candidate is accepted; the goal's own length
    is ignored.

    The search starts at the longest context that fits by the closed forms. It doubles the length as long as a candidate
    fits; if none fits at the start, it halves the length. Only for the last length does it compile neighbours and
    generate machine code; if that fails, it halves the length again.
    """
    first = SHORTEST
    while any(not c.reason_against for c in candidates(replace(goal, seq_len=2 * first))):
        first *= 2
    scheduler = replace(compiler, generate_code=False, thorough=False)
    best = plan(replace(goal, seq_len=first), scheduler)
    while best.run:
        longer = _tried(best, 2 * best.seq_len, scheduler)
        if longer.chosen is None:
            break
        best = longer
    while best.chosen is None and best.seq_len > SHORTEST:
        best = plan(replace(goal, seq_len=best.seq_len // 2), scheduler, excess=best.excess)
    if best.run:
        best = _tried(best, best.seq_len, compiler)
        while best.chosen is None and best.seq_len > SHORTEST:
            best = _tried(best, best.seq_len // 2, compiler)
    return best


def longest_plan_within(longest: Plan, compiler: RunCompiler, max_step_seconds: float) -> Plan:
    """Return the plan for the longest context whose modelled step takes at most `max_step_seconds`. The context is a
    power of two, and at most that of `longest`. It may be `longest` itself. Nothing is chosen if no length is fast
    enough."""
    if longest.step_seconds <= max_step_seconds:
        return longest
    best = longest._replace(chosen=None, run=None)
    length = longest.seq_len
    while best.chosen is None and length >= SHORTEST:
        best = _tried(longest, length, compiler, max_step_seconds)
        length //= 2
    return best


def _tried(previous: Plan, seq_len: int, compiler: RunCompiler, max_step_seconds: float = math.inf) -> Plan:
    """Plan another length after `previous`; if the compiler breaks down on it, log that and choose nothing."""
    goal = replace(previous.goal, seq_len=seq_len)
    try:
        return plan(goal, compiler, excess=previous.excess, max_step_seconds=max_step_seconds)
    except CompilerFailure as failure:
        compiler.log(f"{seq_len:,} tokens: {failure}")
        return Plan(goal, None, None, [], previous.excess)
