"""Candidates of a plan: meshes, layouts, chunks and memory settings, with their closed forms."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from ringformer.estimate.closed_forms import (
    StepTime,
    computation_time,
    host_bytes,
    itemsize,
    peak_bytes,
    ring_hops,
    state_bytes,
    step_time,
)
from ringformer.estimate.compiler.known_failures import known_failure
from ringformer.estimate.program_estimate import Estimate
from ringformer.estimate.search.memory_settings import possible_head_groups, possible_settings
from ringformer.estimate.workload import Workload
from ringformer.hardware import GiB
from ringformer.models.flops import forward_runs
from ringformer.models.llama_config import OFFLOADABLE
from ringformer.ops.layouts import VISIBLE
from ringformer.ops.work_list import default_chunk


class Candidate(NamedTuple):
    """A workload with its closed forms: bytes on a device and on its host, and the time of a step."""

    workload: Workload
    peak: float
    host: float
    time: StepTime

    @property
    def seconds_per_token(self) -> float:
        return self.time.step / self.time.tokens

    def timed(self, estimate: Estimate | None) -> StepTime:
        """Return the time of the compiled step if there is an estimate, otherwise the time by the closed form."""
        if estimate is None:
            return self.time
        assert estimate.schedule is not None, "what fits has a schedule"
        return step_time(estimate.schedule, self.time.tokens)

    @property
    def impossible(self) -> str:
        """Reason why the candidate cannot work, found without a compiler; empty if a compiler must decide."""
        target, host = self.workload.target, self.host + state_bytes(self.workload)
        if host > target.chip.host_bytes:
            return (
                f"needs {host / GiB:.0f} GiB of host memory per device, a usual host has "
                f"{target.chip.host_bytes / GiB:.0f}"
            )
        return known_failure(self.workload)

    @property
    def reason_against(self) -> str:
        """Reason why the candidate cannot work according to the closed forms; empty if they show no reason."""
        target = self.workload.target
        if self.peak > target.budget:
            return f"needs about {self.peak / GiB:.1f} of {target.budget / GiB:.1f} GiB"
        return self.impossible

    def __str__(self):
        w, m = self.workload, self.workload.model
        chunk = f" chunk {m.q_chunk}" if m.q_chunk else ""
        remat = "" if m.remat == "full" else f" remat {m.remat}"
        return (
            f"mesh {w.mesh_dim} batch {w.batch_size} {m.layout} {m.kernel}{chunk}{remat} head_groups {m.head_groups} "
            f"remat_group {m.remat_group}{' offload' if m.offload else ''}"
        )


def candidates(goal: Workload) -> list[Candidate]:
    """Return the candidates for a goal, fastest first: every mesh of rings (and of tp within a node, or within 8
    chips), with every layout and memory setting. Each comes with the target's own kernel and with XLA's blocks; if the
    target has no kernel, it comes with XLA's blocks of two sizes."""
    ranked = []
    shape, devices, seq_len = goal.model, goal.target.num_devices, goal.seq_len
    for tp, rings in product((1, 2, 4, 8), repeat=2):
        sp, left = divmod(devices, tp * rings)
        split = shape.num_heads, shape.intermediate_size, shape.num_kv_heads
        if left or any(size % tp for size in split) or seq_len % (2 * sp * tp):
            continue
        blocks = {"kernel": "xla", "q_chunk": None, "k_chunk": None}
        half = default_chunk(seq_len // sp) // 2
        for layout in VISIBLE:
            auto = replace(goal, model=replace(shape, layout=layout, kernel="auto"), mesh_dim=f"1,{rings},{tp},{sp}")
            own = {name: getattr(auto.with_kernel()[0].model, name) for name in blocks}
            other = blocks | {"q_chunk": half, "k_chunk": half} if own["kernel"] == "xla" else blocks
            for remat, offload, kernel in product(OFFLOADABLE, (False, True), (own, other)):
                # Fetching ahead would take memory that the longest contexts need.
                ahead = {"offload": offload, "fetch_ahead": not offload}
                config = replace(auto.model, remat=remat, **ahead, **kernel)
                workload = replace(auto, model=config, batch_size=rings)
                ranked += [
                    _counted(workload.with_settings(settings))
                    for settings in possible_settings(config)
                    if (shape.num_kv_heads // tp) % settings.head_groups == 0
                ]
    return sorted(ranked, key=lambda c: c.seconds_per_token)


def _counted(workload: Workload) -> Candidate:
    model, target, (_, _, tp, sp) = workload.model, workload.target, workload.mesh_shape
    of_weights, of_attention = forward_runs(model)
    time, exposed = computation_time(workload), 0.0
    for name, hop in ring_hops(workload).items():
        times = of_attention if name == "forward" else 1
        exposed += times * (sp - 1) * model.num_layers * max(0.0, hop.link - hop.compute)
    # gathers and scatters over tp of attention and feed-forward: forward, recomputed, backward
    moved = 4 * workload.ring_tokens * model.hidden_size * itemsize(model) * (tp - 1) / tp
    exposed += (1 + of_weights) * model.num_layers * moved / target.ring_bandwidth(tp)
    moved = host_bytes(workload) / target.chip.host_bandwidth  # out during forward, back before a layer's backward
    exposed += max(0.0, moved - time.compute / (of_weights + 2)) + moved
    # Groups of heads and small chunks result in more and smaller kernels.
    smaller = math.log2(model.head_groups) + 2 * (model.kernel == "xla" and model.q_chunk is not None)
    slower = 1 + 0.005 * smaller
    time = replace(time, compute=time.compute * slower, exposed=exposed * slower)
    return Candidate(workload, peak_bytes(workload), host_bytes(workload), time)


def neighbours(candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate with half or double the head groups, layers per remat group, or tokens per chunk of XLA's
    blocks (a kernel's chunks are tuned)."""
    workload, m = candidate.workload, candidate.workload.model
    tp, local = workload.mesh_shape[2], workload.ring_tokens
    chunk = m.q_chunk or default_chunk(local)
    options: list[dict[str, int]] = [
        *(
            {"head_groups": g}
            for g in (m.head_groups * 2, m.head_groups // 2)
            if g in possible_head_groups(m) and (m.num_kv_heads // tp) % g == 0
        ),
        *({"remat_group": g} for g in (m.remat_group * 2, m.remat_group // 2) if 0 < g < m.num_layers),
        *({"q_chunk": c, "k_chunk": c} for c in (chunk * 2, chunk // 2) if m.kernel == "xla" and 128 <= c <= local),
    ]
    for option in options:
        yield _counted(workload.with_settings(replace(workload.settings, **option)))
