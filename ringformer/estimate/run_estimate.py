"""Estimates of a whole run: each of its device programs, and the host memory that saves need."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.program_estimate import Estimate
from ringformer.estimate.programs import PROGRAMS, TRAIN_STEP
from ringformer.estimate.seconds.kernel_cycles import with_machine_code, with_tried_kernels
from ringformer.estimate.workload import Workload
from ringformer.hardware import GiB


@dataclass(frozen=True)
class RunEstimate:
    """The estimates of a run's programs (the train step's first) and the verdict that follows from them."""

    programs: tuple[Estimate, ...]

    @property
    def step(self) -> Estimate:
        return self.programs[0]

    def peak_bytes(self, program: Estimate) -> int:
        """Bytes on a device while this program runs, assuming that the machine code of the others stays loaded."""
        return program.peak_bytes + sum(p.code_bytes or 0 for p in self.programs if p is not program)

    def fits(self, program: Estimate) -> bool:
        """Return True if a program fits beside everything else that is alive and loaded."""
        loaded = self.peak_bytes(program) - program.peak_bytes
        return program.fits and (not loaded or self.peak_bytes(program) <= program.budget)

    @property
    def untried_kernels(self) -> bool:
        """True if one of the programs has kernels that no compiler has accepted yet."""
        return any(p.untried_kernels for p in self.programs)

    @property
    def reasons_against(self) -> list[str]:
        """Programs that need more memory than a device has, and a save that needs more than a host has, with the
        excess; empty if the run fits."""
        reasons = []
        for p in self.programs:
            if not self.fits(p):
                need = self.peak_bytes(p)
                reasons.append(
                    f"{p.program} needs {need / GiB:.2f} of {p.budget / GiB:.2f} GiB on each device, "
                    f"{(need - p.budget) / GiB:.2f} too much"
                )
        if not self.step.fits_host:
            host, usual = self.step.save_host_bytes / GiB, self.step.usual_host_bytes / GiB
            what = "offloaded activations and a save" if self.step.host_bytes else "a save"
            reasons.append(f"the host needs {host:.1f} GiB per device for {what}, a usual one has {usual:.1f}")
        return reasons


def compile_others(workload: Workload, *, generate_code: bool = False) -> Iterator[Estimate]:
    """Estimate every program of a run except the train step, one after the other. Raises as `compile_apart`."""
    for program in PROGRAMS[1:]:
        yield with_tried_kernels(workload, compile_apart(workload, program, generate_code=generate_code))


@dataclass(frozen=True)
class RunCompiler:
    """The compiler of whole runs that plans use; it remembers every schedule."""

    log: Callable[[str], None]
    generate_code: bool
    """True: compile runs that fit to machine code, and compare plans by the seconds of that code."""
    thorough: bool = True
    """True: plans also compile the neighbours of the first workload that fits; False during a search."""
    _scheduled: dict[tuple[Workload, str], Estimate] = field(default_factory=dict)

    def scheduled(self, workload: Workload, program: str = TRAIN_STEP) -> Estimate:
        """Return a program's estimate by its schedule. Raises as `compile_apart`."""
        key = workload, program
        if key not in self._scheduled:
            self._scheduled[key] = with_tried_kernels(workload, compile_apart(workload, program))
        return self._scheduled[key]

    def timed(self, workload: Workload) -> Estimate:
        """Return the train step's estimate with the seconds that plans compare: by machine code if it is generated."""
        step = self.scheduled(workload)
        if not (self.thorough and self.generate_code and step.fits):
            return step
        key = workload, "timed"
        if key not in self._scheduled:
            self._scheduled[key] = with_machine_code(workload, step, self.log)
        return self._scheduled[key]

    def run(self, workload: Workload) -> RunEstimate:
        """Compile every program of a run. Raises as `compile_apart`."""
        run = RunEstimate(tuple(self.scheduled(workload, program) for program in PROGRAMS))
        if run.reasons_against or not self.generate_code:
            return run
        self.log("  fits; generating the machine code of its programs, which takes minutes")
        return RunEstimate(tuple(compile_apart(workload, program, generate_code=True) for program in PROGRAMS))
