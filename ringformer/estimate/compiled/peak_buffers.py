"""Largest buffers of a compiled program at its peak of memory, and the source lines that created them.

XLA dumps the place of every value (`*-buffer-assignment.txt`) and its lifetime (`*-live-range.txt`). This module finds
the moment at which the values in device memory take the most bytes, and the largest values alive at that moment: those
are worth reducing. The bytes that the heap needs beyond the sum of these values are fragmentation.
"""

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ringformer.estimate.compiled.program_text import Instruction, Program

VALUE = r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)"
"""A value in a buffer assignment: instruction, element of its tuple, size, offset, type."""

PACKAGE = str(Path(__file__).parents[2]) + os.sep
ESTIMATE = str(Path(__file__).parents[1]) + os.sep
"""Folder of the files that lower the program; their stack frames are not part of the program."""

WRAPPERS = (f"{PACKAGE}ops{os.sep}derivative_guards.py", f"{PACKAGE}ops{os.sep}varying_axes.py")
"""Modules that compute nothing themselves; their callers are reported instead."""


class Buffer(NamedTuple):
    """A value in device memory, alive at the peak."""

    bytes: int
    """Size, including the padding of tiles."""
    type: str
    """Its dtype and shape in XLA's notation, e.g. "bf16[1,4096,512]"."""
    instruction: str
    op_name: str
    """JAX's name of the operation, preceded by its transformations; empty if the compiler added it."""
    source: str
    """File and line of the innermost frame outside libraries, as "ringformer/ops/layouts.py:31"; empty if unknown."""
    is_argument: bool
    """True for the state and the batch, which stay in memory for the whole step."""


class PeakBuffers(NamedTuple):
    """Buffers alive on one device when they take the most bytes."""

    bytes: int
    """Bytes of everything alive, arguments included; the compiler's peak also includes fragmentation."""
    largest: list[Buffer]


class _Value(NamedTuple):
    name: str
    """Instruction and element of its tuple, e.g. "while.3{1}"; "{}" if it is not a tuple."""
    place: tuple[str, str]
    """Allocation and offset; values with the same place and lifetime are one buffer under several names."""
    size: int
    type: str
    is_argument: bool
    start: int
    """First moment at which the value is alive."""
    end: int
    """Last moment at which it is alive."""


def read_peak_buffers(folder: Path) -> PeakBuffers | None:
    """Return the `peak_buffers` of the one program dumped to the folder; None if it has no live ranges."""
    for live_ranges in folder.glob("*after_optimizations-live-range.txt"):
        stem = str(live_ranges).removesuffix("-live-range.txt")
        assignment = Path(f"{stem}-buffer-assignment.txt")
        program = Path(f"{stem}.txt")
        if assignment.exists() and program.exists():
            return peak_buffers(assignment.read_text(), live_ranges.read_text(), program.read_text())
    return None


def peak_buffers(assignment: str, live_ranges: str, program: str, count: int = 10) -> PeakBuffers:
    """Return the `count` largest buffers at the peak of device memory.

    Args:
      assignment: text of XLA's buffer assignment.
      live_ranges: text of its live ranges.
      program: text of the scheduled program, with the source of its instructions.
    """
    lifetimes = {}
    for name, start, end in re.findall(r"^    (\S+):(\d+)-(\d+)$", live_ranges, re.M):
        lifetimes[name] = int(start), int(end)
    values = _values(assignment, lifetimes)
    taken = np.zeros(1 + max(v.end for v in values), np.int64)  # bytes, by moment
    for place in _by_place(values):
        occupied = np.zeros_like(taken)
        for v in place:
            occupied[v.start : v.end + 1] = np.maximum(occupied[v.start : v.end + 1], v.size)
        taken += occupied
    peak = taken.argmax()
    alive = _by_place([v for v in values if v.start <= peak <= v.end])
    sources = _Sources(program)
    largest = sorted(alive, key=_size, reverse=True)[:count]
    return PeakBuffers(sum(map(_size, alive)), [_buffer(place, sources) for place in largest])


class Allocation(NamedTuple):
    """A piece of memory in a buffer assignment."""

    number: str
    size: str
    color: str
    """Number of a memory other than the device's; empty for device memory."""
    use: str
    """Description of the use, such as "parameter 0" or "preallocated-temp"."""
    values: str
    """Lines on the values in it."""


def read_allocations(assignment: str) -> list[Allocation]:
    """Read the text of a buffer assignment; only newer compilers print the page of an allocation."""
    header = r"^allocation (\d+): size (\d+), (?:color (\d+), )?(?:page \d+, )?(.*)$"
    return [Allocation(*groups) for groups in re.findall(rf"{header}((?:\n value: .*)*)", assignment, re.M)]


def _values(assignment: str, ranges: dict[str, tuple[int, int]]) -> list[_Value]:
    """Return the values in device memory. Values outside the heap stay for the whole step."""
    values: list[_Value] = []
    ends = [end for _, end in ranges.values()]
    whole_step = 0, max(ends, default=0)
    for allocation in read_allocations(assignment):
        if allocation.color or "thread-local" in allocation.use:  # in another memory, or scalars of a fused loop
            continue
        heap = "preallocated-temp" in allocation.use
        argument = allocation.use.startswith("parameter ")
        for instruction, element, size, offset, type_ in re.findall(VALUE, allocation.values):
            name = instruction + (element or "{}")
            place = (allocation.number, offset)
            lifetime = ranges.get(name) if heap else whole_step
            if lifetime:
                plain = re.sub(r"\{[^{}]*\}", "", type_)  # without layouts
                values.append(_Value(name, place, int(size), plain, argument, *lifetime))
    return values


