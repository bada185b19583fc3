"""The largest buffers of a compiled program at its peak, and the lines of source that made them.

XLA dumps where every value lies (`*-buffer-assignment.txt`) and from when to when it lives (`*-live-range.txt`). Of the
moment at which the values in device memory take most bytes, the largest are what a person can do something about. What
the heap has beyond their sum is holes.
"""

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

SUFFIXES = {"assignment": "-buffer-assignment.txt", "live_ranges": "-live-range.txt", "program": ".txt"}
"""How the names of the files end that a program is dumped to."""

VALUE = r" value: <\d+ (\S+?)(\{[\d,]*\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)"
"""A line of a buffer assignment: instruction, element of its tuple, size, offset, type."""

PACKAGE = str(Path(__file__).parents[2]) + os.sep
ESTIMATE = str(Path(__file__).parents[1]) + os.sep
"""Where the program is lowered: what calls it is no part of it."""

WRAPPERS = tuple(PACKAGE + os.path.join("ops", name) for name in ("derivative_guards.py", "varying_axes.py"))
"""Modules that compute nothing themselves: who calls them says more."""


class Buffer(NamedTuple):
    """A value in device memory, alive at the peak."""

    bytes: int
    """What it takes, the padding of its tiles among it."""
    type: str
    """Its dtype and shape in XLA's notation, e.g. "bf16[1,4096,512]"."""
    instruction: str
    op_name: str
    """JAX's name of the operation, the transformations around it in front; empty: the compiler's own."""
    source: str
    """File and line of the innermost frame that is not a library's, e.g. "ringformer/ops/rope.py:31"; empty: nobody
    said."""
    is_argument: bool
    """Whether it is the state or the batch, which stay for the whole step."""


class PeakBuffers(NamedTuple):
    """What is alive on one device at the moment at which that is most."""

    bytes: int
    """All that is alive, arguments too; the compiler's peak has the holes of its heap besides."""
    largest: list[Buffer]


class _Value(NamedTuple):
    name: str
    """Of the instruction and the element of its tuple, e.g. "while.3{1}"; "{}" if it is no tuple."""
    place: tuple[int, int]
    """Allocation and offset: values of one place that live at one time are one buffer under several names."""
    size: int
    type: str
    is_argument: bool


def read_peak_buffers(folder: Path, count: int = 10) -> PeakBuffers | None:
    """`peak_buffers` of the one program that a compiler dumped to the folder; None if it dumped no live ranges."""
    found = next(folder.glob("*after_optimizations-live-range.txt"), None)
    if found is None:
        return None
    stem = found.name.removesuffix(SUFFIXES["live_ranges"])
    texts = {what: folder / (stem + suffix) for what, suffix in SUFFIXES.items()}
    if not all(path.exists() for path in texts.values()):
        return None
    return peak_buffers(**{what: path.read_text() for what, path in texts.items()}, count=count)


def peak_buffers(assignment: str, live_ranges: str, program: str, count: int = 10) -> PeakBuffers:
    """The `count` largest buffers at the peak of device memory.

    Args:
      assignment: the text of XLA's buffer assignment.
      live_ranges: the text of its live ranges.
      program: the text of the scheduled program, with the source of its instructions.
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
    """The values in device memory: those that stay for the whole step, and those that share the heap."""
    always: list[_Value] = []
    temporary: list[_Value] = []
    heap = argument = skip = False
    number = 0
    for line in assignment.partition("\nTotal bytes used")[0].splitlines():
        if header := re.match(r"allocation (\d+): size \d+, (color \d+, )?(.*)$", line):
            number, use = int(header[1]), header[3]
            skip = bool(header[2]) or "thread-local" in use  # of another memory, or of a fused loop's scalars
            heap, argument = "preallocated-temp" in use, bool(re.search(r"\bparameter \d", use))
        elif not skip and (value := re.match(VALUE, line)):
            name, element, size, offset, type_ = value.groups()
            found = _Value(name + (element or "{}"), (number, int(offset)), int(size), _plain(type_), argument)
            (temporary if heap else always).append(found)
    return always, temporary


def _at_peak(values: list[_Value], ranges: dict[str, tuple[int, int]]) -> dict[tuple[int, int], list[_Value]]:
    """The values that live at the moment at which their places take most bytes, by place."""
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
    """One buffer of the values in its place: described by one of the largest, rather one whose source is known."""
    size = max(v.size for v in values)
    told = [(v, *sources.of(v.name)) for v in values if v.size == size]
    if values[0].is_argument:  # by its own name, not that of what is written in its place
        told = told[:1]
    value, op_name, source = max(told, key=lambda t: (bool(t[2]), bool(t[1])))
    return Buffer(size, value.type, value.name.removesuffix("{}"), op_name, source, value.is_argument)


class _Sources:
    """The origin of a program's instructions."""

    def __init__(self, program: str):
        self._lines: dict[str, str] = {}
        self._loops: dict[str, str] = {}  # the loop of each body, and the body of each parameter
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
        """The op's name and `file:line` of a value.

        Of one that a loop or a copy hands on, those of what it hands on; of one that nobody names, those of the
        instruction that takes it.
        """
        name, _, element = value.removesuffix("}").partition("{")
        op_name, source = self._handed_on(name, element)
        while not (source or op_name) and (taker := self._taker(name)):
            name, line = taker
            op_name, source = _op_name(line), self._source(line)
        return op_name, source

    def _taker(self, name: str) -> tuple[str, str] | None:
        """The first instruction that has this one for an operand, with its line."""
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
    said = re.search(r'op_name="((?:[^"\\]|\\.)*)"', line)
    return said[1].replace("\\'", "'") if said else ""


def _operands(line: str) -> tuple[str, list[str]]:
    match = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = .*? ([a-z][a-z0-9\-]*)\((.*)$", line)
    return (match[1], re.findall(r"%([\w.\-]+)", match[2].split(")", 1)[0])) if match else ("", [])


def _frames(program: str) -> dict[int, str]:
    """`file:line` by the number of a stack frame, from the tables at the head of a program's text: that of the
    innermost frame that is not a library's."""
    tables: dict[str, dict[int, str]] = {}
    for name in ("FileNames", "FileLocations", "StackFrames"):
        section = re.search(rf"^{name}\n((?:\d+ .*\n)*)", program, re.M)
        tables[name] = {int(n): row for n, row in re.findall(r"^(\d+) (.*)$", section[1], re.M)} if section else {}
    frames, locations = (
        {n: {key: int(x) for key, x in re.findall(r"(\w+)=(\d+)", row)} for n, row in tables[name].items()}
        for name in ("StackFrames", "FileLocations")
    )
    # XLA prints the number of a frame's parent plus one: the outermost of a stack seems to be its own, or to have a
    # sibling for a parent.
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
    """Whether a file belongs to Python, to another package that is installed, to the estimate itself or to wrappers."""
    if file.startswith(PACKAGE):
        return file.startswith(ESTIMATE) or file in WRAPPERS
    return file.startswith("<") or bool(re.search(r"/(?:site|dist)-packages/|/lib/python[\d.]+/", file))


def _short(file: str) -> str:
    """The path from the package on, of a file of its own."""
    return "ringformer/" + file.removeprefix(PACKAGE) if file.startswith(PACKAGE) else file


def _plain(type_: str) -> str:
    """A type without its layouts."""
    return re.sub(r"\{[^{}]*\}", "", type_)
