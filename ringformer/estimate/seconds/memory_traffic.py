"""Bytes that an instruction of a compiled program moves to and from HBM.

An operand or result that the compiler placed in on-chip memory says so in its layout: `S(1)` is VMEM, `S(3)` CMEM. Of
an operand that a fusion only slices it reads the slices, and of a result that it updates in place it writes the update.
"""

import math
import re

from ringformer.estimate.compiler.program_text import DTYPE_BYTES, Instruction, Program, kernel_cost

_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_ELSEWHERE = re.compile(r"S\([1-9]\)")
_VIEWS = ("bitcast", "reshape", "get-tuple-element")
_NO_WORK = ("parameter", "constant", "tuple", "after-all", "partition-id", "replica-id", "opt-barrier", *_VIEWS)


def hbm_bytes(program: Program, computation: str, instruction: Instruction) -> float:
    """What one run of an instruction reads and writes, without what it calls unless it is a fusion.

    The start of an asynchronous copy counts for all of it, its end and the start of a collective for nothing.
    """
    opcode, here = instruction.opcode, program.computations[computation]
    if opcode in (*_NO_WORK, "while", "conditional", "call") or opcode.endswith(("-done", "-update")):
        return 0.0
    if instruction.collective:
        return 0.0
    operands = [here[name] for name in instruction.operands if name in here]
    if opcode in ("copy-start", "slice-start", "async-start"):
        return _asynchronous(instruction)
    if opcode == "fusion":
        return _fusion(program, instruction, operands)
    if opcode in ("dynamic-slice", "slice", "gather"):
        moved = _bytes(instruction.type, everywhere=True)
        return (_in_hbm(operands[0].type) + _in_hbm(instruction.type)) * moved
    if opcode == "dynamic-update-slice":
        update = _bytes(operands[1].type, everywhere=True)
        return (_in_hbm(operands[1].type) + _in_hbm(instruction.type)) * update
    if opcode == "custom-call" and (cost := kernel_cost(instruction)):
        return cost.hbm_bytes
    return _bytes(instruction.type) + sum(_bytes(operand.type) for operand in operands)


def _fusion(program: Program, fusion: Instruction, operands: list[Instruction]) -> float:
    inside = fusion.called[0]
    parameters = _parameters(program, inside)
    total = 0.0
    for place, operand in enumerate(operands):
        size = _bytes(operand.type)
        if size and place in parameters:
            total += min(size, _read(program, inside, parameters[place], size))
    return total + _written(program, inside, _root(program, inside), fusion.type)


def _read(program: Program, computation: str, name: str, size: float) -> float:
    """Bytes that a fused computation reads of one of its values, which has `size` bytes."""
    here, total = program.computations[computation], 0.0
    for user in here.values():
        for place in (i for i, operand in enumerate(user.operands) if operand == name):
            if user.opcode in ("dynamic-slice", "slice", "gather") and place == 0:
                total += _bytes(user.type, everywhere=True)
            elif (user.opcode == "dynamic-update-slice" and place == 0) or user.opcode == "tuple":
                continue  # updated in place, or handed through
            elif user.opcode in _VIEWS:
                total += _read(program, computation, user.name, size)
            elif user.opcode == "fusion":
                inner = user.called[0]
                total += _read(program, inner, _parameters(program, inner)[place], size)
            else:
                return size
    return total


def _written(program: Program, computation: str, root: Instruction, type_: str) -> float:
    """Bytes that a fused computation writes to HBM; `type_` says where its results lie."""
    here = program.computations[computation]
    results = [here[name] for name in root.operands] if root.opcode == "tuple" else [root]
    places = [match[0] for match in _ARRAY.finditer(type_)]
    if len(places) != len(results):
        return _bytes(type_)
    return sum(
        _update(program, computation, result, _bytes(place)) for result, place in zip(results, places, strict=True)
    )


def _update(program: Program, computation: str, result: Instruction, size: float) -> float:
    here = program.computations[computation]
    while result.opcode in _VIEWS:
        result = here[result.operands[0]]
    if size and result.opcode == "dynamic-update-slice":
        return _bytes(here[result.operands[1]].type, everywhere=True)
    if size and result.opcode == "fusion":
        inner = result.called[0]
        root = _root(program, inner)
        if root.opcode != "tuple":
            return _update(program, inner, root, size)
    return size


def _asynchronous(start: Instruction) -> float:
    """Half of the arrays of a start's tuple are what it moves; each of its ends that is HBM counts."""
    sizes = [(_bytes(m[0], everywhere=True), _in_hbm(m[0])) for m in _ARRAY.finditer(start.type)]
    arrays = [(size, here) for size, here in sizes if size > 4]
    moved = min((size for size, _ in arrays), default=0.0)
    return moved * min(2, sum(here for _, here in arrays))


def _parameters(program: Program, computation: str) -> dict[int, str]:
    found = {}
    for instruction in program.computations[computation].values():
        if instruction.opcode == "parameter" and (number := re.search(r"parameter\((\d+)\)", instruction.text)):
            found[int(number[1])] = instruction.name
    return found


def _root(program: Program, computation: str) -> Instruction:
    return next(i for i in program.computations[computation].values() if i.is_root)


def _bytes(type_: str, everywhere: bool = False) -> float:
    """Bytes of the arrays of a type, of those in HBM unless `everywhere`."""
    total = 0.0
    for dtype, dims, layout in _ARRAY.findall(type_):
        if everywhere or not _ELSEWHERE.search(layout):
            total += DTYPE_BYTES.get(dtype, 0) * math.prod(int(x) for x in dims.split(",") if x)
    return total


def _in_hbm(type_: str) -> bool:
    return not _ELSEWHERE.search(type_)
