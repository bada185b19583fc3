"""Waits of a GPU for its host in the middle of a step.

XLA runs a loop with a known trip count entirely from the device's queue. For any other loop, and for a branch, the host
reads the predicate back before it can launch what follows: once before each iteration, once for each branch taken.
(TPUs decide on the chip.)
"""

from ringformer.estimate.compiler.program_text import Program
from ringformer.estimate.seconds.program_seconds import purpose


def host_waits(program: Program) -> dict[str, float]:
    """Upper bound of the number of waits in one run of a GPU's program, by purpose.

    A loop whose trip count depends on data counts with its bound, and every branch counts as reached.
    """
    counts: dict[str, float] = {}
    for name, times in program.executed.items():
        for instruction in program.computations[name].values():
            if instruction.opcode == "conditional":
                waits = 1
            elif instruction.opcode == "while" and "known_trip_count" not in instruction.text:
                waits = program.trip_count(name, instruction) + 1  # also after the last iteration
            else:
                continue
            counts[purpose(instruction)] = counts.get(purpose(instruction), 0.0) + times * waits
    return counts
