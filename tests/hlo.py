"""Read a compiled program: which collectives it executes, how often, and what they carry.

XLA prints a loop body once. An instruction inside it runs as often as the loop's trip count says, which compilers
either state (`known_trip_count`) or leave to be read off: counters start at a constant and stop below another.
"""

import platform
import re
import sys
from typing import NamedTuple

import pytest

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")


on_tpu = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="libtpu exists for Linux on x86-64 only"
)


class Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    operands: list[str]
    text: str
    is_root: bool


class Collective(NamedTuple):
    """A kind of collective, summed over the program. `shape` is what one device sends, without a layout."""

    kind: str
    asynchronous: bool
    dtype: str
    shape: tuple[int, ...]


def executed_collectives(text: str) -> dict[Collective, int]:
    """How often one run of a compiled program's `text` executes each collective."""
    computations, entry = _parse(text)
    counts: dict[Collective, int] = {}
    for instruction, times in _executed(computations, entry):
        kind = next((k for k in COLLECTIVES if instruction.opcode.startswith(k)), None)
        if kind is None or instruction.opcode.endswith("-done"):
            continue
        dtype, dims = re.search(r"(\w+)\[([\d,]*)\]", instruction.type).groups()
        shape = tuple(int(x) for x in dims.split(",") if x)
        key = Collective(kind, instruction.opcode.endswith("-start"), dtype, shape)
        counts[key] = counts.get(key, 0) + times
    return counts


def _parse(text):
    """({computation: {name: Instruction}}, the name of the entry computation)"""
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            current = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
            continue
        match = re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$", line)
        if match and current is not None:
            root, name, type_, opcode, rest = match.groups()
            operands = re.findall(r"%([\w.\-]+)", rest.split(")", 1)[0])
            current[name] = Instruction(name, type_, opcode, operands, line, bool(root))
    assert entry is not None, "no ENTRY computation in the text"
    return computations, entry


def _called(instruction):
    """The computations that an instruction runs, a loop's condition left out."""
    names = re.findall(r"\b(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", instruction.text)
    for branches in re.findall(r"branch_computations=\{([^}]*)\}", instruction.text):
        names += re.findall(r"%?([\w.\-]+)", branches)
    return names


def _executed(computations, name, times=1):
    """Every instruction reachable from a computation, with how often it runs; loops without collectives left out."""
    for instruction in computations[name].values():
        yield instruction, times
        for called in _called(instruction):
            if _holds_collective(computations, called):
                trips = _trip_count(computations, name, instruction) if instruction.opcode == "while" else 1
                yield from _executed(computations, called, times * trips)


def _holds_collective(computations, name):
    return any(
        instruction.opcode.startswith(COLLECTIVES)
        or any(_holds_collective(computations, c) for c in _called(instruction))
        for instruction in computations[name].values()
    )


def _trip_count(computations, name, loop):
    stated = re.search(r'known_trip_count"?[:=]\{"?n"?[:=]"?(\d+)', loop.text)
    if stated:
        return int(stated[1])
    condition = computations[re.search(r"condition=%?([\w.\-]+)", loop.text)[1]]
    root = next(i for i in condition.values() if i.is_root)
    assert root.opcode == "compare" and "direction=LT" in root.text, f"not a counted loop: {root.text}"
    counter, limit = root.operands
    index = int(re.search(r"index=(\d+)", condition[counter].text)[1])
    carry = computations[name][loop.operands[0]]
    return _constant(condition, limit) - _constant(computations[name], carry.operands[index])


def _constant(computation, name):
    """The number that an instruction holds, seen through copies."""
    instruction = computation[name]
    while instruction.opcode in ("copy", "bitcast", "convert", "copy-start", "copy-done"):
        instruction = computation[instruction.operands[0]]
    assert instruction.opcode == "constant", f"not a constant: {instruction.text}"
    return int(re.search(r"constant\((-?\d+)\)", instruction.text)[1])