def _by_place(values: list[_Value]) -> list[list[_Value]]:
    places = defaultdict(list)
    for value in values:
        places[value.place].append(value)
    return list(places.values())


def _size(place: list[_Value]) -> int:
    """Bytes of a place, from the values that share it."""
    return max(value.size for value in place)


def _buffer(place: list[_Value], sources: "_Sources") -> Buffer:
    """Describe the buffer that the values in one place share: choose one of the largest values, preferably one with a
    known source."""
    size = _size(place)
    largest = []
    for value in place:
        if value.size == size:
            name = value.name.removesuffix("{}")
            largest.append(Buffer(size, value.type, name, *sources.of(value.name), value.is_argument))
    if place[0].is_argument:  # under its own name, not that of a value written in its place
        return largest[0]
    return max(largest, key=lambda buffer: (bool(buffer.source), bool(buffer.op_name)))


class _Sources:
    """Origins of a program's instructions."""

    def __init__(self, text: str):
        program = Program.parse(text)
        self._frames = _frames(text)
        self._instructions: dict[str, Instruction] = {}
        for inside in program.computations.values():
            self._instructions |= inside
        self._loops: dict[str, str] = {}
        """Loops by the names of their bodies' parameters."""
        self._users: dict[str, Instruction] = {}
        """First instructions that use a value as an operand, by the value's name."""
        for instruction in self._instructions.values():
            for operand in instruction.operands:
                self._users.setdefault(operand, instruction)
            if instruction.opcode == "while":
                (body,) = instruction.called
                self._loops |= dict.fromkeys(program.parameters(body).values(), instruction.name)

    def of(self, value: str) -> tuple[str, str]:
        """Return the name of the op that made a value, and the op's `file:line`.

        If a loop or a copy only passes the value on, name and place are those of the original value. If the value has
        neither, they are those of the first instruction that uses it.
        """
        name, _, element = value.removesuffix("}").partition("{")
        path = element.split(",") if element else []
        op_name, source = self._passed_on(name, path)
        while not (source or op_name) and (user := self._users.get(name)):
            name = user.name
            op_name = user.op_name
            source = self._source(user)
        return op_name, source

    def _passed_on(self, name: str, element: list[str]) -> tuple[str, str]:
        """Follow an element of a value to the instruction that computed it; return that instruction's op and source."""
        op_name = last_source = ""
        while instruction := self._instructions.get(name):
            opcode = instruction.opcode
            operands = instruction.operands
            source = self._source(instruction)
            op_name = op_name or instruction.op_name
            last_source = last_source or source
            if opcode == "parameter" and name in self._loops:
                name = self._loops[name]
            elif opcode == "tuple" and element:
                name = operands[int(element[0])]
                element = element[1:]
            elif opcode == "get-tuple-element":
                name = operands[0]
                element = [instruction.stated(r"index=(\d+)"), *element]
            elif opcode == "while" and element:
                name = operands[0]
            elif source:
                return op_name, source
            elif opcode in ("copy", "copy-start", "copy-done", "bitcast", "opt-barrier") and operands:
                name = operands[0]
                if opcode == "copy-start":
                    element = []
            else:
                break
        return op_name, last_source

    def _source(self, instruction: Instruction) -> str:
        if direct := re.search(r'source_file="([^"]*)".*?source_line=(\d+)', instruction.text):
            return _place(direct[1], direct[2])
        return self._frames.get(int(instruction.search(r"stack_frame_id=(\d+)") or 0), "")


def _frames(program: str) -> dict[int, str]:
    """Return `file:line` of the innermost frame outside libraries for each stack frame, from the tables at the head of
    a program's text."""
    frames = _records(program, "StackFrames")
    locations = _records(program, "FileLocations")
    files = _rows(program, "FileNames")
    # XLA prints the number of a frame's parent plus one. So the outermost frame seems to be its own parent, or a
    # sibling's child.
    plus = int(any(frame.get("parent_frame_id") == n for n, frame in frames.items()))

    def innermost(frame: int) -> str:
        while frame in frames:
            location = locations[frames[frame]["file_location_id"]]
            file = files[location["file_name_id"]].strip('"')
            if file.startswith(ESTIMATE):
                return ""
            if place := _place(file, location["line"]):
                return place
            frame = frames[frame].get("parent_frame_id", plus) - plus
        return ""

    return {frame: innermost(frame) for frame in frames}


def _rows(program: str, table: str) -> dict[int, str]:
    """Return the rows of a table by their numbers."""
    rows = {}
    if section := re.search(rf"^{table}\n((?:\d+ .*\n)*)", program, re.M):
        for number, row in re.findall(r"^(\d+) (.*)$", section[1], re.M):
            rows[int(number)] = row
    return rows


def _records(program: str, table: str) -> dict[int, dict[str, int]]:
    """Return the rows of a table whose columns are numbers, each as a dictionary."""
    records = {}
    for number, row in _rows(program, table).items():
        records[number] = {key: int(x) for key, x in re.findall(r"(\w+)=(\d+)", row)}
    return records


def _place(file: str, line: int | str) -> str:
    """Return `file:line`; the path of a file of the package starts with the package's name. Empty for files of Python,
    of other installed packages and of the estimate itself, and for wrappers."""
    if file.startswith((ESTIMATE, "<", *WRAPPERS)):
        return ""
    if not file.startswith(PACKAGE) and re.search(r"/(?:site|dist)-packages/|/lib/python[\d.]+/", file):
        return ""
    return f"{file.replace(PACKAGE, 'ringformer/')}:{line}"
