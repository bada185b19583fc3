"""Search for the settings to train with: closed forms rank candidates, and the compiler judges them in that order.
Neighbours of the first accepted candidate are compared by the seconds of their compiled programs."""

import math
from typing import NamedTuple

from ringformer.estimate.closed_forms import step_time
from ringformer.estimate.compiler.dump import CompilerFailure
from ringformer.estimate.program_estimate import Estimate
from ringformer.estimate.run_estimate import RunCompiler, RunEstimate
from ringformer.estimate.search.candidates import Candidate, candidates, neighbours
from ringformer.estimate.targets import Target
from ringformer.estimate.workload import Workload
from ringformer.hardware import GiB


class Plan(NamedTuple):
    """The chosen candidate (None if none fits) and its compiled programs (None if the compiler is not installed)."""

    seq_len: int
    chosen: Candidate | None
    run: RunEstimate | None
    refused: list[tuple[Candidate, str]]
    """Rejected candidates, fastest first, each with the reason."""
    excess: float = 1.0
    """Factor by which the compiler's bytes exceeded the closed form's where it rejected a candidate."""

    @property
    def estimate(self) -> Estimate | None:
        """Estimate of the train step."""
        return self.run.step if self.run else None

    @property
    def step_seconds(self) -> float:
        """Modelled seconds of a step, compiled if possible; infinite if nothing was chosen."""
        if self.chosen is None:
            return math.inf
        return step_seconds(self.chosen, self.estimate)


def plan(
    model: str,
    target: Target,
    seq_len: int,
    compute_dtype: str,
    compiler: RunCompiler,
    attempts: int = 4,
    excess: float = 1.0,
    max_step_seconds: float = math.inf,
) -> Plan:
    """Find the fastest settings of a preset for which the compiler accepts all programs, trying at most `attempts` of
    the likely ones and the neighbours of the first that fits.

    A modelled step, with all of its sequences, takes at most `max_step_seconds`. Whatever the compiler rejects corrects
    the closed forms for the candidates that follow. Without the compiler, the fastest settings that fit by the closed
    forms are chosen, and the log says what to install. Raises CompilerFailure if the compiler broke down on everything
    it was asked to compile.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len} must be at least 1; leave it out to plan the longest context")
    ranked = candidates(model, target, seq_len, compute_dtype)
    if not ranked:
        raise ValueError(f"no mesh of {target.name} can divide sequences of {seq_len} tokens; use a power of two")
    slow = [(c, f"a step takes about {c.step_seconds:,.0f} s") for c in ranked if c.step_seconds > max_step_seconds]
    ranked = [c for c in ranked if c.step_seconds <= max_step_seconds]
    if not ranked:
        return Plan(seq_len, None, None, slow, excess)
    refused = slow + [(c, c.reason_against) for c in ranked if c.reason_against]
    likely = [c for c in ranked if not c.reason_against]
    if missing := target.missing_compiler:
        compiler.log(missing)
        return Plan(seq_len, likely[0] if likely else None, None, refused + _slower(likely))
    # Closed forms, even corrected ones, may be wrong about the smallest candidate, so the compiler judges it.
    smallest = min(likely or (c for c in ranked if not c.impossible), key=lambda c: c.peak, default=None)
    failures: list[CompilerFailure] = []
    failed: set[Workload] = set()  # in generating machine code, or in another program than the step
    asked, waiting = 0, likely or ([smallest] if smallest else [])
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
                if (seconds := step_seconds(candidate, step)) > max_step_seconds:
                    refused.append((candidate, f"compiled: a step takes {seconds:,.0f} s"))
                    break
                if compiler.thorough:
                    best = _fastest_nearby(candidate, compiler, excess, failed)
                run = compiler.run(best.workload)
            except CompilerFailure as failure:
                failures.append(failure)
                reason = str(failure)
            else:
                if not run.reasons_against:
                    rest = [c for c in likely if c.seconds_per_token >= best.seconds_per_token]
                    return Plan(seq_len, best, run, refused + _slower([best, *rest]), excess)
                reason = f"compiled: {'; '.join(run.reasons_against)}"
            failed.add(best.workload)
            refused.append((best, reason))
    if failures and len(failures) == asked:
        raise failures[-1]
    return Plan(seq_len, None, None, refused, excess)


def _fastest_nearby(candidate: Candidate, compiler: RunCompiler, excess: float, failed: set[Workload]) -> Candidate:
    """Return the candidate, or a neighbour that fits, has not failed, and whose compiled step is over 3% faster; then
    repeat from that neighbour.

    Raises CompilerFailure as `RunCompiler.scheduled` for the candidate, but not for a neighbour.
    """
    seconds = step_seconds(candidate, compiler.timed(candidate.workload))
    for other in neighbours(candidate):
        too_large = other.peak * excess > other.workload.target.budget
        if other.impossible or too_large or other.workload in failed:
            continue
        compiler.log(f"  {seconds:,.1f} s per step; compiling its neighbour {other}")
        try:
            step = compiler.timed(other.workload)
        except CompilerFailure as failure:
            compiler.log(f"  {failure}")
            continue
        if step.fits and step_seconds(other, step) < 0.97 * seconds:
            return _fastest_nearby(other, compiler, excess, failed)
    return candidate


def _slower(ranked: list[Candidate]) -> list[tuple[Candidate, str]]:
    """Return the candidates that are slower than the first, with the difference."""
    pairs = [(c, c.seconds_per_token / ranked[0].seconds_per_token - 1) for c in ranked]
    return [(c, f"{slower:.1%} slower (modelled)") for c, slower in pairs if slower > 0]


def step_seconds(c: Candidate, e: Estimate | None) -> float:
    """Modelled seconds of a step: from the compiled step if it was compiled, otherwise by the closed form."""
    if e is None:
        return c.step_seconds
    assert e.schedule is not None, "what fits has a schedule"
    return step_time(e.schedule, c.workload.step_tokens).step
