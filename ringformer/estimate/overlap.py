"""What of a program's communication is hidden, read off the compiler's own schedule.

A collective that starts here and is waited for there travels while the instructions between the two execute. It counts
as hidden if these take (`program_seconds.py`) at least as long as its bytes on the link; permutes share one link, in
the order in which they start. A collective without a start of its own is exposed, and so is one whose computation is a
branch that may not be taken.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ringformer.estimate.compiled_program import COLLECTIVES, Instruction, Program
from ringformer.estimate.host_waits import host_waits
from ringformer.estimate.program_seconds import ProgramSeconds, Rates, Seconds
from ringformer.ops.ring_attention import LOOP


@dataclass(frozen=True)
class Transfer:
    """One collective instruction of the program, executed `count` times."""

    kind: str
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


def read_schedule(text: str, rates: Rates, cycles: Mapping[str, float] | None = None) -> Schedule:
    """The schedule of a compiled program's text, with the cycles of known machine code by `KernelKeys.key`."""
    program = Program.parse(text)
    seconds = ProgramSeconds(program, rates, cycles or {})
    loops = {body: loop.text for instructions in program.computations.values() for loop in instructions.values()
             if loop.opcode == "while" for body in loop.called}  # fmt: skip
    transfers = []
    for name, count in program.executed.items():
        transfers += _of_computation(seconds, name, count, loops.get(name))
    waits = {} if rates.cycles else host_waits(program)
    return Schedule(transfers, program.flops(program.entry), rates, seconds.purposes, waits)


class _Span(NamedTuple):
    instruction: Instruction  # the collective
    start: int
    end: int | None


def _of_computation(seconds: ProgramSeconds, name: str, count: float, loop: str | None) -> list[Transfer]:
    """`loop`: the text of the loop whose body this computation is."""
    program, rates = seconds.program, seconds.rates
    instructions = list(program.computations[name].values())
    spans = list(_spans(program, instructions))
    if not spans:
        return []
    before = [0.0]  # seconds of computation before each instruction, of branches the fastest
    for instruction in instructions:
        taken = sum(s.certain for s in seconds.of_instruction(name, instruction).values())
        before.append(before[-1] + taken)
    permutes = [s for s in spans if s.instruction.collective == "collective-permute"]
    on_link = iter(_share_link(permutes, before, rates.hop_bytes))
    transfers = []
    for span in spans:
        collective = span.instruction
        kind, array = collective.collective, collective.arrays[0]
        cover = 0.0 if span.end is None else before[span.end] - before[span.start + 1]
        if kind == "collective-permute":
            sent, (on_its_way, wait) = array.bytes, next(on_link)
        else:
            largest = max(a.bytes for a in collective.arrays)
            sent = 2 * largest if kind == "all-reduce" else largest  # reduce, then gather
            on_its_way = sent / rates.gather_bytes
            wait = max(0.0, on_its_way - cover)
        in_loop = _in_ring_loop(collective.text, loop)
        transfers.append(
            Transfer(
                kind,
                array.dtype,
                array.shape,
                count,
                sent,
                span.end is not None,
                on_its_way,
                cover,
                wait,
                in_loop,
                name,
                _op_name(collective.text),
            )
        )
    return transfers


def _share_link(permutes: list[_Span], compute: list[float], rate: float) -> list[tuple[float, float]]:
    """The permutes of a computation on their one link, first come, first served, one at a time.

    Args:
      compute: seconds of computation before each instruction.
      rate: bytes a second.

    Returns:
      `(seconds, wait)` of each one's `Transfer`.
    """
    starts = [(span.start, False, i) for i, span in enumerate(permutes)]
    ends = [(span.start if span.end is None else span.end, True, i) for i, span in enumerate(permutes)]
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
            link_is_free = max(link_is_free, now) + permutes[i].instruction.arrays[0].bytes / rate
            seconds[i], through[i] = link_is_free - now, link_is_free
    return [(seconds[i], waits[i]) for i in range(len(permutes))]


def _op_name(text: str) -> str:
    name = re.search(r'op_name="([^"]*)"', text)
    return name[1] if name else ""


def _in_ring_loop(permute: str, loop: str | None) -> bool:
    """Whether a collective is executed by a loop over hops, and not by a loop around one that was inlined."""
    scope, around = (re.search(r'op_name="([^"]*)"', text or "") for text in (permute, loop))
    if not scope or not re.search(f"/{LOOP}/(eval_jaxpr/)?while/body", scope[1]):
        return False
    return around is None or bool(re.search(f"/{LOOP}/(eval_jaxpr/)?while$", around[1]))


def _spans(program: Program, instructions: list[Instruction]):
    """The collectives of a computation with the places of their start and end; end None: synchronous.

    Three forms: X-start and X-done; async-start and async-done around a wrapped X; and the TPU's chains of fusions,
    which carry a gather along with other work, also through the turns of a loop, from AsyncCollectiveStart to
    AsyncCollectiveDone.
    """
    place = {x.name: i for i, x in enumerate(instructions)}
    ends: dict[str, int] = {}
    for i, x in enumerate(instructions):
        if x.opcode.endswith("-done"):
            first = instructions[place[x.operands[0]]]
            while first.opcode == "async-update":
                first = instructions[place[first.operands[0]]]
            ends[first.name] = i
    chains: dict[str, tuple[Instruction, int]] = {}
    for i, x in enumerate(instructions):
        if x.collective:
            yield _Span(x, i, ends.get(x.name))
        elif x.opcode in ("fusion", "async-start"):
            for inner, fused in _inside(program, x):
                chain = re.search(r'chain_id="(\d+)"', inner.text)
                if x.opcode == "async-start":
                    yield _Span(inner, i, ends.get(x.name))
                elif chain is None:
                    yield _Span(inner, i, None)
                elif "AsyncCollectiveStart" in fused:
                    chains[chain[1]] = inner, i
                elif "AsyncCollectiveDone" in fused:
                    collective, start = chains.pop(chain[1])
                    yield _Span(collective, start, i)


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
