"""What a whole run takes: each of its device programs, and the host memory of its saves."""

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
    """The estimates of a run's programs, the train step's first, and what follows from them."""

    programs: tuple[Estimate, ...]

    @property
    def step(self) -> Estimate:
        return self.programs[0]

    def peak_bytes(self, program: Estimate) -> int:
        """Bytes of a device while this program runs; the machine code of the others is taken to stay loaded."""
        return program.peak_bytes + sum(p.code_bytes or 0 for p in self.programs if p is not program)

    def fits(self, program: Estimate) -> bool:
        """Whether a program fits beside all that is alive and loaded."""
        loaded = self.peak_bytes(program) - program.peak_bytes
        return program.fits and (not loaded or self.peak_bytes(program) <= program.budget)

    @property
    def untried_kernels(self) -> bool:
        """Whether one of its programs has kernels of which nobody knows yet that they compile."""
        return any(p.untried_kernels for p in self.programs)

    @property
    def reasons_against(self) -> list[str]:
        """Which programs need more memory than a device has, or a save more than a host, and by how much; none if the
        run fits."""
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
            reasons.append(f"the host needs {host:.1f} GiB a device for {what}, a usual one has {usual:.1f}")
        return reasons


def compile_others(workload: Workload, *, generate_code: bool = False) -> Iterator[Estimate]:
    """Estimate every program of a run but the train step, one after the other. Raises as `compile_apart`."""
    for program in PROGRAMS[1:]:
        yield with_tried_kernels(workload, compile_apart(workload, program, generate_code=generate_code))


@dataclass(frozen=True)
class RunCompiler:
    """The compiler of whole runs, as plans ask it; what it scheduled once it remembers."""

    log: Callable[[str], None]
    generate_code: bool
    """Whether runs that fit are compiled to machine code, and plans compare the seconds that it says."""
    thorough: bool = True
    """Whether plans compile the neighbours of what fits; not while they search."""
    _scheduled: dict[tuple[Workload, str], Estimate] = field(default_factory=dict)

    def scheduled(self, workload: Workload, program: str = TRAIN_STEP) -> Estimate:
        """A program's estimate when it is scheduled. Raises as `compile_apart`."""
        key = workload, program
        if key not in self._scheduled:
            self._scheduled[key] = with_tried_kernels(workload, compile_apart(workload, program))
        return self._scheduled[key]

    def timed(self, workload: Workload) -> Estimate:
        """The train step's, with the seconds that plans compare: by machine code where runs are compiled to it."""
        step = self.scheduled(workload)
        if not (self.thorough and self.generate_code and step.fits):
            return step
        key = workload, "timed"
        if key not in self._scheduled:
            self._scheduled[key] = with_machine_code(workload, step, self.log)
        return self._scheduled[key]

    def run(self, workload: Workload) -> RunEstimate:
        """Every program of a run. Raises as `compile_apart`."""
        run = RunEstimate(tuple(self.scheduled(workload, program) for program in PROGRAMS))
        if run.reasons_against or not self.generate_code:
            return run
        self.log("  fits; generating the machine code of its programs: minutes")
        return RunEstimate(tuple(compile_apart(workload, program, generate_code=True) for program in PROGRAMS))
