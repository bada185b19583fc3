"""Largest buffers of a compiled program at its peak, and the source lines that made them.

XLA dumps the place of every value (`*-buffer-assignment.txt`) and its lifetime (`*-live-range.txt`). This module finds
the moment at which the values in device memory take the most bytes, and the largest of them, which are worth reducing.
Whatever the heap needs beyond their sum is fragmentation.
"""

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

SUFFIXES = {"assignment": "-buffer-assignment.txt", "live_ranges": "-live-range.txt", "program": ".txt"}
"""Endings of the files that a program is dumped to."""

VALUE = r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)"
"""A value in a buffer assignment: instruction, element of its tuple, size, offset, type."""

PACKAGE = str(Path(__file__).parents[2]) + os.sep
ESTIMATE = str(Path(__file__).parents[1]) + os.sep
"""Files that lower the program; their frames are not part of it."""

WRAPPERS = tuple(PACKAGE + os.path.join("ops", name) for name in ("derivative_guards.py", "varying_axes.py"))
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
    """File and line of the innermost frame outside libraries, e.g. "ringformer/ops/rope.py:31"; empty if unknown."""
    is_argument: bool
    """True for the state and the batch, which stay for the whole step."""


class PeakBuffers(NamedTuple):
    """Buffers alive on one device when they take the most bytes."""

    bytes: int
    """Bytes of everything alive, arguments included; the compiler's peak also includes fragmentation."""
    largest: list[Buffer]


class _Value(NamedTuple):
    name: str
    """Instruction and element of its tuple, e.g. "while.3{1}"; "{}" if it is not a tuple."""
    place: tuple[int, int]
    """Allocation and offset; values with the same place and lifetime are one buffer under several names."""
    size: int
    type: str
    is_argument: bool


def read_peak_buffers(folder: Path, count: int = 10) -> PeakBuffers | None:
    """Return the `peak_buffers` of the one program dumped to the folder; None if it has no live ranges."""
    live_ranges = next(folder.glob("*after_optimizations-live-range.txt"), None)
    if live_ranges is None:
        return None
    stem = live_ranges.name.removesuffix(SUFFIXES["live_ranges"])
    texts = {what: folder / (stem + suffix) for what, suffix in SUFFIXES.items()}
    if not all(path.exists() for path in texts.values()):
        return None
    return peak_buffers(**{what: path.read_text() for what, path in texts.items()}, count=count)


def peak_buffers(assignment: str, live_ranges: str, program: str, count: int = 10) -> PeakBuffers:
    """Return the `count` largest buffers at the peak of device memory.

    Args:
      assignment: text of XLA's buffer assignment.
      live_ranges: text of its live ranges.
      program: text of the scheduled program, with the source of its instructions.
    """
    ranges = {
        name: (int(start), int(end)) for name, start, end in re.findall(r"^    (\S+):(\d+)-(\d+)$", live_ranges, re.M)
    }
    always, temporary = _values(assignment)
    alive = _at_peak([v for v in temporary if v.name in ranges], ranges) | _by_place(always)
    sizes = {place: max(v.size for v in values) for place, values in alive.items()}
    source = _Sources(program)
    largest = sorted(alive, key=lambda place: -sizes[place])[:count]
    return PeakBuffers(sum(sizes.values()), [_buffer(alive[place], source) for place in largest])


def _values(assignment: str) -> tuple[list[_Value], list[_Value]]:
    """Return the values in device memory: those that stay for the whole step, and those that share the heap."""
    always: list[_Value] = []
    temporary: list[_Value] = []
    heap = argument = skip = False
    number = 0
    for line in assignment.partition("\nTotal bytes used")[0].splitlines():
        if header := re.match(r"allocation (\d+): size \d+, (color \d+, )?(.*)$", line):
            number, use = int(header[1]), header[3]
            skip = bool(header[2]) or "thread-local" in use  # in another memory, or scalars of a fused loop
            heap, argument = "preallocated-temp" in use, bool(re.search(r"\bparameter \d", use))
        elif not skip and (value := re.match(VALUE, line)):
            name, element, size, offset, type_ = value.groups()
            place = number, int(offset)
            kind = temporary if heap else always
            kind.append(_Value(name + (element or "{}"), place, int(size), _plain(type_), argument))
    return always, temporary


def _at_peak(values: list[_Value], ranges: dict[str, tuple[int, int]]) -> dict[tuple[int, int], list[_Value]]:
    """Return the values that live when their places take the most bytes, grouped by place."""
    changes: dict[int, list[tuple[bool, _Value]]] = defaultdict(list)
    for value in values:
        start, end = ranges[value.name]
        changes[start].append((True, value))
        changes[end + 1].append((False, value))
    alive: dict[tuple[int, int], list[_Value]] = defaultdict(list)
    total = most = peak = 0
    for moment in sorted(changes):
        for born, value in changes[moment]:
            here = alive[value.place]
            total -= max((v.size for v in here), default=0)
            if born:
                here.append(value)
            else:
                here.remove(value)
            total += max((v.size for v in here), default=0)
        if total > most:
            most, peak = total, moment
    return _by_place([v for v in values if ranges[v.name][0] <= peak <= ranges[v.name][1]])


def _by_place(values: list[_Value]) -> dict[tuple[int, int], list[_Value]]:
    places = defaultdict(list)
    for value in values:
        places[value.place].append(value)
    return dict(places)


def _buffer(values: list[_Value], sources: "_Sources") -> Buffer:
    """Describe the buffer of the values in one place by one of the largest, preferably one with a known source."""
    size = max(v.size for v in values)
    largest = [(v, *sources.of(v.name)) for v in values if v.size == size]
    if values[0].is_argument:  # by its own name, not by the name of what is written in its place
        largest = largest[:1]
    value, op_name, source = max(largest, key=lambda described: (bool(described[2]), bool(described[1])))
    return Buffer(size, value.type, value.name.removesuffix("{}"), op_name, source, value.is_argument)


