"""Slots of a TPU core that a whole compiled program uses, each instruction counted as often as it runs."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ringformer.estimate.compiler.program_text import Instruction, Program
from ringformer.estimate.kernels.slot_use import SlotUse, read_slot_use
from ringformer.estimate.seconds.kernel_keys import KernelKeys
from ringformer.estimate.seconds.machine_code import dumped_kernels, grid_of
from ringformer.estimate.seconds.memory_traffic import hbm_bytes

NOTHING = SlotUse(0.0, {}, 0.0, 0.0, 0.0, 0.0)


def one_after_the_other(uses: Iterable[SlotUse]) -> SlotUse:
    """Add up uses; on-chip memory is the maximum."""
    total = NOTHING
    for use in uses:
        cycles = total.cycles + use.cycles
        units = {
            unit: (total.cycles * total.units.get(unit, 0.0) + use.cycles * use.units.get(unit, 0.0)) / cycles
            for unit in {**total.units, **use.units}
        }
        total = SlotUse(
            cycles,
            units,
            total.fills + use.fills,
            total.spills + use.spills,
            total.hbm_bytes + use.hbm_bytes,
            max(total.vmem_bytes, use.vmem_bytes),
        )
    return total


def times(use: SlotUse, count: float) -> SlotUse:
    """Multiply a use by a count, which may be a fraction."""
    return use._replace(
        cycles=use.cycles * count, fills=use.fills * count, spills=use.spills * count, hbm_bytes=use.hbm_bytes * count
    )


@dataclass(frozen=True)
class ProgramSlots:
    """Slots used by a program's computations, from a finished dump with `detailed_dump_flags`."""

    program: Program
    folder: Path
    generation: str
    _uses: dict[str, SlotUse] = field(default_factory=dict)

    @cached_property
    def _keys(self) -> KernelKeys:
        return KernelKeys(self.program)

    @cached_property
    def _names(self) -> dict[str, str]:
        """Instruction whose machine code was dumped, by key; the compiler dumps equal instructions once."""
        dump = dumped_kernels(self.folder)
        return {key: i.name for _, i, key in self._keys.kernels() if i.name in dump}

    def of_computation(self, name: str) -> SlotUse:
        """Use of one run of a computation and everything it calls; of a conditional's branches, the longest counts."""
        if name not in self._uses:
            here = self.program.computations[name].values()
            self._uses[name] = one_after_the_other(self.of_instruction(name, i) for i in here)
        return self._uses[name]

    def of_instruction(self, computation: str, instruction: Instruction) -> SlotUse:
        """Use of one run of an instruction; an instruction without machine code of its own only moves bytes."""
        if instruction.opcode == "while":
            turns = self.program.trip_count(computation, instruction)
            return times(self.of_computation(instruction.called[0]), turns)
        if instruction.opcode == "conditional":
            return max(map(self.of_computation, instruction.called), key=lambda use: use.cycles)
        if instruction.opcode == "call" and not instruction.collective:
            return self.of_computation(instruction.called[0])
        moved = hbm_bytes(self.program, computation, instruction)
        if name := self._names.get(self._keys.key(computation, instruction)):
            return read_slot_use(self.folder, name, self.generation, grid_of(name))._replace(hbm_bytes=moved)
        return NOTHING._replace(hbm_bytes=moved)
