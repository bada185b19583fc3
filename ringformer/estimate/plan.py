"""Which settings to train with: closed forms rank the candidates, the compiler judges them in that order."""

import math
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from ringformer.estimate.closed_forms import (
    computation_seconds,
    hop,
    host_bytes,
    itemsize,
    peak_bytes,
    state_bytes,
    step_time,
)
from ringformer.estimate.compiler_dump import CompilerFailure
from ringformer.estimate.known_failures import known_failure
from ringformer.estimate.memory_settings import possible_settings
from ringformer.estimate.program_estimate import Estimate
from ringformer.estimate.run_estimate import RunCompiler, RunEstimate
from ringformer.estimate.targets import MissingCompiler, Target
from ringformer.estimate.workload import Workload
from ringformer.hardware import GiB
from ringformer.models.llama_config import LlamaConfig
from ringformer.models.llama_presets import preset
from ringformer.ops.layouts import VISIBLE
from ringformer.ops.work_list import default_chunk


class Candidate(NamedTuple):
    """A workload with what the closed forms say of it: bytes of a device and of its host, seconds a token."""

    workload: Workload
    peak: float
    host: float
    seconds_per_token: float

    @property
    def step_seconds(self) -> float:
        return self.seconds_per_token * self.workload.step_tokens

    @property
    def impossible(self) -> str:
        """Why no compiler need be asked; empty if one must be."""
        target, host = self.workload.target, self.host + state_bytes(self.workload)
        if host > target.chip.host_bytes:
            return (f"needs {host / GiB:.0f} GiB of host memory a device, a usual host has "
                    f"{target.chip.host_bytes / GiB:.0f}")  # fmt: skip
        return known_failure(self.workload)

    @property
    def reason_against(self) -> str:
        """Why it cannot be; empty if it can, as far as the closed forms know."""
        target = self.workload.target
        if self.peak > target.budget:
            return f"needs about {self.peak / GiB:.1f} of {target.budget / GiB:.1f} GiB"
        return self.impossible

    def __str__(self):
        w, m = self.workload, self.workload.model
        chunk = f" chunk {m.q_chunk}" if m.q_chunk else ""
        return (f"mesh {w.mesh_dim} batch {w.batch_size} {m.layout}{chunk} head_groups {m.head_groups} "
                f"remat_group {m.remat_group}{' offload' if m.offload else ''}")  # fmt: skip


def candidates(model: str, target: Target, seq_len: int, compute_dtype: str) -> list[Candidate]:
    """Every mesh of rings (and of tp within a node, or within 8 chips) with every layout, chunk and memory setting; the
    fastest first."""
    ranked = []
    shape = LlamaConfig(**preset(model) | {"compute_dtype": compute_dtype})
    for tp in (1, 2, 4, 8):
        if shape.num_heads % tp or shape.intermediate_size % tp or shape.num_kv_heads % tp:
            continue
        for rings in (1, 2, 4, 8):
            sp = target.num_devices // (tp * rings)
            if sp * tp * rings != target.num_devices or seq_len % (2 * sp * tp):
                continue
            usual = default_chunk(seq_len // sp)
            for layout, offload, chunk in product(VISIBLE, (False, True), (None, usual // 2)):
                config = replace(shape, layout=layout, offload=offload, q_chunk=chunk, k_chunk=chunk)
                workload = Workload(config, target, f"1,{rings},{tp},{sp}", seq_len, batch_size=rings, name=model)
                ranked += [
                    _candidate(workload.with_settings(settings))
                    for settings in possible_settings(config)
                    if (shape.num_kv_heads // tp) % settings.head_groups == 0
                ]
    return sorted(ranked, key=lambda c: c.seconds_per_token)


def _candidate(workload: Workload) -> Candidate:
    model, target, seq_len = workload.model, workload.target, workload.seq_len
    _, rings, tp, sp = workload.mesh_shape
    ring = seq_len // sp  # tokens of a ring's rank; with tp its heads are spread, not its tokens
    forwards = 2 + (model.remat_group > 1)
    compute = computation_seconds(workload)
    exposed = 0.0
    for backward, times in ((False, forwards), (True, 1)):
        one_hop = hop(model, target, ring, ranks=sp * tp, tp=tp, backward=backward)
        exposed += times * (sp - 1) * model.num_layers * max(0.0, one_hop.link - one_hop.compute)
    if tp > 1:  # gathers into, scatters out of attention and feed-forward; forward, recomputed, backward
        moved = 4 * ring * model.hidden_size * itemsize(model) * (tp - 1) / tp
        exposed += (1 + forwards) * model.num_layers * moved / target.ring_bandwidth(tp)
    # Groups of heads and small chunks make more, smaller kernels; a transfer to the host is taken to be hidden.
    smaller = math.log2(model.head_groups) + 2 * (model.q_chunk is not None)
    seconds = (compute + exposed) * (1 + 0.005 * smaller + 0.002 * model.offload)
    return Candidate(workload, peak_bytes(workload), host_bytes(workload), seconds / (seq_len * rings))


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
) -> Plan:
    """The fastest settings of a preset of which the compiler accepts all programs, trying at most `attempts` of the
    likely ones.

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


def _slower(ranked: list[Candidate]) -> list[tuple[Candidate, str]]:
    """The candidates that take longer than the first, and by how much."""
    pairs = [(c, c.seconds_per_token / ranked[0].seconds_per_token - 1) for c in ranked]
    return [(c, f"{slower:.1%} slower (modelled)") for c, slower in pairs if slower > 0]


def step_seconds(c: Candidate, e: Estimate | None) -> float:
    """Seconds of a step, modelled: of the compiled one, or counted."""
    if e is None:
        return c.step_seconds
    assert e.schedule is not None, "what fits has a schedule"
    return step_time(e.schedule, c.workload.step_tokens).step