class _Sources:
    """Origins of a program's instructions."""

    def __init__(self, program: str):
        self._lines: dict[str, str] = {}
        self._loops: dict[str, str] = {}  # body -> its loop, parameter -> its body
        self._frames = _frames(program)
        computation = ""
        for line in program.splitlines():
            if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                computation = header[1]
            elif instruction := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line):
                self._lines[instruction[1]] = line
                if body := re.search(r" while\(.*\bbody=%?([\w.\-]+)", line):
                    self._loops[body[1]] = instruction[1]
                elif " parameter(" in line:
                    self._loops[instruction[1]] = computation
        self._program = program

    def of(self, value: str) -> tuple[str, str]:
        """Return the op's name and `file:line` of a value.

        For a value that a loop or a copy passes on, they are those of the value passed on; for a value without either,
        those of the first instruction that uses it.
        """
        name, _, element = value.removesuffix("}").partition("{")
        op_name, source = self._handed_on(name, element)
        while not (source or op_name) and (taker := self._taker(name)):
            name, line = taker
            op_name, source = _op_name(line), self._source(line)
        return op_name, source

    def _taker(self, name: str) -> tuple[str, str] | None:
        """Return the first instruction that has this one as an operand, with its line."""
        pattern = rf"^\s+(?:ROOT )?%([\w.\-]+) = [^\n]*? [a-z][a-z0-9\-]*\([^)\n]*%{re.escape(name)}[,)].*$"
        user = re.search(pattern, self._program, re.M)
        return (user[1], user[0]) if user else None

    def _handed_on(self, name: str, element: str) -> tuple[str, str]:
        op_name = of_loop = ""
        seen = set[tuple[str, str]]()
        while name in self._lines and (name, element) not in seen:
            seen.add((name, element))
            line = self._lines[name]
            op_name = op_name or _op_name(line)
            opcode, operands = _operands(line)
            source = self._source(line)
            of_loop = of_loop or source
            if opcode == "parameter" and (loop := self._loops.get(self._loops.get(name, ""))):
                name = loop
            elif opcode == "tuple" and element:
                index, _, element = element.partition(",")
                name = operands[int(index)] if int(index) < len(operands) else ""
            elif opcode == "get-tuple-element":
                index = (re.search(r"index=(\d+)", line) or ["", ""])[1]
                name, element = operands[0], f"{index},{element}".rstrip(",")
            elif opcode == "while" and element:
                name = operands[0]
            elif source:
                return op_name, source
            elif opcode in ("copy", "copy-start", "copy-done", "bitcast", "opt-barrier") and operands:
                name, element = operands[0], "" if opcode == "copy-start" else element
            else:
                break
        return op_name, of_loop

    def _source(self, line: str) -> str:
        if direct := re.search(r'source_file="([^"]*)".*?source_line=(\d+)', line):
            return "" if _is_foreign(direct[1]) else f"{_short(direct[1])}:{direct[2]}"
        frame = re.search(r"stack_frame_id=(\d+)", line)
        return self._frames.get(int(frame[1]), "") if frame else ""


def _op_name(line: str) -> str:
    name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', line)
    return name[1].replace("\\'", "'") if name else ""


def _operands(line: str) -> tuple[str, list[str]]:
    match = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][a-z0-9\-]*)\((.*)$", line)
    return (match[1], re.findall(r"%([\w.\-]+)", match[2].split(")", 1)[0])) if match else ("", [])


def _frames(program: str) -> dict[int, str]:
    """Return `file:line` of the innermost frame outside libraries for each stack frame, from the tables at the head of
    a program's text."""
    tables: dict[str, dict[int, str]] = {}
    for name in ("FileNames", "FileLocations", "StackFrames"):
        section = re.search(rf"^{name}\n((?:\d+ .*\n)*)", program, re.M)
        tables[name] = {int(n): row for n, row in re.findall(r"^(\d+) (.*)$", section[1], re.M)} if section else {}
    frames, locations = (
        {n: {key: int(x) for key, x in re.findall(r"(\w+)=(\d+)", row)} for n, row in tables[name].items()}
        for name in ("StackFrames", "FileLocations")
    )
    # XLA prints the number of a frame's parent plus one, so that the outermost frame seems to be its own parent, or to
    # have a sibling for a parent.
    plus = 1 if any(frame.get("parent_frame_id") == n for n, frame in frames.items()) else 0

    def place(frame: int) -> str:
        while frame in frames:
            location = locations[frames[frame]["file_location_id"]]
            file = tables["FileNames"][location["file_name_id"]].strip('"')
            if file.startswith(ESTIMATE):
                return ""
            if not _is_foreign(file):
                return f"{_short(file)}:{location['line']}"
            frame = frames[frame].get("parent_frame_id", plus) - plus
        return ""

    return {frame: place(frame) for frame in frames}


def _is_foreign(file: str) -> bool:
    """Return True for files of Python, of other installed packages, of the estimate itself, and for wrappers."""
    if file.startswith(PACKAGE):
        return file.startswith(ESTIMATE) or file in WRAPPERS
    return file.startswith("<") or bool(re.search(r"/(?:site|dist)-packages/|/lib/python[\d.]+/", file))


def _short(file: str) -> str:
    """Return the path starting at the package, for the package's own files."""
    return "ringformer/" + file.removeprefix(PACKAGE) if file.startswith(PACKAGE) else file


def _plain(type_: str) -> str:
    """Return a type without its layouts."""
    return re.sub(r"\{[^{}]*\}", "", type_)
