"""Bytes that an instruction of a compiled program moves to and from HBM.

The layout of an operand or result shows if the compiler placed it in on-chip memory: `S(1)` is VMEM, `S(3)` CMEM. A
fusion that only slices an operand reads only the slices; one that updates a result in place writes only the update.
"""

import re

from ringformer.estimate.compiled.program_text import Instruction, Program, kernel_cost, parse_type

_ELSEWHERE = re.compile(r"S\([1-9]\)")
_VIEWS = ("bitcast", "reshape", "get-tuple-element")
_SLICES = ("dynamic-slice", "slice", "gather")
_SAME_MEMORY = "output_to_operand_aliasing={{}: (0, {})}"
"""Attribute of a fusion inside another whose result is its operand, seen with another layout."""
_NO_WORK = (
    "parameter",
    "constant",
    "tuple",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "while",
    "conditional",
    "call",
    *_VIEWS,
)


def hbm_bytes(program: Program, computation: str, instruction: Instruction) -> float:
    """Bytes that one run of an instruction reads and writes. Computations that it calls are included only if it is a
    fusion.

    The start of an asynchronous copy counts for the whole copy. The end of a copy and the start of a collective count
    as no bytes, also on a SparseCore.
    """
    opcode = instruction.opcode
    here = program.computations[computation]
    if opcode in _NO_WORK or opcode.endswith(("-done", "-update", "call-start")) or instruction.collective:
        return 0.0
    operands = [here[name] for name in instruction.operands if name in here]
    if opcode in ("copy-start", "slice-start", "async-start"):
        return _asynchronous(instruction)
    if opcode == "fusion":
        return _fusion(program, instruction, operands)
    if opcode in _SLICES:
        return (_in_hbm(operands[0].type) + _in_hbm(instruction.type)) * instruction.bytes
    if opcode == "dynamic-update-slice":
        update = operands[1]
        return (_in_hbm(update.type) + _in_hbm(instruction.type)) * update.bytes
    if opcode == "custom-call" and (cost := kernel_cost(instruction)):
        return cost.hbm_bytes
    read = sum(_bytes(operand.type) for operand in operands)
    return read + _bytes(_without_workspace(instruction, instruction.type))


def _fusion(program: Program, fusion: Instruction, operands: list[Instruction]) -> float:
    inside = fusion.called[0]
    parameters = program.parameters(inside)
    read = 0.0
    for i, operand in enumerate(operands):
        size = _bytes(operand.type)
        if size:
            read += min(size, _read(program, inside, parameters[i], size))
    return read + _written(program, inside, program.root(inside), fusion.type)


def _read(program: Program, computation: str, name: str, size: float) -> float:
    """Bytes that a fused computation reads of one of its values; `size` is the size of the whole value."""
    here = program.computations[computation]
    total = 0.0
    for user in here.values():
        for place, operand in enumerate(user.operands):
            if operand != name:
                continue
            if user.opcode in _SLICES and place == 0:
                total += user.bytes
            elif (user.opcode == "dynamic-update-slice" and place == 0) or user.opcode == "tuple":
                continue  # updated in place, or passed on
            elif user.opcode in _VIEWS or _SAME_MEMORY in user.text:
                total += _read(program, computation, user.name, size)
            elif user.opcode == "fusion":
                inner = user.called[0]
                total += _read(program, inner, program.parameters(inner)[place], size)
            else:
                return size
    return total


def _written(program: Program, computation: str, root: Instruction, type_: str) -> float:
    """Bytes that a fused computation writes to HBM; `type_` contains the layouts of its results."""
    here = program.computations[computation]
    results = [root]
    if root.opcode == "tuple":
        results = [here[name] for name in root.operands]
    arrays = parse_type(type_)
    if len(arrays) != len(results):
        return _bytes(_without_workspace(root, type_))
    written = 0.0
    for result, (array, layout) in zip(results, arrays, strict=True):
        written += _update(program, computation, result, array.bytes * _in_hbm(layout))
    return written


def _update(program: Program, computation: str, result: Instruction, size: float) -> float:
    here = program.computations[computation]
    while result.opcode in _VIEWS:
        result = here[result.operands[0]]
    if size and result.opcode == "dynamic-update-slice":
        return here[result.operands[1]].bytes
    if size and result.opcode == "fusion":
        inner = result.called[0]
        root = program.root(inner)
        if root.opcode != "tuple":
            return _update(program, inner, root, size)
    return size


def _without_workspace(call: Instruction, type_: str) -> str:
    """Remove the workspace of a matrix product of cuBLAS from the type of its results: the last, of bytes."""
    if "__cublas" not in call.text:
        return type_
    return re.sub(r", [su]8\[\d+\]\{0\}\)$", ")", type_)


def _asynchronous(start: Instruction) -> float:
    """Bytes of an asynchronous copy. Half of the arrays of its tuple move; they count once for each end of the copy
    that is in HBM."""
    sizes = []
    in_hbm = 0
    for array, layout in parse_type(start.type):
        if array.bytes > 4:
            sizes.append(array.bytes)
            in_hbm += _in_hbm(layout)
    return min(sizes, default=0.0) * min(2, in_hbm)


def _bytes(type_: str) -> float:
    """Bytes of the arrays of a type that are in HBM."""
    return sum(array.bytes for array, layout in parse_type(type_) if _in_hbm(layout))


def _in_hbm(type_: str) -> bool:
    return not _ELSEWHERE.search(type_)
