"""Hidden and exposed communication of a program, read from the compiler's schedule.

A collective with a start and an end travels while the instructions between the two execute. It is hidden if these
instructions take (`program_seconds.py`) at least as long as the collective's bytes take on their busiest link
(`link_loads.py`). Permutes and all-to-alls queue on the links that they share, in the order in which they start. A
collective without a separate start is exposed. So is a collective in a branch that may not be taken. Copies to the host
share one link, and copies from the host share another; both kinds also travel while the device waits for collectives.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from jaxtyping import Float

from ringformer.estimate.compiled.program_text import COLLECTIVES, Program
from ringformer.estimate.seconds.link_loads import QUEUED, gather_rate, link_seconds
from ringformer.estimate.seconds.program_seconds import ProgramSeconds, Rates, Seconds, certain_seconds, host_waits
from ringformer.estimate.seconds.transfers import (
    ACROSS,
    TO_AND_FROM_HOST,
    Span,
    across_groups,
    collectives,
    host_copies,
    sums_across_slices,
)
from ringformer.ops.ring_passes import LOOP


@dataclass(frozen=True)
class Transfer:
    """One collective instruction, or one copy to or from the host, executed `count` times."""

    kind: str
    """One of `COLLECTIVES`, `TO_AND_FROM_HOST` or `ACROSS`."""
    dtype: str
    shape: tuple[int, ...]
    count: float
    bytes: int
    """Bytes that one device sends in each execution, or receives in a gather. In an all-to-all, they include the part
    that it keeps."""
    asynchronous: bool
    seconds: float
    """Seconds from its start until its last byte arrives; permutes, all-to-alls and copies queue behind earlier ones on
    the same links."""
    cover: float
    """Seconds of computation between its start and its end."""
    wait: float
    """Seconds that the device idles at its end."""
    in_ring_loop: bool
    op_name: str
    """JAX's name of the operation, preceded by its name scopes."""

    @property
    def all_bytes(self) -> float:
        """Bytes of all executions."""
        return self.count * self.bytes

    @property
    def hidden(self) -> bool:
        return self.asynchronous and self.cover >= self.seconds


@dataclass(frozen=True)
class Schedule:
    """Seconds and communication of one step on one device."""

    transfers: list[Transfer]
    flops: float
    """Matrix multiplication FLOPs of one step on one device; chunk pairs count as if a sequence were one document."""
    rates: Rates
    purposes: dict[str, Seconds]
    """Seconds of computation by purpose; chunk pairs count as if a sequence were one document."""
    host_waits: dict[str, float] = field(default_factory=dict)
    """Upper bound of the number of times that a GPU waits for its host, by purpose."""

    @property
    def seconds(self) -> Seconds:
        """Seconds of computation, as if all communication were hidden."""
        return sum(self.purposes.values(), Seconds())

    @property
    def host_seconds(self) -> float:
        """Seconds that a GPU waits for its host."""
        return sum(self.host_waits.values()) * self.rates.efficiency.host_wait

    @property
    def executions(self) -> float:
        """Number of executed transfers."""
        return sum(t.count for t in self.transfers)

    def bytes(self, kinds: Collection[str], hidden: bool) -> float:
        return sum(t.all_bytes for t in self.transfers if t.kind in kinds and t.hidden == hidden)

    @property
    def hidden_permute_bytes(self) -> float:
        return self.bytes(("collective-permute",), True)

    @property
    def exposed_permute_bytes(self) -> float:
        return self.bytes(("collective-permute",), False)

    @property
    def hidden_exchange_bytes(self) -> float:
        """Bytes of hidden exchanges of heads, with the parts that stay on the device."""
        return self.bytes(("all-to-all",), True)

    @property
    def exposed_exchange_bytes(self) -> float:
        """Bytes of exposed exchanges of heads."""
        return self.bytes(("all-to-all",), False)

    @property
    def exposed_in_ring_loops(self) -> float:
        """Bytes of exposed permutes inside the loops over hops."""
        return sum(t.all_bytes for t in self.transfers if t.in_ring_loop and not t.hidden)

    @property
    def exposed_gather_bytes(self) -> float:
        """Bytes of exposed collectives other than permutes and all-to-alls: weights gathered, gradients reduced."""
        return self.bytes(set(COLLECTIVES).difference(QUEUED), False)

    @property
    def exposed_seconds(self) -> float:
        """Seconds that communication adds to the step."""
        return sum(t.count * t.wait for t in self.transfers)

    @property
    def exposed_slices_seconds(self) -> float:
        """Part of `exposed_seconds`: what crosses the network between slices, or groups of GPUs."""
        return sum(t.count * t.wait for t in self.transfers if t.kind in ACROSS)

    @property
    def exposed_host_seconds(self) -> float:
        """Part of `exposed_seconds`: copies to and from the host."""
        return sum(t.count * t.wait for t in self.transfers if t.kind in TO_AND_FROM_HOST)


