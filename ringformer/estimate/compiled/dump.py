"""Reader of scheduled programs and their buffer assignment, from the dump that XLA writes before it generates code.

At that point, the compiler has decided whether the program fits, what it keeps in memory and what it overlaps. On TPU,
nine tenths of the compilation are still ahead: the generation of machine code, which an estimate does not need.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ringformer.estimate.compiled.peak_buffers import PeakBuffers, read_allocations, read_peak_buffers

PROGRAM = {"tpu": "*after_optimizations_after_buffer_assignment.txt", "gpu": "*gpu_after_optimizations.txt"}
"""File of the scheduled program. The TPU compiler writes it only for a program that fits."""

LAST = {"tpu": PROGRAM["tpu"], "gpu": "*.debug_options"}
"""File whose existence shows that the program and its buffer assignment have been written."""

AS_COMPILED_PROGRAMS_PRINT = {
    "xla_dump_hlo_as_text": True,
    "xla_dump_compact_gte": False,
    "xla_syntax_sugar_async_ops": True,
}
"""Options that make a dump equal to the text of `jax.stages.Compiled.as_text`, for compilers that have them."""

HOST = "5"
"""Number ("color") of host memory in a buffer assignment; device memory has none."""


class CompilerFailure(RuntimeError):
    """The compiler broke down, so it is unknown whether the program fits."""

    meaning = "the compiler broke down, so it is unknown whether it fits: "
    """Introduction to the error in a command's output."""


class Refusal(str):
    """The error of a compiler that rejects a program."""


class Memory(NamedTuple):
    """Bytes on one device."""

    arguments: int
    outputs: int
    """Outputs that do not reuse the memory of an argument."""
    temporaries: int
    host: int
    """Temporaries in host memory."""


class Compiled(NamedTuple):
    """A compiler's report on a program that it accepts."""

    program: str
    """Text of the scheduled program."""
    memory: Memory
    generated_code: bool = False
    code_bytes: int | None = None
    """Bytes of machine code in device memory; None if the compiler does not report it."""
    peak_buffers: PeakBuffers | None = None
    """Buffers alive at the peak; None if the dump does not contain them."""
    cycles: dict[str, float] | None = None
    """Cycles of the program's own machine code, by `KernelKeys.key`; None if it was not read."""


def read_dump(folder: Path, kind: str) -> Compiled | None:
    """Read the dump of a program for a target of this kind ("tpu" or "gpu"); None until it is complete.

    The buffer assignment is written before the program, and a program's entry computation comes last in its text.
    """
    program = next(folder.glob(PROGRAM[kind]), None)
    if program is None or not any(folder.glob(LAST[kind])):
        return None
    text = program.read_text()
    entry = text.rfind("\nENTRY ")
    if entry < 0 or not text[entry:].rstrip().endswith("\n}"):
        return None
    stem = program.name.partition("after_optimizations")[0]
    memory = read_memory((folder / f"{stem}after_optimizations-buffer-assignment.txt").read_text())
    if not (memory.arguments or memory.outputs):
        return None
    return Compiled(text, memory, peak_buffers=read_peak_buffers(folder))


def compile_printing(
    lowered: jax.stages.Lowered, options: dict[str, Any], printing: dict[str, Any]
) -> jax.stages.Compiled:
    """Compile with `options`, and with those options in `printing` that the compiler accepts.

    A compiler rejects an unknown option at once. This is harmless: a compiler that is older than an option always
    behaves as the option asks.
    """
    try:
        return lowered.compile(compiler_options=options | printing)
    except jax.errors.JaxRuntimeError as error:
        unknown = re.search(r"No such compile option: '(\w+)'", str(error))
        if unknown is None or unknown[1] not in printing:
            raise
        return compile_printing(lowered, options, {name: x for name, x in printing.items() if name != unknown[1]})


USES = {"parameter ": "arguments", "preallocated-temp": "temporaries", "maybe-live-out": "outputs"}
"""Fields of `Memory`, each by a word that the description of such an allocation in device memory contains."""


def read_memory(assignment: str) -> Memory:
    """Sum up the allocations in the text of a buffer assignment."""
    sizes = dict.fromkeys(Memory._fields, 0)
    for allocation in read_allocations(assignment):
        use = re.search("|".join(USES), allocation.use)
        if allocation.color == HOST and use and use[0] == "preallocated-temp":
            sizes["host"] += int(allocation.size)
        elif not allocation.color and use:
            sizes[USES[use[0]]] += int(allocation.size)
    return Memory(**sizes)
