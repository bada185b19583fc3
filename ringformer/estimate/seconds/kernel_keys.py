"""Keys of machine code: instructions with equal keys have equal code.

The compiler generates code for an instruction from its opcode, the computation that it fuses, and the types of its
operands and results with their layouts and memory spaces. Names and metadata do not matter; the compiler reuses code by
the same rule. So the cycles of an instruction can be read from any other program that has the same instruction.
"""

import base64
import hashlib
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from ringformer.estimate.compiled.program_text import Instruction, Program

_METADATA = re.compile(r", (metadata=\{[^}]*\}|backend_config=.*$|frontend_attributes=\{[^}]*\})|/\*index=\d+\*/")


KERNEL_OPCODES = ("fusion", "convolution", "custom-call", "copy", "reduce", "dynamic-slice", "dynamic-update-slice")
"""Opcodes of instructions that have machine code of their own."""


@dataclass(frozen=True)
class KernelKeys:
    """Keys of a program's instructions."""

    program: Program
    _texts: dict[str, str] = field(default_factory=dict)

    def kernels(self) -> Iterator[tuple[str, Instruction, str]]:
        """Yield every executed instruction that has machine code of its own, as (computation, instruction, key)."""
        for name, instruction, _ in self.program.executed_instructions:
            if instruction.opcode in KERNEL_OPCODES:
                yield name, instruction, self.key(name, instruction)

    def named(self, names: Container[str]) -> dict[str, str]:
        """Return those of these names whose instructions have machine code of their own, by key."""
        by_key = {}
        for _, instruction, key in self.kernels():
            if instruction.name in names:
                by_key[key] = instruction.name
        return by_key

    def key(self, computation: str, instruction: Instruction) -> str:
        """Return a hash of everything that determines the machine code of an instruction of this computation."""
        if body := instruction.search(r'"body":"([^"]+)"'):
            return hashlib.sha256(_kernel_program(body).encode()).hexdigest()[:20]
        here = self.program.computations[computation]
        operands = []
        for name in instruction.operands:
            operands.append(here[name].type if name in here else name)
        attributes = _without_names(instruction, {}).partition("(")[2]
        words = [instruction.opcode, instruction.type, *operands, attributes, *map(self._text, instruction.called)]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:20]

    def _text(self, computation: str) -> str:
        """Return a hash of a computation's instructions, in which each value is named by its position."""
        if computation not in self._texts:
            instructions = self.program.computations[computation].values()
            places = {instruction.name: f"%{place}" for place, instruction in enumerate(instructions)}
            lines = []
            for instruction in instructions:
                called = "".join(map(self._text, instruction.called))
                lines.append(_without_names(instruction, places) + called)
            self._texts[computation] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return self._texts[computation]


def _kernel_program(body: str) -> str:
    """Return the program of a Pallas kernel for TPU, from the bytecode in its instruction, without source locations."""
    # JAX has no public parser of Mosaic's dialect; only programs with kernels need one.
    from jax._src.lib import tpu  # type: ignore[attr-defined]
    from jax._src.lib.mlir import ir  # type: ignore[attr-defined]

    with ir.Context() as context:
        tpu.register_dialect(context)
        context.load_all_available_dialects()
        context.allow_unregistered_dialects = True
        return str(ir.Module.parse(base64.b64decode(body)).operation.get_asm(enable_debug_info=False))


def _without_names(instruction: Instruction, places: dict[str, str]) -> str:
    """Return an instruction's text with values named by their `places`, without the names of computations it calls."""
    text = _METADATA.sub("", instruction.text.strip())
    for called in instruction.called:
        text = text.replace(f"%{called}", "")
    return re.sub(r"%([\w.\-]+)", lambda name: places.get(name[1], ""), text)
