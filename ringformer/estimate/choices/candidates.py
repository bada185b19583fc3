"""Candidates of a plan: meshes, layouts, chunks and memory settings, with their closed forms."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, get_args

from ringformer.estimate.choices.memory_settings import possible_head_groups, possible_settings, with_outputs_that_fit
from ringformer.estimate.choices.parallelism import is_possible, parallelisms, with_parallelism
from ringformer.estimate.closed_forms.block_costs import block_seconds
from ringformer.estimate.closed_forms.communication import exposed_seconds
from ringformer.estimate.closed_forms.training import (
    StepTime,
    computation_time,
    gradient_bytes,
    host_bytes,
    peak_bytes,
    state_bytes,
    step_time,
)
from ringformer.estimate.compiler.known_failures import known_failure
from ringformer.estimate.compiler.program_estimate import Estimate
from ringformer.estimate.workloads.training import MemorySettings, Workload, described
from ringformer.hardware import GiB
from ringformer.models.config_checks import OFFLOADABLE, Remat
from ringformer.ops.layouts import VISIBLE, WINDOWED, Layout
from ringformer.ops.ring import RingForm
from ringformer.ops.work_list import default_chunk
from ringformer.runs.choices import Offload
from ringformer.runs.config import reason_against_gradients_in_host

KEPT: list[tuple[Remat, bool]] = [*product(OFFLOADABLE, (False, True)), ("feedforward", False)]
"""Kinds of rematerialisation, each with whether host memory has what is kept."""


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
        if host > target.host_bytes:
            return f"needs {host / GiB:.0f} GiB of host memory per device, a host has {target.host_bytes / GiB:.0f}"
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
        words = [f"mesh {w.mesh_dim} batch {w.batch_size} {m.layout}"]
        if form := described(m):
            words.append(form)
        words.append(m.kernel)
        if m.q_chunk:
            words.append(f"chunk {m.q_chunk}")
        if m.remat != "full":
            words.append(f"remat {m.remat}")
        if m.full_remat_layers:
            words.append(f"full_remat_layers {m.full_remat_layers}")
        words.append(f"head_groups {m.head_groups} remat_group {m.remat_group}")
        if m.offload:
            words.append("offload")
        if w.optimizer.offload != "none":
            words.append(f"offload of {w.optimizer.offload}")
        return " ".join(words)


@lru_cache(maxsize=64)
def candidates(goal: Workload) -> tuple[Candidate, ...]:
    """Return the candidates for a goal, fastest first: every mesh of rings (and of tp within a node, or within 8
    chips), with every layout and memory setting, and with the ways to compute attention that promise a gain over the
    plain ring. Each comes with the target's own kernel and with XLA's blocks; if the target has no kernel, it comes
    with XLA's blocks of two sizes. The last goals are cached: a search for a length asks for each several times."""
    ranked: list[Candidate] = []
    for mesh in meshes(goal):
        ranked += _candidates_on(mesh)
    return tuple(sorted(ranked, key=lambda c: c.seconds_per_token))


def _candidates_on(mesh: Workload) -> Iterator[Candidate]:
    """Yield the candidates on one mesh."""
    key_heads = mesh.model.num_kv_heads // mesh.mesh_shape[2]
    for form in _forms(mesh):
        for (remat, offload), kernel in product(KEPT, _kernels(form)):
            # Fetching ahead would take memory that the longest contexts need.
            config = replace(form.model, remat=remat, offload=offload, fetch_ahead=not offload, **kernel)
            workload = replace(form, model=config)
            for settings in possible_settings(config):
                option = workload.with_settings(settings)
                if key_heads % settings.head_groups == 0 and is_possible(option):
                    for candidate in _with_larger_offloads(counted(option)):
                        yield candidate
                        if fewer := with_outputs_that_fit(candidate.workload):
                            yield counted(fewer)


AMPLE, HOPELESS = 0.6, 2.0
"""Shares of a device's memory, by the closed form: below the first, a compiler hardly ever needs more than there is;
above the second, it never needs less."""


def _with_larger_offloads(candidate: Candidate) -> Iterator[Candidate]:
    """Yield a candidate and, as long as it may not fit, the same with more of its state in host memory, unless what
    stays is hopeless."""
    yield candidate
    workload = candidate.workload
    stays = candidate.peak - state_bytes(workload) - gradient_bytes(workload)
    if stays > HOPELESS * workload.target.budget:
        return
    for part in parts_in_host(workload):
        if candidate.peak > AMPLE * candidate.workload.target.budget:
            candidate = counted(offloading(candidate.workload, part))
            yield candidate


def parts_in_host(workload: Workload) -> tuple[Offload, ...]:
    """Return the parts of a workload's state that host memory can have, each with those before it."""
    if not workload.optimizer.elementwise:
        return ()
    parts = get_args(Offload)[1:]
    reason = reason_against_gradients_in_host(workload.optimizer, workload.model, workload.accumulate)
    return parts[:-1] if reason else parts


