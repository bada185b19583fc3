"""Which settings to train with: closed forms rank the candidates, the compiler judges them in that order."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from ringformer.estimate import longest_context
from ringformer.estimate.closed_forms import (
    assumption,
    causal_excess,
    compute_seconds,
    hop,
    host_bytes,
    itemsize,
    peak_bytes,
)
from ringformer.estimate.longest_context import Case, Saving, savings
from ringformer.estimate.targets import MissingCompiler, Target, target
from ringformer.hardware import GiB
from ringformer.models.flops import executed_attention_flops, executed_flops
from ringformer.models.llama_config import LlamaConfig
from ringformer.models.llama_presets import preset
from ringformer.ops.layouts import VISIBLE
from ringformer.ops.work_list import default_chunk


class Candidate(NamedTuple):
    """Settings of a run, with what the closed forms say of them: bytes of a device and of its host, seconds a token."""

    case: Case
    saving: Saving
    peak: float
    host: float
    seconds_per_token: float

    def loses(self, goal: Target) -> str:
        """Why it cannot be; empty if it can, as far as the closed forms know."""
        chip, budget = goal.chip, goal.budget
        if self.peak > budget:
            return f"needs about {self.peak / GiB:.1f} of {budget / GiB:.1f} GiB"
        if self.host > chip.host_bytes:
            return (
                f"needs {self.host / GiB:.0f} GiB of host memory a device, a usual host has {chip.host_bytes / GiB:.0f}"
            )
        return ""

    def __str__(self):
        c, s = self.case, self.saving
        chunk = f" chunk {s.q_chunk}" if s.q_chunk else ""
        return (f"mesh {c.mesh_dim} batch {c.batch_size} {c.layout}{chunk} head_groups {s.head_groups} "
                f"remat_group {s.remat_group}{' offload' if c.offload else ''}")  # fmt: skip


def candidates(model: str, goal: Target, seq_len: int, compute_dtype: str, devices: int) -> list[Candidate]:
    """Every mesh of rings (and of tp within a node, or within 8 chips) with every layout, chunk and memory setting; the
    fastest first."""
    found = []
    shape = LlamaConfig(**preset(model))
    for tp in (1, 2, 4, 8):
        if shape.num_heads % tp or shape.intermediate_size % tp or shape.num_kv_heads % tp:
            continue
        for rings in (1, 2, 4, 8):
            sp = devices // (tp * rings)
            if sp * tp * rings != devices or seq_len % (2 * sp * tp):
                continue
            mesh, usual = f"1,{rings},{tp},{sp}", default_chunk(seq_len // sp)
            for layout, offload, chunk in product(VISIBLE, (False, True), (None, usual // 2)):
                case = Case(model, goal.name, "ring", compute_dtype, mesh, rings, offload, layout)
                for saving in savings(replace(shape, q_chunk=chunk, k_chunk=chunk)):
                    if (shape.num_kv_heads // tp) % saving.head_groups == 0:
                        found.append(_candidate(case, saving, goal, seq_len, tp, sp))
    return sorted(found, key=lambda c: c.seconds_per_token)


def _candidate(case: Case, saving: Saving, goal: Target, seq_len: int, tp: int, sp: int) -> Candidate:
    model, local = case.config(saving), seq_len // (sp * tp)
    ring = seq_len // sp  # tokens of a ring's rank; with tp its heads are spread, not its tokens
    forwards = 2 + (saving.remat_group > 1)
    wasted = causal_excess(case.layout, ring, sp, saving.q_chunk) - 1
    flops = executed_flops(model, seq_len, forwards) + wasted * executed_attention_flops(model, seq_len, forwards)
    compute = compute_seconds(flops / (sp * tp), goal.chip.flops(case.compute_dtype))
    exposed = 0.0
    for backward, times in ((False, forwards), (True, 1)):
        one = hop(model, goal, ring, ranks=sp * tp, tp=tp, backward=backward)
        exposed += times * (sp - 1) * model.num_layers * max(0.0, one.link - one.compute)
    if tp > 1:  # gathers into, scatters out of attention and feed-forward; forward, recomputed, backward
        moved = 4 * ring * model.hidden_size * itemsize(model) * (tp - 1) / tp
        exposed += (1 + forwards) * model.num_layers * moved / goal.ring_bandwidth(tp)
    # Groups of heads and small chunks make more, smaller kernels; a transfer to the host is taken to be hidden.
    smaller = math.log2(saving.head_groups) + 2 * (saving.q_chunk is not None)
    seconds = (compute + exposed) * (1 + 0.005 * smaller + 0.002 * case.offload)
    peak = peak_bytes(model, local, devices=case.batch_size * sp * tp, tp=tp)
    return Candidate(case, saving, peak, host_bytes(model, local), seconds / (seq_len * case.batch_size))


class Plan(NamedTuple):
    """The chosen candidate, None if none fits, and its compiled estimate, None if the compiler is not installed."""

    seq_len: int
    chosen: Candidate | None
    estimate: dict | None
    refused: list[tuple[Candidate, str]]
    """What lost against it, fastest first, and why."""
    excess: float = 1.0
    """By how much the compiler's bytes exceeded the closed form's where it refused a candidate."""


def plan(
    model: str,
    target_name: str,
    seq_len: int,
    compute_dtype: str,
    log: Callable[[str], None],
    attempts: int = 4,
    excess: float = 1.0,
) -> Plan:
    """The fastest settings that the compiler accepts, trying at most `attempts` of the likely ones.

    What it refuses corrects the closed forms for those that follow. Without the compiler it is the fastest that the
    closed forms let fit, and the log says what to install.
    """
    goal = target(target_name)
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len} must be at least 1; without it, the longest context is planned")
    ranked = candidates(model, goal, seq_len, compute_dtype, goal.num_devices)
    if not ranked:
        raise ValueError(f"no mesh of {target_name} divides sequences of {seq_len} tokens; use a power of two")
    refused = [(c, why) for c in ranked if (why := c.loses(goal))]
    likely = [c for c in ranked if not c.loses(goal)]
    try:
        goal.require_compiler()
    except MissingCompiler as missing:
        log(str(missing))
        return Plan(seq_len, likely[0] if likely else None, None, refused + _slower(likely))
    # The closed forms, corrected or not, may be wrong about the smallest: the compiler decides.
    smallest = min(likely or ranked, key=lambda c: c.peak)
    for candidate in likely or [smallest]:
        if candidate is not smallest and candidate.peak * excess > goal.budget:
            refused.append((candidate, f"needs about {candidate.peak * excess / GiB:.1f} GiB, after what was compiled"))
            continue
        if attempts == 0:
            break
        attempts -= 1
        log(f"compiling {candidate}, {seq_len:,} tokens")
        found = longest_context.run(candidate.case.command(seq_len, candidate.saving))
        if found["fits"]:
            rest = [c for c in likely if c.seconds_per_token >= candidate.seconds_per_token]
            return Plan(seq_len, candidate, found, refused + _slower([candidate, *rest]), excess)
        refused.append((candidate, f"compiled: needs {found['peak_bytes'] / GiB:.2f} GiB"))
        excess = max(excess, found["peak_bytes"] / candidate.peak)
    return Plan(seq_len, None, None, refused, excess)


def _slower(ranked: list[Candidate]) -> list[tuple[Candidate, str]]:
    """Those that take longer than the first, and by how much."""
    pairs = [(c, c.seconds_per_token / ranked[0].seconds_per_token - 1) for c in ranked]
    return [(c, f"{slower:.1%} slower (modelled)") for c, slower in pairs if slower > 0]


def longest_plan(model: str, target_name: str, compute_dtype: str, log: Callable[[str], None]) -> Plan:
    """The plan of the longest power of two that some candidate is accepted at."""
    goal = target(target_name)
    devices, length = goal.num_devices, 2**12
    while any(not c.loses(goal) for c in candidates(model, goal, 2 * length, compute_dtype, devices)):
        length *= 2
    best = plan(model, target_name, length, compute_dtype, log)
    while best.chosen is None and length > 2**12:
        length //= 2
        best = plan(model, target_name, length, compute_dtype, log, excess=best.excess)
    return best


def _verdict(c: Candidate, e: dict | None, seq_len: int) -> str:
    """The line that says how much memory and time it takes, and who says so."""
    if e is None:
        need, have, host = c.peak, target(c.case.target).chip.hbm_bytes, c.host
        said, step = "closed form, not compiled", c.seconds_per_token * seq_len * c.case.batch_size
        exposed, rate = "", 1 / c.seconds_per_token
    else:
        need, have, host, said = e["peak_bytes"], e["hbm_bytes"], e["host_bytes"], "compiled"
        exposed = f"{e['exposed_in_ring_loops_bytes'] / GiB:.1f} GiB of ring bytes exposed in its loops; "
        step, rate = e["step_seconds_model"], e["tokens_per_second_model"]
    of_host = f", {host / GiB:.1f} GiB of host memory a device" if host else ""
    return (
        f"  {said}: {need / GiB:.2f} of {have / GiB:.2f} GiB{of_host}; {exposed}modelled {step:,.0f} s a step, "
        f"{rate:,.0f} tokens/s ({assumption()})"
    )


def as_text(model: str, target_name: str, found: Plan, shown: int = 8) -> str:
    title = f"{model} on {target_name}, {found.seq_len:,} tokens"
    lines = []
    if found.chosen is None:
        lines += [f"{title}: nothing fits that was tried", "  use a larger slice, or half the sequence"]
    else:
        c = found.chosen
        lines += [
            f"{title}: {c}",
            _verdict(c, found.estimate, found.seq_len),
            "  the config to use:",
            f"    --config.seq_len={found.seq_len} --config.batch_size={c.case.batch_size} "
            f"--config.mesh_dim={c.case.mesh_dim}",
            f"    --config.model.compute_dtype={c.case.compute_dtype} --config.model.remat=full "
            f"--config.model.head_groups={c.saving.head_groups} --config.model.remat_group={c.saving.remat_group} "
            f"--config.model.offload={c.case.offload}",
            f"    --config.model.layout={c.case.layout}"
            + (
                f" --config.model.q_chunk={c.saving.q_chunk} --config.model.k_chunk={c.saving.k_chunk}"
                if c.saving.q_chunk
                else ""
            ),
        ]
    lines.append(f"  why not the others (the fastest {min(shown, len(found.refused))} of {len(found.refused)}):")
    ordered = sorted(found.refused, key=lambda item: item[0].seconds_per_token)
    lines += [f"    {c!s:60s} {why}" for c, why in ordered[:shown]]
    return "\n".join(lines)
