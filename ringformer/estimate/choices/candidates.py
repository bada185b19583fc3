"""Candidates of a plan: meshes, layouts, chunks and memory settings, with their closed forms."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple, get_args

from ringformer.estimate.choices.memory_settings import possible_head_groups, possible_settings
from ringformer.estimate.choices.parallelism import is_possible, parallelisms, with_parallelism
from ringformer.estimate.closed_forms.block_costs import block_seconds
from ringformer.estimate.closed_forms.communication import exposed_seconds
from ringformer.estimate.closed_forms.training import (
    StepTime,
    computation_time,
    host_bytes,
    peak_bytes,
    state_bytes,
    step_time,
)
from ringformer.estimate.compiler.known_failures import known_failure
from ringformer.estimate.compiler.program_estimate import Estimate
from ringformer.estimate.workloads.training import Workload, described
from ringformer.hardware import GiB
from ringformer.models.config_checks import OFFLOADABLE
from ringformer.ops.layouts import VISIBLE, WINDOWED
from ringformer.ops.ring import RingForm
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
        target = self.workload.target
        host = self.host + state_bytes(self.workload)
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

    def __str__(self) -> str:
        w = self.workload
        m = self.workload.model
        chunk = f" chunk {m.q_chunk}" if m.q_chunk else ""
        remat = "" if m.remat == "full" else f" remat {m.remat}"
        form = f" {described(m)}" if described(m) else ""
        settings = f"head_groups {m.head_groups} remat_group {m.remat_group}{' offload' if m.offload else ''}"
        return f"mesh {w.mesh_dim} batch {w.batch_size} {m.layout}{form} {m.kernel}{chunk}{remat} {settings}"


@lru_cache(maxsize=64)
def candidates(goal: Workload) -> tuple[Candidate, ...]:
    """Return the candidates for a goal, fastest first: every mesh of rings (and of tp within a node, or within 8
    chips), with every layout and memory setting, and with the ways to compute attention that promise a gain over the
    plain ring. Each comes with the target's own kernel and with XLA's blocks; if the target has no kernel, it comes
    with XLA's blocks of two sizes. The last goals are cached: a search for a length asks for each several times."""
    ranked = []
    for mesh in meshes(goal):
        shape = mesh.model
        tp = mesh.mesh_shape[2]
        layouts = sorted(VISIBLE, key=lambda layout: layout != "zigzag")  # stable: zigzag first among equals
        if any(shape.windows):
            layouts = [layout for layout in layouts if layout in WINDOWED]
        for layout, form in [*((layout, mesh) for layout in layouts), *(("zigzag", x) for x in promising(mesh))]:
            blocks = {"kernel": "xla", "q_chunk": None, "k_chunk": None}
            auto = replace(form, model=replace(form.model, layout=layout, kernel="auto", q_chunk=None, k_chunk=None))
            own = {name: getattr(auto.with_kernel()[0].model, name) for name in blocks}
            half = default_chunk(auto.ring_tokens) // 2
            other = blocks | {"q_chunk": half, "k_chunk": half} if own["kernel"] == "xla" else blocks
            for remat, offload, kernel in product(OFFLOADABLE, (False, True), (own, other)):
                # Fetching ahead would take memory that the longest contexts need.
                ahead = {"offload": offload, "fetch_ahead": not offload}
                config = replace(auto.model, remat=remat, **ahead, **kernel)
                ranked += [
                    counted(option)
                    for settings in possible_settings(config)
                    if (shape.num_kv_heads // tp) % settings.head_groups == 0
                    and is_possible(option := replace(auto, model=config).with_settings(settings))
                ]
    return tuple(sorted(ranked, key=lambda c: c.seconds_per_token))


def meshes(goal: Workload) -> Iterator[Workload]:
    """Yield the plain ring of the goal's model on every mesh. `goal.batch_size` sequences are shared by any number of
    rings, the shortest rings first; if it is 0, each of up to eight rings has one sequence."""
    shape = goal.model
    devices = goal.target.num_devices
    batch = goal.batch_size
    plain = replace(shape, layout="zigzag", ulysses=1, ring="one_way", remat="full", offload=False)
    most = min(batch, devices) if batch else 8
    numbers = [2**i for i in range(most.bit_length())]
    for tp, rings in product((1, 2, 4, 8), reversed(numbers) if batch else numbers):
        sp, left = divmod(devices, tp * rings)
        split = shape.num_heads, shape.intermediate_size, shape.num_kv_heads
        if left or batch % rings or any(size % tp for size in split) or goal.seq_len % (2 * sp * tp):
            continue
        auto = replace(plain, kernel="auto", q_chunk=None, k_chunk=None, head_groups=1, remat_group=1)
        mesh = replace(goal, model=auto, mesh_dim=f"1,{rings},{tp},{sp}", batch_size=batch or rings)
        yield mesh.with_kernel()[0]


GAIN = 0.97
"""Seconds relative to those of a simpler way that justify another one."""

PROMISING = 2
"""Most ways to compute attention, besides the plain ring, that a mesh is searched with."""


def weighed(mesh: Workload) -> list[Candidate]:
    """Return the ways of a mesh to compute attention, fastest first. A ring both ways or gathered is left out unless it
    gains (`GAIN`) on a plain ring with the same exchange of heads."""
    ways = [counted(x) for x in parallelisms(mesh)]
    one_way = {c.workload.model.ulysses: c.time.step for c in ways if c.workload.model.ring == "one_way"}
    kept = [
        c for c in ways if c.workload.model.ring == "one_way" or c.time.step < GAIN * one_way[c.workload.model.ulysses]
    ]
    return sorted(kept, key=lambda c: (c.time.step, c.workload.model.ring != "one_way"))


def promising(mesh: Workload) -> list[Workload]:
    """Return the fastest ways of a mesh to compute attention that gain (`GAIN`) on its plain ring."""
    ways = weighed(mesh)
    plain = counted(mesh).time.step
    return [c.workload for c in ways if c.time.step < GAIN * plain][:PROMISING]


def counted(workload: Workload) -> Candidate:
    """Return a workload with its closed forms."""
    model = workload.model
    time = computation_time(workload)
    # Groups of heads and small chunks result in more and smaller kernels.
    smaller = math.log2(model.head_groups) + 2 * (model.kernel == "xla" and model.q_chunk is not None)
    slower = 1 + 0.005 * smaller
    compute = time.compute + block_seconds(workload)
    exposed = sum(exposed_seconds(workload).values())
    time = replace(time, compute=compute * slower, exposed=exposed * slower)
    return Candidate(workload, peak_bytes(workload), host_bytes(workload), time)


def neighbours(candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate with half or double the head groups, layers per remat group, or tokens per chunk of XLA's
    blocks (a kernel's chunks are tuned); and with half or double the devices that exchange heads, or another form of
    the ring, unless that is over 10% slower by the closed form."""
    workload = candidate.workload
    m = candidate.workload.model
    tp = workload.mesh_shape[2]
    local = workload.ring_tokens
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
        other = workload.with_settings(replace(workload.settings, **option))
        if is_possible(other):
            yield counted(other)
    forms = [(u, m.ring) for u in (m.ulysses * 2, m.ulysses // 2) if u]
    forms += [(m.ulysses, ring) for ring in get_args(RingForm) if ring != m.ring]
    for ulysses, ring in forms:
        other = with_parallelism(workload, ulysses, ring)
        if is_possible(other):
            nearby = counted(other)
            if nearby.time.step < 1.1 * candidate.time.step:
                yield nearby
