"""Hidden and exposed communication of a program, read from the compiler's schedule.

A collective with a start and an end travels while the instructions between the two execute. It is hidden if these
instructions take (`program_seconds.py`) at least as long as the collective's bytes take on the link. Permutes share one
link, in the order in which they start. A collective without a separate start is exposed. So is a collective in a branch
that may not be taken. Copies to the host share one link, and copies from the host share another; both kinds also travel
while the device waits for collectives.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from ringformer.estimate.compiler.program_text import COLLECTIVES, Program
from ringformer.estimate.seconds.program_seconds import ProgramSeconds, Rates, Seconds, host_waits
from ringformer.estimate.seconds.transfers import FROM_HOST, TO_HOST, Span, collectives, host_copies
from ringformer.ops.ring_passes import LOOP


@dataclass(frozen=True)
class Transfer:
    """One collective instruction, or one copy to or from the host, executed `count` times."""

    kind: str
    """One of `COLLECTIVES`, `TO_HOST` or `FROM_HOST`."""
    dtype: str
    shape: tuple[int, ...]
    count: float
    bytes: int
    """Bytes that one device sends in each execution, or receives in a gather."""
    asynchronous: bool
    seconds: float
    """Seconds from its start until its last byte arrives; a permute queues behind permutes that started earlier."""
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

    def bytes(self, kinds: tuple[str, ...], hidden: bool) -> float:
        return sum(t.all_bytes for t in self.transfers if t.kind in kinds and t.hidden == hidden)

    @property
    def hidden_permute_bytes(self) -> float:
        return self.bytes(("collective-permute",), True)

    @property
    def exposed_permute_bytes(self) -> float:
        return self.bytes(("collective-permute",), False)

    @property
    def exposed_in_ring_loops(self) -> float:
        """Bytes of exposed permutes inside the loops over hops."""
        return sum(t.all_bytes for t in self.transfers if t.in_ring_loop and not t.hidden)

    @property
    def exposed_gather_bytes(self) -> float:
        """Bytes of exposed collectives other than permutes: weights gathered, gradients reduced."""
        return self.bytes(tuple(k for k in COLLECTIVES if k != "collective-permute"), False)

    @property
    def exposed_seconds(self) -> float:
        """Seconds that communication adds to the step."""
        return sum(t.count * t.wait for t in self.transfers)

    @property
    def exposed_host_seconds(self) -> float:
        """Part of `exposed_seconds`: copies to and from the host."""
        return sum(t.count * t.wait for t in self.transfers if t.kind in (TO_HOST, FROM_HOST))


def read_schedule(text: str, rates: Rates, cycles: Mapping[str, float] | None = None) -> Schedule:
    """Read the schedule from a compiled program's text; `cycles` holds cycles of machine code by `KernelKeys.key`."""
    program = Program.parse(text)
    seconds = ProgramSeconds(program, rates, cycles or {})
    loops = {
        body: loop.op_name
        for instructions in program.computations.values()
        for loop in instructions.values()
        if loop.opcode == "while"
        for body in loop.called
    }
    transfers = []
    for name, count in program.executed.items():
        transfers += _of_computation(seconds, name, count, loops.get(name))
    waits = {} if rates.cycles else host_waits(program)
    return Schedule(transfers, program.flops(program.entry), rates, seconds.purposes, waits)


def _of_computation(seconds: ProgramSeconds, name: str, count: float, loop: str | None) -> list[Transfer]:
    """Return the transfers of a computation. If the computation is a loop's body, `loop` is the op name of that
    loop."""
    program, rates = seconds.program, seconds.rates
    instructions = list(program.computations[name].values())
    spans = [*collectives(program, instructions), *host_copies(instructions)]
    if not spans:
        return []
    of_kind = {kind: [s for s in spans if s.kind == kind] for kind in ("collective-permute", TO_HOST, FROM_HOST)}
    before = [0.0]  # seconds of computation before each instruction; branches: only certain ones
    for instruction in instructions:
        taken = sum(s.certain for s in seconds.of_instruction(name, instruction).values())
        before.append(before[-1] + taken)
    waits = [0.0] * (len(instructions) + 1)  # for collectives, at each instruction

    def transfer(span: Span, on_its_way: float, cover: float, wait: float) -> Transfer:
        waits[span.last + 1] += wait
        in_loop = _in_ring_loop(span.op_name, loop)
        sent = span.kind, *span.array, count, span.bytes, span.end is not None
        return Transfer(*sent, on_its_way, cover, wait, in_loop, span.op_name)

    def on_one_link(kind: str, passed: list[float], rate: float) -> list[Transfer]:
        link = _share_link(of_kind[kind], passed, rate)
        return [
            transfer(span, on_its_way, _cover(span, passed), wait)
            for span, (on_its_way, wait) in zip(of_kind[kind], link, strict=True)
        ]

    transfers = on_one_link("collective-permute", before, rates.hop_bytes)
    for span in spans:
        if span.kind not in of_kind:
            on_its_way, cover = span.bytes / rates.gather_bytes, _cover(span, before)
            transfers.append(transfer(span, on_its_way, cover, max(0.0, on_its_way - cover)))
    passed = [a + b for a, b in zip(before, accumulate(waits), strict=True)]
    return [*transfers, *(t for kind in (TO_HOST, FROM_HOST) for t in on_one_link(kind, passed, rates.host_bytes))]


def _cover(span: Span, before: list[float]) -> float:
    """Seconds between the start and the end of a span."""
    return 0.0 if span.end is None else before[span.end] - before[span.start + 1]


def _share_link(spans: list[Span], compute: list[float], rate: float) -> list[tuple[float, float]]:
    """Schedule transfers on one link: first come, first served, one at a time.

    Args:
      compute: seconds of computation before each instruction.
      rate: bytes per second.

    Returns:
      `(seconds, wait)` of each transfer.
    """
    starts = [(span.start, False, i) for i, span in enumerate(spans)]
    ends = [(span.last, True, i) for i, span in enumerate(spans)]
    waited = link_is_free = 0.0
    through: dict[int, float] = {}
    seconds: dict[int, float] = {}
    waits: dict[int, float] = {}
    for place, is_end, i in sorted(starts + ends):
        now = compute[place] + waited
        if is_end:
            waits[i] = max(0.0, through[i] - now)
            waited += waits[i]
        else:
            link_is_free = max(link_is_free, now) + spans[i].bytes / rate
            seconds[i], through[i] = link_is_free - now, link_is_free
    return [(seconds[i], waits[i]) for i in range(len(spans))]


def _in_ring_loop(op_name: str, loop: str | None) -> bool:
    """Return True if a loop over hops executes a collective; False if the collective belongs to a loop around an
    inlined loop over hops."""
    inside = re.search(f"/{LOOP}/(eval_jaxpr/)?while/body", op_name) is not None
    return inside and (not loop or re.search(f"/{LOOP}/(eval_jaxpr/)?while$", loop) is not None)
