"""Transfers of a computation of a compiled program: which instructions start them, and which wait for them."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ringformer.estimate.compiled.program_text import Array, Instruction, Program, parse_type
from ringformer.estimate.seconds.link_loads import Groups

TO_HOST = "copy to the host"
FROM_HOST = "copy from the host"
ACROSS_SLICES = "sum across slices"
"""Kind of the sums of arrays over TPU slices that the network between hosts joins."""

ACROSS_GROUPS = "sum across groups"
"""Kind of the sums of arrays over groups of GPUs that a slower network joins."""

OTHER_ACROSS_GROUPS = "other across groups"
"""Kind of any other collective over these groups. Meshes of whole groups have none."""

ACROSS = (ACROSS_SLICES, ACROSS_GROUPS, OTHER_ACROSS_GROUPS)
"""Kinds of what crosses the network between slices or groups."""

TO_AND_FROM_HOST = (TO_HOST, FROM_HOST)
"""Kinds of transfers other than collectives: arrays that are kept in host memory."""

_IN_HOST_MEMORY = "S(5)"
"""Mark of host memory in the layout of an array."""


class Span(NamedTuple):
    """A transfer that travels during a computation's instructions from `start` to `end`; end None: during none of
    them."""

    kind: str
    array: Array
    bytes: int
    op_name: str
    start: int
    end: int | None
    groups: Groups = ()

    @property
    def last(self) -> int:
        return self.start if self.end is None else self.end


def collectives(program: Program, here: Mapping[str, Instruction]) -> Iterator[Span]:
    """Yield the collectives of a computation, whose instructions are `here` by their names.

    They have four forms. Two are X-start and X-done, and async-start and async-done around X. A GPU's X-start that is
    marked `is_sync` runs on the stream that computes, although it has an X-done. On TPU, there are chains
    of fusions from AsyncCollectiveStart to AsyncCollectiveDone, which carry a gather along while they do other work,
    even across the iterations of a loop. And a SparseCore runs what a custom-call-start names, from the
    custom-call-update that hands it the array until custom-call-done.
    """
    ends = _ends(here)
    chains: dict[str, tuple[Instruction, int]] = {}
    for i, x in enumerate(here.values()):
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


def _collective(x: Instruction, here: Mapping[str, Instruction], start: int, end: int | None) -> Span:
    """Describe a collective; `here` has the instructions of its computation, for the sizes of its operands."""
    kind = x.collective or ""
    array = x.arrays[0]
    taken = sum(here[name].bytes for name in x.operands if name in here)
    given = x.bytes
    if len(x.arrays) > len(x.operands):  # the tuple of a start has its operands, too
        given -= taken
    # The operands of a permute or an all-to-all; a gather's result, a scatter's operand.
    moved = taken if kind in ("collective-permute", "all-to-all") else max(taken, given)
    if kind == "all-reduce":  # reduce, then gather
        moved *= 2
    if '"is_sync":true' in x.text:
        end = None
    return Span(kind, array, moved, x.op_name, start, end, x.groups)


def sums_across_slices(here: Mapping[str, Instruction], slices: int) -> Iterator[Span]:
    """Yield the sums of a computation over TPU slices. The compiler turns each into a send and a receive, which the
    runtime of joined slices (Megascale) answers with the sum: an array leaves and arrives once for two slices, and
    almost twice for many."""
    ends = _ends(here)
    for i, x in enumerate(here.values()):
        if x.opcode == "recv" and "xla_megascale" in x.text:
            summed = x.arrays[0]
            moved = 2 * (slices - 1) / slices * summed.bytes
            op_name = x.op_name or x.search(r'rendezvous="([^"]*)"') or ""
            yield Span(ACROSS_SLICES, summed, round(moved), op_name, i, ends.get(x.name))


def across_groups(span: Span, groups: int, devices: int) -> Span:
    """Return a collective of GPUs as one of the kinds across groups, each of `devices` GPUs, if it leaves any of them.

    A sum over n GPUs, of which m are in each group, is a ring (NCCL) that leaves a group over each of the m networks:
    one GPU sends 1/m of its (n - 1)/n parts across. Of anything else, all bytes count as if they crossed.
    """
    together = []
    for members in span.groups or (tuple(range(groups * devices)),):
        in_groups = Counter(member // devices for member in members)
        if len(in_groups) > 1:
            together.append(min(in_groups.values()))
    if not together:
        return span
    if span.kind not in ("all-reduce", "reduce-scatter"):
        return span._replace(kind=OTHER_ACROSS_GROUPS)
    number = len(span.groups[0]) if span.groups else groups * devices
    crossing = span.bytes * (number - 1) / number / min(together)
    return span._replace(kind=ACROSS_GROUPS, bytes=round(crossing))


def host_copies(here: Mapping[str, Instruction]) -> Iterator[Span]:
    """Yield the copies of a computation between the memories of device and host: whole arrays, or slices of them."""
    instructions = list(here.values())
    ends = _ends(here)
    for i, x in enumerate(instructions):
        starts = x.opcode.endswith("-start") and not x.collective
        if not starts and x.opcode not in ("copy", "dynamic-slice", "dynamic-update-slice", "fusion"):
            continue
        end = ends.get(x.name) if starts else None
        result = x if end is None else instructions[end]
        arrays = parse_type(x.type)
        for name in x.operands:
            if name in here:
                arrays += parse_type(here[name].type)
        on_device = [array for array, layout in arrays if _IN_HOST_MEMORY not in layout]
        if on_device and len(on_device) < len(arrays):
            moved = max(on_device, key=lambda array: array.bytes)
            kind = TO_HOST if _IN_HOST_MEMORY in result.type else FROM_HOST
            yield Span(kind, moved, moved.bytes, x.op_name, i, end)


def _ends(here: Mapping[str, Instruction]) -> dict[str, int]:
    """Return, by the name of each asynchronous instruction, the position of the instruction that waits for it."""
    ends: dict[str, int] = {}
    for i, x in enumerate(here.values()):
        if x.opcode.endswith("-done"):
            first = here[x.operands[0]]
            while first.opcode == "async-update":
                first = here[first.operands[0]]
            ends[first.name] = i
    return ends


def _inside(program: Program, instruction: Instruction):
    """Yield the collectives inside a fusion or an async-start, each with the instructions of its own computation and
    the targets of their custom calls."""
    for called in instruction.called:
        inside = program.computations[called]
        targets: set[str] = set()
        for x in inside.values():
            targets |= set(re.findall(r'custom_call_target="(\w+)"', x.text))
        for inner in inside.values():
            if inner.collective == "all-reduce" and called.startswith("all-reduce-scatter"):
                # The TPU compiler fuses an all-reduce with the slice that is kept, and then sends no more than that.
                yield inner._replace(opcode="reduce-scatter"), inside, targets
            elif inner.collective:
                yield inner, inside, targets
            elif inner.opcode == "fusion":
                yield from _inside(program, inner)
