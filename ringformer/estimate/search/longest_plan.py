"""The plan of the longest context that trains, and of the longest whose step a person would wait for."""

import math
from dataclasses import replace

from ringformer.estimate.compiler.dump import CompilerFailure
from ringformer.estimate.run_estimate import RunCompiler
from ringformer.estimate.search.candidates import candidates
from ringformer.estimate.search.plan import Plan, plan
from ringformer.estimate.targets import Target


def longest_plan(model: str, target: Target, compute_dtype: str, compiler: RunCompiler) -> Plan:
    """The plan of the longest power of two that some candidate is accepted at.

    The search begins where the closed forms end, and goes up from a length that fits, else down. Neighbours are
    compiled and machine code is generated where it ends; what fails there is halved again.
    """
    first = 2**12
    while any(not c.reason_against for c in candidates(model, target, 2 * first, compute_dtype)):
        first *= 2
    scheduler = replace(compiler, generate_code=False, thorough=False)
    found = plan(model, target, first, compute_dtype, scheduler)
    while found.run:
        longer = _tried(model, target, 2 * found.seq_len, compute_dtype, scheduler, found.excess)
        if longer.chosen is None:
            break
        found = longer
    while found.chosen is None and found.seq_len > 2**12:
        found = plan(model, target, found.seq_len // 2, compute_dtype, scheduler, excess=found.excess)
    if found.run:
        found = _tried(model, target, found.seq_len, compute_dtype, compiler, found.excess)
        while found.chosen is None and found.seq_len > 2**12:
            found = _tried(model, target, found.seq_len // 2, compute_dtype, compiler, found.excess)
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
    """The plan of a length; of one that the compiler breaks down on, that is said, and nothing is chosen."""
    try:
        return plan(model, target, seq_len, compute_dtype, compiler, excess=excess, max_step_seconds=max_step_seconds)
    except CompilerFailure as failure:
        compiler.log(f"{seq_len:,} tokens: {failure}")
        return Plan(seq_len, None, None, [], excess)
