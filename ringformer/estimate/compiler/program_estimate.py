"""Estimates of one program of a run on a device of its target, based on what the compiler reported."""

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ringformer.estimate.compiled.dump import Compiled, CompilerFailure
from ringformer.estimate.compiled.peak_buffers import PeakBuffers
from ringformer.estimate.seconds.overlap import Schedule, read_schedule
from ringformer.estimate.seconds.program_seconds import Rates
from ringformer.estimate.workloads.inference import INFERENCE
from ringformer.estimate.workloads.programs import EVALUATION, TRAIN_STEP
from ringformer.estimate.workloads.targets import Target

_KERNEL = re.compile(r"flash_(forward|backward)_\d+_whole_")


def fitting(untried_kernels: bool) -> str:
    """Return the verdict on a program or a run that fits; it mentions kernels that no compiler has tried yet."""
    return "SHOULD FIT, if its kernels compile, which was not tried" if untried_kernels else "FITS"


class Surroundings(NamedTuple):
    """Facts about a program that are known before it is compiled."""

    program: str
    """A name in `PROGRAMS` or `INFERENCE`."""
    rates: Rates
    max_link_hops: int | None
    state_bytes: int
    """Bytes of a device's shards of the training state."""
    alive_bytes: int
    """Bytes of everything else on a device while the program runs."""
    state_in_host_bytes: int = 0
    """Part of the state's bytes that is in host memory instead."""


@dataclass(frozen=True)
class Estimate:
    """Bytes, FLOPs and communication of one program on one device of a target. None: the compiler did not report it."""

    fits: bool
    peak_bytes: int
    """Bytes at the peak: arguments, results, temporaries, machine code if there is any, and everything else alive at
    that time."""
    hbm_bytes: int
    budget: float
    """Bytes of device memory that a program may use."""
    host_bytes: int
    """Host memory per device for offloaded activations and the offloaded part of the state."""
    usual_host_bytes: int
    """Host memory per device on a usual host of the target."""
    argument_bytes: int | None = None
    temp_bytes: int | None = None
    schedule: Schedule | None = None
    """Schedule of a train step, an evaluation or a program of inference; None if the program exceeded the memory before
    it was scheduled."""
    max_link_hops: int | None = None
    compile_seconds: float | None = None
    program: str = TRAIN_STEP
    alive_bytes: int = 0
    """Bytes of everything else alive while the program runs, such as the optimizer's state during an evaluation."""
    state_bytes: int = 0
    """Bytes of the training state, which a save copies to the host."""
    generated_code: bool = False
    """True if the compiler generated machine code; verdict, memory and schedule are known before that."""
    untried_kernels: bool = False
    """True if the program has this package's TPU kernels and no compiler has turned them into machine code yet."""
    code_bytes: int | None = None
    """Bytes of machine code on the device; GPU compilers do not report it."""
    own_machine_code: bool = False
    """True if the schedule's seconds are based on this program's own machine code."""
    by_parts: Schedule | None = None
    """Schedule with the cycles of parts that were compiled alone, to compare with the program's own machine code."""
    largest: str = ""
    """Largest allocations as listed by the compiler, if the program does not fit."""
    peak_buffers: PeakBuffers | None = None
    """Buffers alive at the peak, if the program fits."""
    text: str = field(default="", repr=False, compare=False)
    """Text of the scheduled program."""

    @property
    def verdict(self) -> str:
        """The verdict on the program's memory, which mentions kernels that were not tried."""
        return fitting(self.untried_kernels) if self.fits else "DOES NOT FIT"

    @property
    def save_host_bytes(self) -> int:
        """Host memory per device during a save: a copy of the state beside what is offloaded."""
        return self.host_bytes + self.state_bytes

    @property
    def fits_host(self) -> bool:
        return self.save_host_bytes <= self.usual_host_bytes


def read_estimate(compiled: Compiled, around: Surroundings, target: Target, seconds: float) -> Estimate:
    """Return the estimate of a program that the compiler accepted. The TPU compiler has checked arguments, results and
    temporaries against the memory; this adds the machine code and the arrays that the compiler does not know about."""
    memory = compiled.memory
    own = memory.arguments + memory.outputs + memory.temporaries
    more = around.alive_bytes + (compiled.code_bytes or 0)
    schedule = None
    if around.program in (TRAIN_STEP, EVALUATION, *INFERENCE):
        schedule = read_schedule(compiled.program, around.rates, compiled.cycles)
    return Estimate(
        fits=own + more <= target.budget or (target.chip.kind == "tpu" and not more),
        peak_bytes=own + more,
        hbm_bytes=target.chip.hbm_bytes,
        host_bytes=memory.host + around.state_in_host_bytes,
        argument_bytes=memory.arguments,
        temp_bytes=memory.temporaries,
        schedule=schedule,
        generated_code=compiled.generated_code,
        untried_kernels=not compiled.generated_code and _KERNEL.search(compiled.program) is not None,
        code_bytes=compiled.code_bytes,
        peak_buffers=compiled.peak_buffers,
        own_machine_code=bool(compiled.cycles),
        text=compiled.program,
        **_common(around, target, seconds),
    )


def read_refusal(message: str, around: Surroundings, target: Target, seconds: float) -> Estimate:
    """Return the estimate of a program that does not fit, read from the compiler's error; raises CompilerFailure for
    other errors."""
    size = r"\(?([\d.]+)([KMGT])\)?"
    used = re.search(rf"Used {size} of {size} hbm", message)
    used = used or re.search(rf"required for HLO temporaries {size} exceeds available HBM {size}", message)
    if used is None:
        raise CompilerFailure(f"{around.program}: {message[:2000]}")
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    needed = int(float(used[1]) * units[used[2]])
    available = int(float(used[3]) * units[used[4]])
    allocations = message.partition("Largest program allocations in hbm:")[2]
    return Estimate(
        fits=False,
        peak_bytes=needed + around.alive_bytes,
        hbm_bytes=available,
        host_bytes=around.state_in_host_bytes,
        argument_bytes=0,
        temp_bytes=needed,
        largest=allocations.strip(),
        **_common(around, target, seconds),
    )


def _common(around: Surroundings, target: Target, seconds: float) -> dict[str, Any]:
    """Fields of an estimate that do not depend on the compiler's answer."""
    common = around._asdict() | {"budget": target.budget, "usual_host_bytes": target.host_bytes}
    del common["rates"], common["state_in_host_bytes"]
    return common | {"compile_seconds": seconds}