def offloading(workload: Workload, part: Offload) -> Workload:
    """Return the workload with a part of its state in host memory."""
    return replace(workload, optimizer=replace(workload.optimizer, offload=part))


def _forms(mesh: Workload) -> Iterator[Workload]:
    """Yield a mesh with every layout, and with the other ways to compute attention in zigzag; the kernel is open."""
    layouts = sorted(VISIBLE, key=lambda layout: layout != "zigzag")  # stable: zigzag first among equals
    has_windows = any(mesh.model.windows)
    for layout in layouts:
        if layout in WINDOWED or not has_windows:
            yield _with_open_kernel(mesh, layout)
    for form in promising(mesh):
        yield _with_open_kernel(form, "zigzag")


def _with_open_kernel(workload: Workload, layout: Layout) -> Workload:
    model = replace(workload.model, layout=layout, kernel="auto", q_chunk=None, k_chunk=None)
    return replace(workload, model=model)


def _kernels(workload: Workload) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two kernels with their chunks: the target's own, and XLA's blocks, half as large if they are its own."""
    model = workload.with_kernel()[0].model
    chunk = None
    if model.kernel == "xla":
        chunk = default_chunk(workload.ring_tokens) // 2
    own = {"kernel": model.kernel, "q_chunk": model.q_chunk, "k_chunk": model.k_chunk}
    return own, {"kernel": "xla", "q_chunk": chunk, "k_chunk": chunk}


def meshes(goal: Workload) -> Iterator[Workload]:
    """Yield the plain ring of the goal's model on every mesh of a slice; other slices have the same. `goal.batch_size`
    sequences are shared by any number of rings, the shortest rings first; if it is 0, each of up to eight rings of a
    slice has one sequence."""
    shape = goal.model
    slices = goal.target.slices
    devices = goal.target.num_devices // slices
    batch = goal.batch_size // slices
    plain = replace(shape, layout="zigzag", ulysses=1, ring="one_way", remat="full", full_remat_layers=0, offload=False)
    numbers = [1, 2, 4, 8]
    if batch:
        most = min(batch, devices)
        numbers = [2**i for i in reversed(range(most.bit_length()))]
    for tp, rings in product((1, 2, 4, 8), numbers):
        sp, left = divmod(devices, tp * rings)
        split = shape.num_heads, shape.intermediate_size, shape.num_kv_heads
        if left or batch % rings or any(size % tp for size in split) or goal.seq_len % (2 * sp * tp):
            continue
        auto = replace(plain, kernel="auto", q_chunk=None, k_chunk=None, head_groups=1, remat_group=1)
        sequences = slices * (batch or rings)
        mesh = replace(goal, model=auto, mesh_dim=f"{slices},{rings},{tp},{sp}", batch_size=sequences)
        yield mesh.with_kernel()[0]


GAIN = 0.97
"""Seconds relative to those of a simpler way that justify another one."""

PROMISING = 2
"""Most ways to compute attention, besides the plain ring, that a mesh is searched with."""


def weighed(mesh: Workload) -> list[Candidate]:
    """Return the ways of a mesh to compute attention, fastest first. A ring both ways or gathered is left out unless it
    gains (`GAIN`) on a plain ring with the same exchange of heads."""
    one_way: dict[int, float] = {}
    kept = []
    for c in map(counted, parallelisms(mesh)):  # for each exchange of heads, the plain ring first
        model = c.workload.model
        plain = one_way.setdefault(model.ulysses, c.time.step)
        if model.ring == "one_way" or c.time.step < GAIN * plain:
            kept.append(c)
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
    for settings in _settings_nearby(workload):
        other = workload.with_settings(settings)
        if is_possible(other):
            yield counted(other)
    for other in _parallelisms_nearby(workload):
        if is_possible(other):
            nearby = counted(other)
            if nearby.time.step < 1.1 * candidate.time.step:
                yield nearby


def _settings_nearby(workload: Workload) -> Iterator[MemorySettings]:
    m = workload.model
    settings = workload.settings
    key_heads = m.num_kv_heads // workload.mesh_shape[2]
    local = workload.ring_tokens
    for groups in _twice_and_half(m.head_groups):
        if groups in possible_head_groups(m) and key_heads % groups == 0:
            yield replace(settings, head_groups=groups)
    for layers in _twice_and_half(m.remat_group):
        if 0 < layers < m.num_layers and not m.full_remat_layers:
            yield replace(settings, remat_group=layers)
    for chunk in _twice_and_half(m.q_chunk or default_chunk(local)):
        if m.kernel == "xla" and 128 <= chunk <= local:
            yield replace(settings, q_chunk=chunk, k_chunk=chunk)


def _parallelisms_nearby(workload: Workload) -> Iterator[Workload]:
    m = workload.model
    for ulysses in _twice_and_half(m.ulysses):
        if ulysses:
            yield with_parallelism(workload, ulysses, m.ring)
    for ring in get_args(RingForm):
        if ring != m.ring:
            yield with_parallelism(workload, m.ulysses, ring)


def _twice_and_half(number: int) -> tuple[int, int]:
    return number * 2, number // 2
