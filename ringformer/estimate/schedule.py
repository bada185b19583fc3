"""What of a program's communication is hidden, read off the compiler's own schedule.

A collective that starts here and is waited for there travels while the instructions between the two execute. It counts
as hidden if their matrix multiplications, at the device's peak rate, take at least as long as its bytes on the link,
together with the bytes of every permute that is under way in that time. A collective without a start of its own is
exposed, and so is one whose computation is a branch that may not be taken.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from ringformer.estimate.hlo import COLLECTIVES, Instruction, Program
from ringformer.ops.ring import LOOP


class Rates(NamedTuple):
    """What a device can do in a second."""

    flops: float
    hop_bytes: float
    """Of a permute, one way."""
    gather_bytes: float
    """Of a gather or reduction, over all links that it spreads over."""


class Transfer(NamedTuple):
    """One collective instruction of the program, executed `count` times."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    count: float
    bytes: int
    """That one device sends, or receives of a gather, each time."""
    asynchronous: bool
    flops: float
    """Between its start and its end."""
    seconds: float
    """On the link, with all permutes that are under way at the same time."""
    cover: float
    """Seconds of computation between its start and its end."""
    in_ring_loop: bool
    computation: str

    @property
    def hidden(self) -> bool:
        return self.asynchronous and self.cover >= self.seconds


@dataclass(frozen=True)
class Schedule:
    """The communication of one step on one device."""

    transfers: list[Transfer]
    flops: float
    """Of matrix multiplications, of one step, per device; chunk pairs counted as for one document."""
    rates: Rates

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
        """Of every collective that is not a permute: weights gathered, gradients reduced."""
        return self.bytes(tuple(k for k in COLLECTIVES if k != "collective-permute"), False)

    @property
    def exposed_seconds(self) -> float:
        """What communication adds to the step: the whole of the synchronous, the uncovered rest of the others."""
        return sum(t.count * max(0.0, t.seconds - (t.cover if t.asynchronous else 0.0)) for t in self.transfers)


def read_schedule(text: str, rates: Rates) -> Schedule:
    """The schedule of a compiled program's text."""
    program = Program.parse(text)
    transfers = []
    for name, count in program.executed.items():
        transfers += _of_computation(program, name, count, rates)
    return Schedule(transfers, program.flops(program.entry), rates)


class _Span(NamedTuple):
    instruction: Instruction  # the collective
    start: int
    end: int | None


def _of_computation(program: Program, name: str, count: float, rates: Rates) -> list[Transfer]:
    instructions = list(program.computations[name].values())
    spans = list(_spans(program, instructions))
    if not spans:
        return []
    flops = [0.0]
    for instruction in instructions:
        flops.append(flops[-1] + program.instruction_flops(name, instruction))
    permutes = [s for s in spans if s.instruction.collective == "collective-permute"]
    transfers = []
    for span in spans:
        collective = span.instruction
        kind, array = collective.collective, collective.arrays[0]
        sent = array.bytes
        if kind == "collective-permute":
            others = [s for s in permutes if s is not span and _overlap(s, span)]
            seconds = (sent + sum(s.instruction.arrays[0].bytes for s in others)) / rates.hop_bytes
        else:
            whole = max(a.bytes for a in collective.arrays)
            sent = 2 * whole if kind == "all-reduce" else whole  # reduce, then gather
            seconds = sent / rates.gather_bytes
        between = 0.0 if span.end is None else flops[span.end] - flops[span.start + 1]
        scope = re.search(r'op_name="([^"]*)"', collective.text)
        in_loop = bool(scope and re.search(f"/{LOOP}/(eval_jaxpr/)?while/body", scope[1]))
        cover = between / rates.flops
        transfers.append(
            Transfer(kind, *array, count, sent, span.end is not None, between, seconds, cover, in_loop, name)
        )
    return transfers


def _overlap(a: _Span, b: _Span) -> bool:
    return a.end is not None and b.end is not None and a.start < b.end and b.start < a.end


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
