"""What of a program's communication is hidden, read off the compiler's own schedule.

A collective that starts here and is waited for there travels while the instructions between the two execute. It counts
as hidden if these take (`program_seconds.py`) at least as long as its bytes on the link; permutes share one link, in
the order in which they start. A collective without a start of its own is exposed, and so is one whose computation is a
branch that may not be taken. Copies to the host share one link, and copies from it another; they travel under the waits
for collectives, too.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from ringformer.estimate.compiler.program_text import COLLECTIVES, Array, Instruction, Program
from ringformer.estimate.seconds.host_waits import host_waits
from ringformer.estimate.seconds.program_seconds import ProgramSeconds, Rates, Seconds
from ringformer.ops.ring_attention import LOOP

TO_HOST, FROM_HOST = "copy to the host", "copy from the host"
"""What travels besides collectives: what `offload` keeps in host memory."""

_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^{}]*\})?")
_IN_HOST_MEMORY = "S(5)"
"""In the layout of an array."""


@dataclass(frozen=True)
class Transfer:
    """One collective instruction of the program, or one copy to or from the host, executed `count` times."""

    kind: str
    """One of `COLLECTIVES`, `TO_HOST` or `FROM_HOST`."""
    dtype: str
    shape: tuple[int, ...]
    count: float
    bytes: int
    """That one device sends, or receives of a gather, each time."""
    asynchronous: bool
    seconds: float
    """The time from its start until its last byte is through; a permute queues behind those that started before it."""
    cover: float
    """Seconds of computation between its start and its end."""
    wait: float
    """Seconds for which the device stands still at its end."""
    in_ring_loop: bool
    computation: str
    op_name: str
    """JAX's name of the operation, its name scopes in front."""

    @property
    def hidden(self) -> bool:
        return self.asynchronous and self.cover >= self.seconds


@dataclass(frozen=True)
class Schedule:
    """The seconds and the communication of one step on one device."""

    transfers: list[Transfer]
    flops: float
    """FLOPs of matrix multiplications, of one step, per device; chunk pairs counted as for one document."""
    rates: Rates
    purposes: dict[str, Seconds]
    """Seconds of computation by what they are for; chunk pairs as for one document."""
    host_waits: dict[str, float] = field(default_factory=dict)
    """How often at most a GPU waits for its host, by what it is for."""

    @property
    def seconds(self) -> Seconds:
        """Of computation, as if all communication were hidden."""
        return sum(self.purposes.values(), Seconds())

    def bytes(self, kinds: tuple[str, ...], hidden: bool) -> float:
        return sum(t.bytes * t.count for t in self.transfers if t.kind in kinds and t.hidden == hidden)

    @property
    def hidden_permute_bytes(self) -> float:
        return self.bytes(("collective-permute",), True)

    @property
    def exposed_permute_bytes(self) -> float:
        return self.bytes(("collective-permute",), False)

    @property
    def exposed_in_ring_loops(self) -> float:
        """Bytes of permutes inside the loops over hops that are not hidden."""
        return sum(t.bytes * t.count for t in self.transfers if t.in_ring_loop and not t.hidden)

    @property
    def exposed_gather_bytes(self) -> float:
        """Bytes of every collective that is not a permute and not hidden: weights gathered, gradients reduced."""
        return self.bytes(tuple(k for k in COLLECTIVES if k != "collective-permute"), False)

    @property
    def exposed_seconds(self) -> float:
        """What communication adds to the step."""
        return sum(t.count * t.wait for t in self.transfers)

    @property
    def exposed_host_seconds(self) -> float:
        """Of that, what copies to and from the host add."""
        return sum(t.count * t.wait for t in self.transfers if t.kind in (TO_HOST, FROM_HOST))


