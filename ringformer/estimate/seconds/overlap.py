"""Hidden and exposed communication of a program, read from the compiler's schedule.

A collective with a start and an end travels while the instructions between the two execute. It is hidden if these
instructions take (`program_seconds.py`) at least as long as the collective's bytes take on the link. Permutes share one
link, in the order in which they start. A collective without a separate start is exposed. So is a collective in a branch
that may not be taken. Copies to the host share one link, and copies from the host share another; both kinds also travel
while the device waits for collectives.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from ringformer.estimate.compiler.program_text import COLLECTIVES, Array, Instruction, Program, parse_type
from ringformer.estimate.seconds.program_seconds import ProgramSeconds, Rates, Seconds, host_waits
from ringformer.ops.ring_attention import LOOP

TO_HOST, FROM_HOST = "copy to the host", "copy from the host"
"""Kinds of transfers other than collectives: arrays that `offload` keeps in host memory."""

_IN_HOST_MEMORY = "S(5)"
"""Mark of host memory in the layout of an array."""


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


class _Span(NamedTuple):
    """A transfer that travels during a computation's instructions from `start` to `end`; end None: during none of
    them."""

    kind: str
    array: Array
    bytes: int
    op_name: str
    start: int
    end: int | None

    @property
    def last(self) -> int:
        return self.start if self.end is None else self.end


def _of_computation(seconds: ProgramSeconds, name: str, count: float, loop: str | None) -> list[Transfer]:
    """Return the transfers of a computation. If the computation is a loop's body, `loop` is the op name of that
    loop."""
    program, rates = seconds.program, seconds.rates
    instructions = list(program.computations[name].values())
    spans = [*_collectives(program, instructions), *_host_copies(instructions)]
    if not spans:
        return []
    of_kind = {kind: [s for s in spans if s.kind == kind] for kind in ("collective-permute", TO_HOST, FROM_HOST)}
    before = [0.0]  # seconds of computation before each instruction; branches: only certain ones
    for instruction in instructions:
        taken = sum(s.certain for s in seconds.of_instruction(name, instruction).values())
        before.append(before[-1] + taken)
    waits = [0.0] * (len(instructions) + 1)  # for collectives, at each instruction

    def transfer(span: _Span, on_its_way: float, cover: float, wait: float) -> Transfer:
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


def _cover(span: _Span, before: list[float]) -> float:
    """Seconds between the start and the end of a span."""
    return 0.0 if span.end is None else before[span.end] - before[span.start + 1]


def _share_link(spans: list[_Span], compute: list[float], rate: float) -> list[tuple[float, float]]:
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


def _collectives(program: Program, instructions: list[Instruction]) -> Iterator[_Span]:
    """Yield the collectives of a computation.

    They have four forms. Two are X-start and X-done, and async-start and async-done around X. On TPU, there are chains
    of fusions from AsyncCollectiveStart to AsyncCollectiveDone, which carry a gather along while they do other work,
    even across the iterations of a loop. And a SparseCore runs what a custom-call-start names, from the
    custom-call-update that hands it the array until custom-call-done.
    """
    ends, here = _ends(instructions), {x.name: x for x in instructions}
    chains: dict[str, tuple[Instruction, int]] = {}
    for i, x in enumerate(instructions):
        if x.collective:
            yield _collective(x, here, i, ends.get(x.name))
        elif x.opcode == "custom-call-update":
            start = here[x.operands[0]]
            inside = program.computations[start.stated(r"called_computations=\{%?([\w.\-]+)\}")]
            for inner in inside.values():
                if inner.collective:
                    yield _collective(inner, inside, i, ends[x.name])._replace(op_name=inner.op_name or start.op_name)
        elif x.opcode in ("fusion", "async-start"):
            for inner, inside, fused in _inside(program, x):
                chain = inner.search(r'chain_id="(\d+)"')
                if x.opcode == "async-start":
                    yield _collective(inner, inside, i, ends.get(x.name))
                elif chain is None:
                    yield _collective(inner, inside, i, None)
                elif "AsyncCollectiveStart" in fused:
                    chains[chain] = inner, i
                elif "AsyncCollectiveDone" in fused:
                    collective, begin = chains.pop(chain)
                    yield _collective(collective, inside, begin, i)


def _collective(x: Instruction, here: Mapping[str, Instruction], start: int, end: int | None) -> _Span:
    """Describe a collective; `here` has the instructions of its computation, for the sizes of its operands."""
    kind, array = x.collective or "", x.arrays[0]
    operands = [a for name in x.operands if name in here for a in here[name].arrays]
    largest = max(a.bytes for a in (*x.arrays, *operands))  # a gather's result, a reduce-scatter's operand
    sent = array.bytes if kind == "collective-permute" else largest
    moved = 2 * sent if kind == "all-reduce" else sent  # all-reduce: reduce, then gather
    return _Span(kind, array, moved, x.op_name, start, end)


def _host_copies(instructions: list[Instruction]) -> Iterator[_Span]:
    """Yield the copies of a computation between the memories of device and host: whole arrays, or slices of them."""
    here, ends = {x.name: x for x in instructions}, _ends(instructions)
    for i, x in enumerate(instructions):
        starts = x.opcode.endswith("-start") and not x.collective
        if not starts and x.opcode not in ("copy", "dynamic-slice", "dynamic-update-slice", "fusion"):
            continue
        end = ends.get(x.name) if starts else None
        result = x.type if end is None else instructions[end].type
        types = [x.type, *(here[name].type for name in x.operands if name in here)]
        arrays = [typed for type_ in types for typed in parse_type(type_)]
        on_device = [array for array, layout in arrays if _IN_HOST_MEMORY not in layout]
        if on_device and len(on_device) < len(arrays):
            moved = max(on_device, key=lambda array: array.bytes)
            yield _Span(TO_HOST if _IN_HOST_MEMORY in result else FROM_HOST, moved, moved.bytes, x.op_name, i, end)


def _ends(instructions: list[Instruction]) -> dict[str, int]:
    """Return, by the name of each asynchronous instruction, the position of the instruction that waits for it."""
    place = {x.name: i for i, x in enumerate(instructions)}
    ends: dict[str, int] = {}
    for i, x in enumerate(instructions):
        if x.opcode.endswith("-done"):
            first = instructions[place[x.operands[0]]]
            while first.opcode == "async-update":
                first = instructions[place[first.operands[0]]]
            ends[first.name] = i
    return ends


def _inside(program: Program, instruction: Instruction):
    """Yield the collectives inside a fusion or an async-start, each with the instructions of its own computation and
    the targets of their custom calls."""
    for called in instruction.called:
        inside = program.computations[called]
        targets = {t for x in inside.values() for t in re.findall(r'custom_call_target="(\w+)"', x.text)}
        for inner in inside.values():
            if inner.collective:
                yield inner, inside, targets
            elif inner.opcode == "fusion":
                yield from _inside(program, inner)
