"""Search for the mesh and chunks of a context, and for the longest context on a target. Closed forms choose what to
compile; the compiler decides what fits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ringformer.estimate.closed_forms.inference import cache_bytes, prefill_peak, prefill_seconds, weight_bytes
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.compiler.program_estimate import Estimate
from ringformer.estimate.workloads.inference import DECODE, LOADING, PREFILL, InferenceWorkload
from ringformer.hardware import GiB

ATTEMPTS = 3
"""Number of prefills to compile before a context is reported not to fit."""
SHORTEST = 2**10
"""Shortest context to try, in tokens."""
SMALLEST_CHUNK = 2**11
"""Smallest chunk to try, in tokens."""


class Accepted(NamedTuple):
    """A workload and the estimates of its programs compiled so far."""

    workload: InferenceWorkload
    estimates: dict[str, Estimate]
    """Estimates of the requested programs, by name."""

    @property
    def fits(self) -> bool:
        return all(e.fits for e in self.estimates.values())


def candidates(workload: InferenceWorkload, mesh: bool, chunk: bool) -> Iterator[InferenceWorkload]:
    """Yield variants of a workload: with `mesh`, on every mesh of tp and sp; with `chunk`, with every power-of-two
    chunk that divides the context. Combinations that are invalid for every session are left out."""
    n = workload.target.num_devices
    meshes = [workload.mesh_dim]
    if mesh:
        meshes = [f"1,1,{tp},{n // tp}" for tp in (1, 2, 4, 8) if n % tp == 0]
    chunks = [workload.prefill_chunk]
    if chunk:
        size = workload.seq_len // 2
        while size >= SMALLEST_CHUNK:
            chunks.append(size)
            size //= 2
    for mesh_dim in meshes:
        for tokens in chunks:
            option = replace(workload, mesh_dim=mesh_dim, prefill_chunk=tokens)
            try:
                option.check()
            except ValueError:
                if not mesh and not chunk:
                    raise
                continue
            yield option.with_kernel()[0]


def likely(workload: InferenceWorkload, *, mesh: bool, chunk: bool) -> list[InferenceWorkload]:
    """Return the candidates in the order in which to compile them: those that should fit, fastest first, then the
    smallest.

    Raises ValueError if every candidate is invalid for a session.
    """
    options = list(candidates(workload, mesh, chunk))
    if not options:
        workload.check()
        raise ValueError(
            f"no mesh of {workload.target.name} can hold a context of {workload.seq_len} tokens: set --mesh_dim, or "
            "use a power of two"
        )
    fitting = [option for option in options if prefill_peak(option) <= workload.target.budget]
    fastest = _spread(sorted(fitting, key=prefill_seconds))
    smallest = min(options, key=prefill_peak)
    return list(dict.fromkeys([*fastest, smallest]))[:ATTEMPTS]


def _spread(ranked: list[InferenceWorkload]) -> list[InferenceWorkload]:
    """Return the first workload, and then each workload that needs at most three quarters of the working memory of the
    one returned before it."""
    chosen: list[InferenceWorkload] = []
    for option in ranked:
        if not chosen or _working(option) <= 0.75 * _working(chosen[-1]):
            chosen.append(option)
    return chosen[: ATTEMPTS - 1]


def _working(workload: InferenceWorkload) -> float:
    return prefill_peak(workload) - weight_bytes(workload) - cache_bytes(workload)


def first_accepted(options: list[InferenceWorkload], program: str, log: Callable[[str], None]) -> Accepted:
    """Compile a program for one workload after another until one fits; return the workload that was compiled last.
    Raises the errors of `compile_apart`."""
    for option in options:
        size = f"{option.seq_len:,} tokens, mesh {option.mesh_dim}"
        line = f"compiling the {program} for {option.target.topology}: {size}"
        if option.chunks > 1 and program == PREFILL:
            line += f" in chunks of {option.chunk:,}"
        log(line)
        accepted = Accepted(option, {program: compile_apart(option, program)})
        if accepted.fits:
            break
    return accepted


def completed(accepted: Accepted, programs: tuple[str, ...], log: Callable[[str], None]) -> Accepted:
    """Add the estimates of more programs, stopping after the first that does not fit. Raises the errors of
    `compile_apart`."""
    for name in programs:
        if name not in accepted.estimates and accepted.fits:
            more = first_accepted([accepted.workload], name, log).estimates
            accepted = accepted._replace(estimates=accepted.estimates | more)
    return accepted


def whole(options: list[InferenceWorkload], log: Callable[[str], None]) -> Accepted:
    """Compile one workload after another until a prefill fits, then compile the other programs of that workload. Raises
    the errors of `compile_apart`."""
    return completed(first_accepted(options, PREFILL, log), (DECODE, LOADING), log)


def longest(
    workload: InferenceWorkload, *, mesh: bool, chunk: bool, log: Callable[[str], None]
) -> tuple[Accepted | None, list[str]]:
    """Search powers of two for the longest context that fits prefill, decoding and loading; the workload's own context
    is ignored. Also return the reasons why longer contexts do not fit. The result is None if not even SHORTEST tokens
    fit. Raises the errors of `compile_apart`.

    Weights and cache are counted before compilation, because they are arguments and need memory in any case.
    """
    reasons: list[str] = []
    length = SHORTEST
    budget = workload.target.budget

    def held(tokens: int) -> float:
        """Bytes of weights and cache on the mesh where they take the least."""
        sized = replace(workload, seq_len=tokens, prefill_chunk=None)
        return min(weight_bytes(o) + cache_bytes(o) for o in candidates(sized, mesh, False))

    while held(length) <= budget:
        length *= 2
    reasons.append(f"{length:,} tokens: weights and cache alone are {held(length) / GiB:.2f} of {budget / GiB:.2f} GiB")
    length //= 2
    while length >= SHORTEST:
        sized = replace(workload, seq_len=length)
        if chunk or workload.chunk <= length:
            accepted = whole(likely(sized, mesh=mesh, chunk=chunk), log)
            if accepted.fits:
                return accepted, reasons
            for name, e in accepted.estimates.items():
                if not e.fits:
                    needed = f"{e.peak_bytes / GiB:.2f} of {e.budget / GiB:.2f} GiB"
                    reasons.append(f"{length:,} tokens: the {name} needs {needed}")
            if LOADING in accepted.estimates:  # it does not fit, at any length
                break
        length //= 2
    return None, reasons
