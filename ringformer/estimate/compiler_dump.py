"""A program as its compiler has scheduled it and placed its buffers, read from what XLA dumps before it generates code.

Whether the program fits, what it holds and what it overlaps is decided there. On TPU nine tenths of a compilation
still lie ahead then: machine code, which an estimate does not need.
"""

import re
import threading
from pathlib import Path
from typing import NamedTuple

import jax

PROGRAM = {"tpu": "*after_optimizations_after_buffer_assignment.txt", "gpu": "*gpu_after_optimizations.txt"}
"""The dump of the scheduled program. The TPU compiler writes this one only of a program that it found to fit."""

LAST = {"tpu": PROGRAM["tpu"], "gpu": "*.debug_options"}
"""The file that is written when the program and the buffer assignment are there."""

AS_COMPILED_PROGRAMS_PRINT = {
    "xla_dump_hlo_as_text": True, "xla_dump_compact_gte": False, "xla_syntax_sugar_async_ops": True,
}  # fmt: skip
"""How a dump writes the same text as `jax.stages.Compiled.as_text`, of a compiler that knows these options."""

HOST = "5"
"""The number ("color") of host memory in a buffer assignment; that of the device is not printed."""


class CompilerFailure(RuntimeError):
    """The compiler broke down. That says nothing of whether the program fits."""


class Memory(NamedTuple):
    """Bytes of one device."""

    arguments: int
    outputs: int
    """Outputs that take the place of no argument."""
    temporaries: int
    host: int
    """Temporaries in host memory."""


def compile_until_scheduled(lowered: jax.stages.Lowered, options: dict, kind: str, folder: Path) -> tuple[str, Memory]:
    """The text of the scheduled program, and what it holds, for a target of this kind ("tpu" or "gpu").

    The compiler cannot be stopped: it goes on, and writes more to the empty `folder`, in a thread that nobody waits
    for. Call this in a process that ends. Raises what the compiler raises, CompilerFailure if it dumped nothing.
    """
    failures = []

    def compile_on():
        try:
            _compile_printing(lowered, options | {"xla_dump_to": str(folder)}, AS_COMPILED_PROGRAMS_PRINT)
        except Exception as error:
            failures.append(error)

    compiler = threading.Thread(target=compile_on, daemon=True)
    compiler.start()
    dumped = None
    while dumped is None and compiler.is_alive():
        compiler.join(timeout=0.2)
        dumped = _read(folder, kind)
    if dumped is None and failures:
        raise failures[0]
    if dumped is None:
        raise CompilerFailure(f"it wrote no {PROGRAM[kind]} to {folder}; --generate_code does without")
    return dumped


def _compile_printing(lowered: jax.stages.Lowered, options: dict, printing: dict) -> None:
    """Compile with these options, and with those of `printing` that the compiler knows: it refuses others at once.

    One that is older than an option writes only what the option asks for.
    """
    try:
        lowered.compile(compiler_options=options | printing)
    except jax.errors.JaxRuntimeError as error:
        unknown = re.search(r"No such compile option: '(\w+)'", str(error))
        if unknown is None or unknown[1] not in printing:
            raise
        _compile_printing(lowered, options, {name: x for name, x in printing.items() if name != unknown[1]})


def _read(folder: Path, kind: str) -> tuple[str, Memory] | None:
    """The program and its memory, once both are written to their ends: the entry computation comes last."""
    program = next(folder.glob(PROGRAM[kind]), None)
    if program is None or not any(folder.glob(LAST[kind])):
        return None
    text = program.read_text()
    entry = text.rfind("\nENTRY ")
    if entry < 0 or not text[entry:].rstrip().endswith("\n}"):
        return None
    stem = program.name.partition("after_optimizations")[0]
    memory = read_memory((folder / f"{stem}after_optimizations-buffer-assignment.txt").read_text())
    return (text, memory) if (memory.arguments or memory.outputs) and memory.temporaries else None


def read_memory(assignment: str) -> Memory:
    """What the text of a buffer assignment says; only newer compilers give an allocation a page."""
    sizes = dict.fromkeys(Memory._fields, 0)
    allocation = r"^allocation \d+: size (\d+), (?:color (\d+), )?(?:page \d+, )?(.*)$"
    for size, color, use in re.findall(allocation, assignment, re.M):
        if color == HOST and "preallocated-temp" in use:
            sizes["host"] += int(size)
        elif not color:
            kind = ("arguments" if use.startswith("parameter ") else "temporaries" if "preallocated-temp" in use else
                    "outputs" if "maybe-live-out" in use else None)  # fmt: skip
            if kind:
                sizes[kind] += int(size)
    return Memory(**sizes)
