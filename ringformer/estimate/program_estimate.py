"""What one program of a run takes on a device of its target, from what the compiler said of it."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from ringformer.estimate.compiler.dump import Compiled, CompilerFailure
from ringformer.estimate.compiler.peak_buffers import PeakBuffers
from ringformer.estimate.inference.workload import INFERENCE
from ringformer.estimate.programs import EVALUATION, TRAIN_STEP
from ringformer.estimate.seconds.overlap import Schedule, read_schedule
from ringformer.estimate.seconds.program_seconds import Rates
from ringformer.estimate.targets import Target

NOT_TRIED = "if its kernels compile, which was not tried"
_KERNEL = re.compile(r"flash_(forward|backward)_\d+_whole_")


class Surroundings(NamedTuple):
    """What is known of a program before it is compiled."""

    program: str
    """One of `PROGRAMS` or of `INFERENCE`."""
    rates: Rates
    max_link_hops: int | None
    state: int
    """Bytes of the run's state on a device."""
    alive: int
    """Bytes of what else lies on a device while the program runs."""


@dataclass(frozen=True)
class Estimate:
    """What one program takes on one device of a target, compiled: bytes, FLOPs, communication. None: nobody said."""

    fits: bool
    peak_bytes: int
    """Arguments, results, temporaries, the machine code if there is any, and what else is alive meanwhile."""
    hbm_bytes: int
    budget: float
    """What of that a program may take."""
    host_bytes: int
    """Host memory per device, for offloaded activations."""
    usual_host_bytes: int
    """What a host of the target usually has for each device."""
    argument_bytes: int | None
    temp_bytes: int | None
    schedule: Schedule | None
    """Of the train step, the evaluation and the programs of inference; None if the compiler gave up on memory before it
    had one."""
    max_link_hops: int | None
    compile_seconds: float | None
    program: str = TRAIN_STEP
    alive_bytes: int = 0
    """What else is alive while the program runs, for example the optimizer's state beside an evaluation."""
    state_bytes: int = 0
    """The run's state, which a save copies to the host."""
    generated_code: bool = False
    """Whether the compiler went on to machine code; its verdict, the memory and the schedule come before that."""
    untried_kernels: bool = False
    """Whether it has TPU kernels of ours of which nobody knows yet that they become machine code, whatever fits."""
    code_bytes: int | None = None
    """Of the machine code on the device; GPU compilers do not say."""
    own_machine_code: bool = False
    """Whether the seconds of the schedule are by this program's own machine code."""
    by_parts: Schedule | None = None
    """If they are: the schedule with the cycles of parts compiled alone, to be held against it."""
    largest: str = ""
    """What the compiler lists as the largest allocations, where it does not fit."""
    peak_buffers: PeakBuffers | None = None
    """What is alive at the peak, where it fits."""
    text: str = field(default="", repr=False, compare=False)
    """The scheduled program."""

    @property
    def verdict(self) -> str:
        """On its memory, and what was not tried."""
        if not self.fits:
            return "DOES NOT FIT"
        return f"SHOULD FIT, {NOT_TRIED}" if self.untried_kernels else "FITS"

    @property
    def save_host_bytes(self) -> int:
        """Host memory per device while a save is being written: the state's copy, beside offloaded activations."""
        return self.host_bytes + self.state_bytes

    @property
    def fits_host(self) -> bool:
        return self.save_host_bytes <= self.usual_host_bytes


def read_estimate(compiled: Compiled, around: Surroundings, target: Target, seconds: float) -> Estimate:
    """The estimate of a program that the compiler accepted. On TPU it compared arguments, results and temporaries with
    the memory; what it does not know of is compared here."""
    memory = compiled.memory
    own = memory.arguments + memory.outputs + memory.temporaries
    more = around.alive + (compiled.code_bytes or 0)
    has_schedule = around.program in (TRAIN_STEP, EVALUATION, *INFERENCE)
    return Estimate(
        fits=own + more <= target.budget or (target.chip.kind == "tpu" and not more),
        peak_bytes=own + more,
        hbm_bytes=target.chip.hbm_bytes,
        budget=target.budget,
        host_bytes=memory.host,
        usual_host_bytes=target.chip.host_bytes,
        argument_bytes=memory.arguments,
        temp_bytes=memory.temporaries,
        schedule=read_schedule(compiled.program, around.rates, compiled.cycles) if has_schedule else None,
        max_link_hops=around.max_link_hops,
        compile_seconds=seconds,
        program=around.program,
        alive_bytes=around.alive,
        state_bytes=around.state,
        generated_code=compiled.generated_code,
        untried_kernels=not compiled.generated_code and _KERNEL.search(compiled.program) is not None,
        code_bytes=compiled.code_bytes,
        peak_buffers=compiled.peak_buffers,
        own_machine_code=bool(compiled.cycles),
        text=compiled.program,
    )


def read_refusal(message: str, around: Surroundings, target: Target, seconds: float) -> Estimate:
    """The estimate of a program that is too large, by the compiler's error; raises CompilerFailure for another one."""
    size = r"\(?([\d.]+)([KMGT])\)?"
    used = re.search(rf"Used {size} of {size} hbm", message)
    used = used or re.search(rf"required for HLO temporaries {size} exceeds available HBM {size}", message)
    if used is None:
        raise CompilerFailure(f"{around.program}: {message[:2000]}")
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    needed, available = int(float(used[1]) * units[used[2]]), int(float(used[3]) * units[used[4]])
    allocations = message.partition("Largest program allocations in hbm:")[2]
    return Estimate(
        fits=False,
        peak_bytes=needed + around.alive,
        hbm_bytes=available,
        budget=target.budget,
        host_bytes=0,
        usual_host_bytes=target.chip.host_bytes,
        argument_bytes=0,
        temp_bytes=needed,
        schedule=None,
        max_link_hops=around.max_link_hops,
        compile_seconds=seconds,
        program=around.program,
        alive_bytes=around.alive,
        state_bytes=around.state,
        largest=allocations.strip(),
    )