def read_schedule(text: str, rates: Rates, cycles: Mapping[str, float] | None = None) -> Schedule:
    """Read the schedule from a compiled program's text; `cycles` holds cycles of machine code by `KernelKeys.key`."""
    program = Program.parse(text)
    seconds = ProgramSeconds(program, rates, cycles or {})
    loops: dict[str, str] = {}
    for instructions in program.computations.values():
        for instruction in instructions.values():
            if instruction.opcode == "while":
                loops |= dict.fromkeys(instruction.called, instruction.op_name)
    transfers = []
    for name, count in program.executed.items():
        transfers += _of_computation(seconds, name, count, loops.get(name))
    waits = {} if rates.cycles else host_waits(program)
    return Schedule(transfers, program.flops(program.entry), rates, seconds.purposes, waits)


def _of_computation(seconds: ProgramSeconds, name: str, count: float, loop: str | None) -> list[Transfer]:
    """Return the transfers of a computation. If the computation is a loop's body, `loop` is the op name of that
    loop."""
    program = seconds.program
    rates = seconds.rates
    here = program.computations[name]
    links = rates.network
    spans = list(collectives(program, here))
    if links.slices > 1 and links.node_bandwidth:  # a TPU's compiler writes what crosses slices as sends and receives
        spans = [across_groups(span, links.slices, len(links.places)) for span in spans]
    spans += [*host_copies(here), *sums_across_slices(here, links.slices)]
    if not spans:
        return []
    before = [0.0]  # seconds of computation before each instruction; branches: only certain ones
    for instruction in here.values():
        taken = seconds.of_instruction(name, instruction)
        before.append(before[-1] + certain_seconds(taken))
    waits = [0.0] * (len(here) + 1)  # for collectives, at each instruction

    def transfer(span: Span, on_its_way: float, cover: float, wait: float) -> Transfer:
        waits[span.last + 1] += wait
        in_loop = _in_ring_loop(span.op_name, loop)
        sent = span.kind, *span.array, count, span.bytes, span.end is not None
        return Transfer(*sent, on_its_way, cover, wait, in_loop, span.op_name)

    def queued(kinds: tuple[str, ...], passed: list[float]) -> list[Transfer]:
        of_kinds = [span for span in spans if span.kind in kinds]
        busy = [_busy_links(span, rates) for span in of_kinds]
        transfers = []
        for span, (on_its_way, wait) in zip(of_kinds, _share_links(of_kinds, busy, passed), strict=True):
            transfers.append(transfer(span, on_its_way, _cover(span, passed), wait))
        return transfers

    transfers = queued(QUEUED, before)
    for span in spans:
        if span.kind not in (*QUEUED, *TO_AND_FROM_HOST):
            rate = links.slice_bandwidth if span.kind in ACROSS else gather_rate(links, span.groups)
            on_its_way = span.bytes / rate
            cover = _cover(span, before)
            transfers.append(transfer(span, on_its_way, cover, max(0.0, on_its_way - cover)))
    passed = [a + b for a, b in zip(before, accumulate(waits), strict=True)]
    return [*transfers, *queued(TO_AND_FROM_HOST, passed)]


def _cover(span: Span, before: list[float]) -> float:
    """Seconds between the start and the end of a span."""
    if span.end is None:
        return 0.0
    return before[span.end] - before[span.start + 1]


def _busy_links(span: Span, rates: Rates) -> Float[np.ndarray, " links"]:
    """Return the seconds that each link is busy with a transfer; copies to a device's host have one, copies from it
    another."""
    if span.kind in QUEUED:
        return span.bytes * link_seconds(rates.network, span.kind, span.groups)
    return np.array([span.kind == kind for kind in TO_AND_FROM_HOST]) * span.bytes / rates.host_bytes


def _share_links(
    spans: list[Span], busy: list[Float[np.ndarray, " links"]], compute: list[float]
) -> list[tuple[float, float]]:
    """Schedule transfers on links: first come, first served, one at a time on each link.

    Args:
      busy: seconds that each transfer takes on each link.
      compute: seconds of computation before each instruction.

    Returns:
      `(seconds, wait)` of each transfer.
    """
    if not spans:
        return []
    events = []
    for i, span in enumerate(spans):
        events += [(span.start, False, i), (span.last, True, i)]
    waited = 0.0
    links_are_free = np.zeros_like(busy[0])
    through = [0.0] * len(spans)
    seconds = [0.0] * len(spans)
    waits = [0.0] * len(spans)
    for place, is_end, i in sorted(events):
        now = compute[place] + waited
        if is_end:
            waits[i] = max(0.0, through[i] - now)
            waited += waits[i]
        else:
            used = busy[i] > 0
            links_are_free[used] = np.maximum(links_are_free[used], now) + busy[i][used]
            through[i] = float(links_are_free[used].max(initial=now))
            seconds[i] = through[i] - now
    return list(zip(seconds, waits, strict=True))


def _in_ring_loop(op_name: str, loop: str | None) -> bool:
    """Return True if a loop over hops executes a collective; False if the collective belongs to a loop around an
    inlined loop over hops."""
    inside = re.search(f"/{LOOP}/(eval_jaxpr/)?while/body", op_name) is not None
    return inside and (not loop or re.search(f"/{LOOP}/(eval_jaxpr/)?while$", loop) is not None)
