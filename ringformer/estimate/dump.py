"""A program as its compiler has scheduled it and placed its buffers, read from what XLA dumps before it generates code.

Whether the program fits, what it holds and what it overlaps is decided there. On TPU nine tenths of a compilation
still lie ahead then: machine code, which an estimate does not need.
"""

import re
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import jax

ACCEPTED = {"tpu": "*after_optimizations_after_buffer_assignment.txt", "gpu": "*gpu_after_optimizations.txt"}
"""The dump of the scheduled program. The TPU compiler writes this one only of a program that it found to fit."""

AS_COMPILED_PROGRAMS_PRINT = {"xla_dump_compact_gte": False, "xla_syntax_sugar_async_ops": True}
"""How a dump writes the same text as `jax.stages.Compiled.as_text`."""

HOST = "5"
"""The number ("color") of host memory in a buffer assignment; that of the device is not printed."""


class Memory(NamedTuple):
    """Bytes of one device."""

    arguments: int
    outputs: int
    """Those that take the place of no argument."""
    temporaries: int
    host: int
    """Of temporaries in host memory."""


def compile_until_scheduled(lowered: jax.stages.Lowered, options: dict, kind: str) -> tuple[str, Memory]:
    """The text of the scheduled program, and what it holds, for a target of this kind ("tpu" or "gpu").

    The compiler cannot be stopped: it goes on in a thread that nobody waits for. Call this in a process that ends.
    Raises what the compiler raises, RuntimeError if it dumped nothing.
    """
    failures = []

    def compile_on():
        try:
            lowered.compile(compiler_options=options | AS_COMPILED_PROGRAMS_PRINT | {"xla_dump_to": folder})
        except Exception as error:
            failures.append(error)

    with tempfile.TemporaryDirectory(prefix="ringformer-", ignore_cleanup_errors=True) as folder:
        compiler = threading.Thread(target=compile_on, daemon=True)
        compiler.start()
        program = None
        while program is None and compiler.is_alive():
            compiler.join(timeout=0.2)
            program = _complete_program(Path(folder), kind)
        if program is None:
            if failures:
                raise failures[0]
            raise RuntimeError(f"the compiler dumped no {ACCEPTED[kind]}; compile with its code: --generate_code")
        return program, read_memory(next(Path(folder).glob("*after_optimizations-buffer-assignment.txt")).read_text())


def _complete_program(folder: Path, kind: str) -> str | None:
    """The dump, once it is written to its end: the entry computation comes last."""
    for path in folder.glob(ACCEPTED[kind]):
        text = path.read_text()
        entry = text.rfind("\nENTRY ")
        if entry >= 0 and text[entry:].rstrip().endswith("\n}"):
            return text
    return None


def read_memory(assignment: str) -> Memory:
    """What the text of a buffer assignment says."""
    sizes = dict.fromkeys(Memory._fields, 0)
    for size, color, use in re.findall(r"^allocation \d+: size (\d+), (?:color (\d+), )?(.*)$", assignment, re.M):
        if color == HOST and "preallocated-temp" in use:
            sizes["host"] += int(size)
        elif not color:
            kind = ("arguments" if ", parameter " in use else "temporaries" if "preallocated-temp" in use else
                    "outputs" if "maybe-live-out" in use else None)  # fmt: skip
            if kind:
                sizes[kind] += int(size)
    return Memory(**sizes)
