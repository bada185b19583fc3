"""Where a GPU waits for its host in the middle of a step.

XLA runs a loop whose trip count it knows from the device's queue alone. Of any other loop, and of a branch, the host
reads the predicate back before it can launch what follows: once before each turn, once for each branch taken. (TPUs
decide on the chip.)
"""

from ringformer.estimate.compiler.program_text import Program
from ringformer.estimate.seconds.program_seconds import purpose


def host_waits(program: Program) -> dict[str, float]:
    """How often at most the host is waited for in one run of a GPU's program, by what the loops and branches are for.

    At most: a loop whose trip count is data is counted with its bound, and every branch as if it were reached.
    """
    counts: dict[str, float] = {}
    for name, times in program.executed.items():
        for instruction in program.computations[name].values():
            if instruction.opcode == "conditional":
                waits = 1
            elif instruction.opcode == "while" and "known_trip_count" not in instruction.text:
                waits = program.trip_count(name, instruction) + 1  # after the last turn too
            else:
                continue
            counts[purpose(instruction)] = counts.get(purpose(instruction), 0.0) + times * waits
    return counts
