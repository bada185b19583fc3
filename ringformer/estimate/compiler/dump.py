"""A program as its compiler has scheduled it and placed its buffers, read from what XLA dumps before it generates code.

Whether the program fits, what it holds and what it overlaps is decided there. On TPU nine tenths of a compilation
still lie ahead then: machine code, which an estimate does not need.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ringformer.estimate.compiler.peak_buffers import PeakBuffers, read_peak_buffers

PROGRAM = {"tpu": "*after_optimizations_after_buffer_assignment.txt", "gpu": "*gpu_after_optimizations.txt"}
"""The dump of the scheduled program. The TPU compiler writes this one only of a program that it found to fit."""

LAST = {"tpu": PROGRAM["tpu"], "gpu": "*.debug_options"}
"""The file that is written when the program and the buffer assignment are there."""

AS_COMPILED_PROGRAMS_PRINT = {
    "xla_dump_hlo_as_text": True,
    "xla_dump_compact_gte": False,
    "xla_syntax_sugar_async_ops": True,
}
"""How a dump writes the same text as `jax.stages.Compiled.as_text`, of a compiler that knows these options."""

HOST = "5"
"""The number ("color") of host memory in a buffer assignment; that of the device is not printed."""


class CompilerFailure(RuntimeError):
    """The compiler broke down. That says nothing of whether the program fits."""


class Refusal(str):
    """The error of a compiler that does not accept a program."""


class Memory(NamedTuple):
    """Bytes of one device."""

    arguments: int
    outputs: int
    """Outputs that take the place of no argument."""
    temporaries: int
    host: int
    """Temporaries in host memory."""


class Compiled(NamedTuple):
    """What a compiler says of a program that it accepts."""

    program: str
    """The text of the scheduled program."""
    memory: Memory
    generated_code: bool = False
    code_bytes: int | None = None
    """Of the machine code, in the device's memory; None: the compiler does not say."""
    peak_buffers: PeakBuffers | None = None
    """What is alive at the peak; None if no dump says so."""
    cycles: dict[str, float] | None = None
    """Of the program's own machine code, by `KernelKeys.key`; None if it was not read."""


def read_dump(folder: Path, kind: str) -> Compiled | None:
    """What the dump in a folder says of the program of a target of this kind ("tpu" or "gpu"), once it is all there.

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


def compile_printing(lowered: jax.stages.Lowered, options: dict, printing: dict[str, Any]) -> jax.stages.Compiled:
    """Compile with these options, and with those of `printing` that the compiler knows: it refuses others at once.

    One that is older than an option writes only what the option asks for.
    """
    try:
        return lowered.compile(compiler_options=options | printing)
    except jax.errors.JaxRuntimeError as error:
        unknown = re.search(r"No such compile option: '(\w+)'", str(error))
        if unknown is None or unknown[1] not in printing:
            raise
        return compile_printing(lowered, options, {name: x for name, x in printing.items() if name != unknown[1]})


def generated_program(folder: Path) -> str | None:
    """The text of the program in a TPU compiler's dump after it generated code: the schedule, with its own estimates of
    cycles. (`jax.stages.Compiled.as_text` cannot print programs with offloaded arrays on every chip.)"""
    program = next(folder.glob("*after_codegen.txt"), None)
    return program.read_text() if program else None


def read_memory(assignment: str) -> Memory:
    """What the text of a buffer assignment says; only newer compilers give an allocation a page."""
    sizes = dict.fromkeys(Memory._fields, 0)
    allocation = r"^allocation \d+: size (\d+), (?:color (\d+), )?(?:page \d+, )?(.*)$"
    for size, color, use in re.findall(allocation, assignment, re.M):
        if color == HOST and "preallocated-temp" in use:
            sizes["host"] += int(size)
        elif not color:
            kind = (
                "arguments"
                if use.startswith("parameter ")
                else "temporaries"
                if "preallocated-temp" in use
                else "outputs"
                if "maybe-live-out" in use
                else None
            )
            if kind:
                sizes[kind] += int(size)
    return Memory(**sizes)