def read_schedule(text: str, rates: Rates, cycles: Mapping[str, float] | None = None) -> Schedule:
    """The schedule of a compiled program's text, with the cycles of known machine code by `KernelKeys.key`."""
    program = Program.parse(text)
    seconds = ProgramSeconds(program, rates, cycles or {})
    loops = {
        body: loop.text
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
    """What travels while a computation's instructions from `start` to `end` execute; end None: while nothing does."""

    kind: str
    array: Array
    bytes: int
    text: str
    start: int
    end: int | None

    @property
    def last(self) -> int:
        return self.start if self.end is None else self.end


def _of_computation(seconds: ProgramSeconds, name: str, count: float, loop: str | None) -> list[Transfer]:
    """`loop`: the text of the loop whose body this computation is."""
    program, rates = seconds.program, seconds.rates
    instructions = list(program.computations[name].values())
    spans = [*_collectives(program, instructions), *_host_copies(instructions)]
    if not spans:
        return []
    of_kind = {kind: [s for s in spans if s.kind == kind] for kind in ("collective-permute", TO_HOST, FROM_HOST)}
    before = [0.0]  # seconds of computation before each instruction, of branches the fastest
    for instruction in instructions:
        taken = sum(s.certain for s in seconds.of_instruction(name, instruction).values())
        before.append(before[-1] + taken)
    waits = [0.0] * (len(instructions) + 1)  # for collectives, at each instruction

    def transfer(span: _Span, on_its_way: float, cover: float, wait: float) -> Transfer:
        waits[span.last + 1] += wait
        in_loop = _in_ring_loop(span.text, loop)
        sent = span.kind, *span.array, count, span.bytes, span.end is not None
        return Transfer(*sent, on_its_way, cover, wait, in_loop, name, _op_name(span.text))

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
    """Seconds between a span's start and its end."""
    return 0.0 if span.end is None else before[span.end] - before[span.start + 1]


def _share_link(spans: list[_Span], compute: list[float], rate: float) -> list[tuple[float, float]]:
    """What travels on one link in a computation, first come, first served, one at a time.

    Args:
      compute: seconds of computation before each instruction.
      rate: bytes a second.

    Returns:
      `(seconds, wait)` of each one's `Transfer`.
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


def _op_name(text: str) -> str:
    name = re.search(r'op_name="([^"]*)"', text)
    return name[1] if name else ""


def _in_ring_loop(permute: str, loop: str | None) -> bool:
    """Whether a collective is executed by a loop over hops, and not by a loop around one that was inlined."""
    scope, around = (re.search(r'op_name="([^"]*)"', text or "") for text in (permute, loop))
    if not scope or not re.search(f"/{LOOP}/(eval_jaxpr/)?while/body", scope[1]):
        return False
    return around is None or bool(re.search(f"/{LOOP}/(eval_jaxpr/)?while$", around[1]))


def _collectives(program: Program, instructions: list[Instruction]) -> Iterator[_Span]:
    """The collectives of a computation.

    Three forms: X-start and X-done; async-start and async-done around a wrapped X; and the TPU's chains of fusions,
    which carry a gather along with other work, also through the turns of a loop, from AsyncCollectiveStart to
    AsyncCollectiveDone.
    """
    ends = _ends(instructions)
    chains: dict[str, tuple[Instruction, int]] = {}
    for i, x in enumerate(instructions):
        if x.collective:
            yield _collective(x, i, ends.get(x.name))
        elif x.opcode in ("fusion", "async-start"):
            for inner, fused in _inside(program, x):
                chain = re.search(r'chain_id="(\d+)"', inner.text)
                if x.opcode == "async-start":
                    yield _collective(inner, i, ends.get(x.name))
                elif chain is None:
                    yield _collective(inner, i, None)
                elif "AsyncCollectiveStart" in fused:
                    chains[chain[1]] = inner, i
                elif "AsyncCollectiveDone" in fused:
                    collective, start = chains.pop(chain[1])
                    yield _collective(collective, start, i)


def _collective(x: Instruction, start: int, end: int | None) -> _Span:
    kind, array = x.collective or "", x.arrays[0]
    largest = max(a.bytes for a in x.arrays)
    sent = array.bytes if kind == "collective-permute" else largest
    return _Span(kind, array, 2 * sent if kind == "all-reduce" else sent, x.text, start, end)  # reduce, then gather


def _host_copies(instructions: list[Instruction]) -> Iterator[_Span]:
    """The copies of a computation between the device's memory and the host's: whole arrays, or slices of them."""
    here, ends = {x.name: x for x in instructions}, _ends(instructions)
    for i, x in enumerate(instructions):
        starts = x.opcode.endswith("-start") and not x.collective
        if not starts and x.opcode not in ("copy", "dynamic-slice", "dynamic-update-slice", "fusion"):
            continue
        end = ends.get(x.name) if starts else None
        result = x.type if end is None else instructions[end].type
        types = [x.type, *(here[name].type for name in x.operands if name in here)]
        arrays = [match for type_ in types for match in _ARRAY.finditer(type_)]
        on_device = [_array(match) for match in arrays if _IN_HOST_MEMORY not in match[0]]
        if on_device and len(on_device) < len(arrays):
            moved = max(on_device, key=lambda array: array.bytes)
            yield _Span(TO_HOST if _IN_HOST_MEMORY in result else FROM_HOST, moved, moved.bytes, x.text, i, end)


def _array(match: re.Match) -> Array:
    return Array(match[1], tuple(int(n) for n in match[2].split(",") if n))


def _ends(instructions: list[Instruction]) -> dict[str, int]:
    """The place of the instruction that waits for each one that starts something."""
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
    """The collectives of the computations that a fusion or an async-start calls, each with what its own computation
    calls."""
    for called in instruction.called:
        inside = program.computations[called].values()
        targets = {t for x in inside for t in re.findall(r'custom_call_target="(\w+)"', x.text)}
        for inner in inside:
            if inner.collective:
                yield inner, targets
            elif inner.opcode == "fusion":
                yield from _inside(program, inner)
