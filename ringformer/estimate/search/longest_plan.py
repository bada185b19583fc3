"""Plans of the longest context that trains, and of the longest context whose step is short enough to wait for."""

import math
from dataclasses import replace

from ringformer.estimate.compiler.dump import CompilerFailure
from ringformer.estimate.run_estimate import RunCompiler
from ringformer.estimate.search.candidates import candidates
from ringformer.estimate.search.plan import Plan, plan
from ringformer.estimate.targets import Target


def longest_plan(model: str, target: Target, compute_dtype: str, compiler: RunCompiler) -> Plan:
    """Return the plan of the longest power of two at which a candidate is accepted.

    The search starts at the limit of the closed forms; it goes up from a length that fits, otherwise down. Only at the
    end are neighbours compiled and machine code generated; lengths that fail then are halved again.
    """
    first = 2**12
    while any(not c.reason_against for c in candidates(model, target, 2 * first, compute_dtype)):
        first *= 2
    scheduler = replace(compiler, generate_code=False, thorough=False)
    best = plan(model, target, first, compute_dtype, scheduler)
    while best.run:
        longer = _tried(model, target, 2 * best.seq_len, compute_dtype, scheduler, best.excess)
        if longer.chosen is None:
            break
        best = longer
    while best.chosen is None and best.seq_len > 2**12:
        best = plan(model, target, best.seq_len // 2, compute_dtype, scheduler, excess=best.excess)
    if best.run:
        best = _tried(model, target, best.seq_len, compute_dtype, compiler, best.excess)
        while best.chosen is None and best.seq_len > 2**12:
            best = _tried(model, target, best.seq_len // 2, compute_dtype, compiler, best.excess)
    return best


def longest_plan_within(
    longest: Plan, model: str, target: Target, compute_dtype: str, compiler: RunCompiler, max_step_seconds: float
) -> Plan:
    """Return the plan of the longest power of two, at most that of the plan `longest`, whose modelled step takes at
    most `max_step_seconds`; this may be `longest` itself. Nothing is chosen if no length is fast enough."""
    if longest.step_seconds <= max_step_seconds:
        return longest
    best = longest._replace(chosen=None, run=None)
    length = longest.seq_len
    while best.chosen is None and length >= 2**12:
        best = _tried(model, target, length, compute_dtype, compiler, longest.excess, max_step_seconds=max_step_seconds)
        length //= 2
    return best


def _tried(
    model: str,
    target: Target,
    seq_len: int,
    compute_dtype: str,
    compiler: RunCompiler,
    excess: float,
    *,
    max_step_seconds: float = math.inf,
) -> Plan:
    """Plan a length; if the compiler breaks down on it, log that and choose nothing."""
    try:
        return plan(model, target, seq_len, compute_dtype, compiler, excess=excess, max_step_seconds=max_step_seconds)
    except CompilerFailure as failure:
        compiler.log(f"{seq_len:,} tokens: {failure}")
        return Plan(seq_len, None, None, [], excess)
