"""Which settings to train with: closed forms rank the candidates, the compiler judges them in that order, and of the
first that it accepts the neighbours, by the seconds of what it compiled."""

import math
from dataclasses import replace
from typing import NamedTuple

from ringformer.estimate.candidates import Candidate, candidates, neighbours
from ringformer.estimate.closed_forms import assumption, step_time
from ringformer.estimate.compiler_dump import CompilerFailure
from ringformer.estimate.program_estimate import Estimate
from ringformer.estimate.programs_report import save_line, verdict_line
from ringformer.estimate.run_estimate import RunCompiler, RunEstimate
from ringformer.estimate.targets import MissingCompiler, Target
from ringformer.hardware import GiB


class Plan(NamedTuple):
    """The chosen candidate, None if none fits, and its compiled programs, None if the compiler is not installed."""

    seq_len: int
    chosen: Candidate | None
    run: RunEstimate | None
    refused: list[tuple[Candidate, str]]
    """What lost against it, fastest first, and why."""
    excess: float = 1.0
    """By how much the compiler's bytes exceeded the closed form's where it refused a candidate."""

    @property
    def estimate(self) -> Estimate | None:
        """The train step's."""
        return self.run.step if self.run else None

    @property
    def step_seconds(self) -> float:
        """Modelled, of the compiled step if there is one; infinite if nothing was chosen."""
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
    nearby: bool = True,
) -> Plan:
    """The fastest settings of a preset of which the compiler accepts all programs, trying at most `attempts` of the
    likely ones, and what is `nearby` the first that fits.

    One step of it, with all of its sequences, takes at most `max_step_seconds`, modelled. What the compiler refuses
    corrects the closed forms for those that follow. Without the compiler it is the fastest that the closed forms let
    fit, and the log says what to install. Raises CompilerFailure if the compiler broke down on all that it was asked
    for.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len} must be at least 1; without it, the longest context is planned")
    ranked = candidates(model, target, seq_len, compute_dtype)
    if not ranked:
        raise ValueError(f"no mesh of {target.name} divides sequences of {seq_len} tokens; use a power of two")
    slow = [(c, f"a step takes about {c.step_seconds:,.0f} s") for c in ranked if c.step_seconds > max_step_seconds]
    ranked = [c for c in ranked if c.step_seconds <= max_step_seconds]
    if not ranked:
        return Plan(seq_len, None, None, slow, excess)
    refused = slow + [(c, c.reason_against) for c in ranked if c.reason_against]
    likely = [c for c in ranked if not c.reason_against]
    try:
        target.require_compiler()
    except MissingCompiler as missing:
        compiler.log(str(missing))
        return Plan(seq_len, likely[0] if likely else None, None, refused + _slower(likely))
    # The closed forms, corrected or not, may be wrong about the smallest: the compiler decides.
    smallest = min(likely or (c for c in ranked if not c.impossible), key=lambda c: c.peak, default=None)
    failures, asked = [], 0
    for candidate in likely or ([smallest] if smallest else []):
        if candidate is not smallest and candidate.peak * excess > target.budget:
            refused.append((candidate, f"needs about {candidate.peak * excess / GiB:.1f} GiB, after what was compiled"))
            continue
        if asked == attempts:
            break
        asked += 1
        try:
            compiler.log(f"compiling {candidate}, {seq_len:,} tokens")
            step = compiler.scheduled(candidate.workload)
            if not step.fits:
                refused.append((candidate, f"compiled: needs {step.peak_bytes / GiB:.2f} GiB"))
                excess = max(excess, step.peak_bytes / candidate.peak)
                continue
            if (seconds := step_seconds(candidate, step)) > max_step_seconds:
                refused.append((candidate, f"compiled: a step takes {seconds:,.0f} s"))
                continue
            if nearby:
                candidate = _fastest_nearby(candidate, compiler, excess)
            run = compiler.run(candidate.workload)
        except CompilerFailure as failure:
            failures.append(failure)
            refused.append((candidate, str(failure)))
            continue
        if not run.reasons_against:
            rest = [c for c in likely if c.seconds_per_token >= candidate.seconds_per_token]
            return Plan(seq_len, candidate, run, refused + _slower([candidate, *rest]), excess)
        refused.append((candidate, f"compiled: {'; '.join(run.reasons_against)}"))
    if failures and len(failures) == asked:
        raise failures[-1]
    return Plan(seq_len, None, None, refused, excess)


def _fastest_nearby(candidate: Candidate, compiler: RunCompiler, excess: float) -> Candidate:
    """The candidate, or a neighbour that fits and whose compiled step is over 3% faster, and so on from that one.

    Raises CompilerFailure as `RunCompiler.scheduled` of the candidate, not of a neighbour.
    """
    seconds = step_seconds(candidate, compiler.scheduled(candidate.workload))
    for other in neighbours(candidate):
        if other.impossible or other.peak * excess > other.workload.target.budget:
            continue
        compiler.log(f"  {seconds:,.1f} s a step; compiling its neighbour {other}")
        try:
            step = compiler.scheduled(other.workload)
        except CompilerFailure as failure:
            compiler.log(f"  {failure}")
            continue
        if step.fits and step_seconds(other, step) < 0.97 * seconds:
            return _fastest_nearby(other, compiler, excess)
    return candidate


def _slower(ranked: list[Candidate]) -> list[tuple[Candidate, str]]:
    """The candidates that take longer than the first, and by how much."""
    pairs = [(c, c.seconds_per_token / ranked[0].seconds_per_token - 1) for c in ranked]
    return [(c, f"{slower:.1%} slower (modelled)") for c, slower in pairs if slower > 0]


def longest_plan(model: str, target: Target, compute_dtype: str, compiler: RunCompiler) -> Plan:
    """The plan of the longest power of two that some candidate is accepted at.

    The search begins where the closed forms end, and goes up from a length that fits, else down. Machine code is
    generated where it ends; what fails there is halved again.
    """
    first = 2**12
    while any(not c.reason_against for c in candidates(model, target, 2 * first, compute_dtype)):
        first *= 2

    scheduler = replace(compiler, generate_code=False)

    def found_at(length: int, excess: float, compiler: RunCompiler, nearby: bool) -> Plan:
        try:
            return plan(model, target, length, compute_dtype, compiler, excess=excess, nearby=nearby)
        except CompilerFailure as failure:
            compiler.log(f"{length:,} tokens: {failure}")
            return Plan(length, None, None, [], excess)

    found = plan(model, target, first, compute_dtype, scheduler, nearby=False)
    while found.run and (longer := found_at(2 * found.seq_len, found.excess, scheduler, nearby=False)).chosen:
        found = longer
    while found.chosen is None and found.seq_len > 2**12:
        found = plan(model, target, found.seq_len // 2, compute_dtype, scheduler, excess=found.excess, nearby=False)
    if found.run:
        found = found_at(found.seq_len, found.excess, compiler, nearby=True)
        while found.chosen is None and found.seq_len > 2**12:
            found = found_at(found.seq_len // 2, found.excess, compiler, nearby=True)
    return found


def longest_plan_within(
    longest: Plan, model: str, target: Target, compute_dtype: str, compiler: RunCompiler, max_step_seconds: float
) -> Plan:
    """The plan of the longest power of two, at most that of the plan `longest`, of which one step takes at most so many
    seconds, modelled; `longest` itself if that is it. Nothing is chosen if no length is quick enough."""
    if longest.step_seconds <= max_step_seconds:
        return longest
    best = longest._replace(chosen=None, run=None)
    length = longest.seq_len
    while best.chosen is None and length >= 2**12:
        best = plan(
            model, target, length, compute_dtype, compiler, excess=longest.excess, max_step_seconds=max_step_seconds
        )
        length //= 2
    return best


def step_seconds(c: Candidate, e: Estimate | None) -> float:
    """Seconds of a step, modelled: of the compiled one, or counted."""
    if e is None:
        return c.step_seconds
    assert e.schedule is not None, "what fits has a schedule"
    return step_time(e.schedule, c.workload.step_tokens).step


def _verdict(c: Candidate, e: Estimate | None) -> str:
    """The line that says how much memory and time it takes, and who says so."""
    have, exposed = c.workload.target.chip.hbm_bytes, ""
    if e is None:
        need, host, said = c.peak, c.host, "closed form, not compiled"
        source = assumption()
    else:
        assert e.schedule is not None, "what fits has a schedule"
        need, host, said = e.peak_bytes, e.host_bytes, "compiled"
        exposed = f"{e.schedule.exposed_in_ring_loops / GiB:.1f} GiB of ring bytes exposed in its loops; "
        source = step_time(e.schedule, c.workload.step_tokens).source
    of_host = f", {host / GiB:.1f} GiB of host memory a device" if host else ""
    step = step_seconds(c, e)
    return (
        f"  {said}: {need / GiB:.2f} of {have / GiB:.2f} GiB{of_host}; {exposed}modelled {step:,.0f} s a step of "
        f"{c.workload.step_tokens:,} tokens, {c.workload.step_tokens / step:,.0f} tokens/s ({source})"
    )


def _programs(run: RunEstimate | None) -> list[str]:
    """The lines on the other programs of a run."""
    if run is None:
        return ["  evaluation, init, saves and machine code were not judged: they need the compiler"]
    return [f"  {verdict_line(run)}", f"  {save_line(run.step)}"]


def plan_text(model: str, target: Target, planned: Plan, listed: int = 8) -> str:
    """What a person wants to know of a plan; of what lost against it, the fastest `listed`."""
    title = f"{model} on {target.name}, {planned.seq_len:,} tokens"
    if planned.chosen is None:
        lines = [f"{title}: nothing fits that was tried", "  use a larger slice, or half the sequence"]
    else:
        w, m = planned.chosen.workload, planned.chosen.workload.model
        chunks = f" --config.model.q_chunk={m.q_chunk} --config.model.k_chunk={m.k_chunk}" if m.q_chunk else ""
        lines = [
            f"{title}: {planned.chosen}",
            _verdict(planned.chosen, planned.estimate),
            *_programs(planned.run),
            "  the config to use:",
            f"    --config.seq_len={planned.seq_len} --config.batch_size={w.batch_size} --config.mesh_dim={w.mesh_dim}",
            f"    --config.model.compute_dtype={m.compute_dtype} --config.model.remat=full "
            f"--config.model.head_groups={m.head_groups} --config.model.remat_group={m.remat_group} "
            f"--config.model.offload={m.offload}",
            f"    --config.model.layout={m.layout}{chunks}",
        ]
    refused = sorted(planned.refused, key=lambda item: item[0].seconds_per_token)
    lines.append(f"  why not the others (the fastest {min(listed, len(refused))} of {len(refused)}):")
    lines += [f"    {c!s:60s} {why}" for c, why in refused[:listed]]
    return "\n".join(lines)
