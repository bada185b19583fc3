"""Estimate of a whole run, and its report: each of the run's device programs, and the host memory that saves need."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.compiler.program_estimate import Estimate, fitting
from ringformer.estimate.kernels.kernel_cycles import with_machine_code, with_tried_kernels
from ringformer.estimate.reports.report import fields
from ringformer.estimate.workloads.programs import PROGRAMS, TRAIN_STEP
from ringformer.estimate.workloads.training import Workload
from ringformer.hardware import GiB


@dataclass(frozen=True)
class RunEstimate:
    """The estimates of a run's programs (the train step's first) and the verdict that follows from them."""

    programs: tuple[Estimate, ...]

    @property
    def step(self) -> Estimate:
        return self.programs[0]

    def peak_bytes(self, program: Estimate) -> int:
        """Bytes on a device while this program runs, assuming that the machine code of the run's other programs stays
        loaded."""
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
        """Reasons why the run does not fit, with the excess: programs that need more memory than a device has, and a
        save that needs more than a host has. Empty if the run fits."""
        reasons = []
        for p in self.programs:
            if not self.fits(p):
                peak = self.peak_bytes(p)
                reasons.append(
                    f"{p.program} needs {peak / GiB:.2f} of {p.budget / GiB:.2f} GiB on each device, "
                    f"{(peak - p.budget) / GiB:.2f} too much"
                )
        if not self.step.fits_host:
            host = self.step.save_host_bytes / GiB
            usual = self.step.usual_host_bytes / GiB
            what = "what is offloaded and a save" if self.step.host_bytes else "a save"
            reasons.append(f"the host needs {host:.1f} GiB per device for {what}, and has {usual:.1f}")
        return reasons


def compile_others(workload: Workload, *, generate_code: bool = False) -> Iterator[Estimate]:
    """Estimate every program of a run except the train step, in order. Raises the errors of `compile_apart`."""
    for program in PROGRAMS[1:]:
        yield with_tried_kernels(workload, compile_apart(workload, program, generate_code=generate_code))


@dataclass(frozen=True)
class RunCompiler:
    """Compiler of whole runs, used by plans; it remembers every schedule."""

    log: Callable[[str], None]
    generate_code: bool
    """True: compile runs that fit to machine code, and compare plans by the seconds of that code."""
    thorough: bool = True
    """True: plans also compile the neighbours of the first workload that fits; False during a search."""
    _scheduled: dict[tuple[Workload, str], Estimate] = field(default_factory=dict)

    def scheduled(self, workload: Workload, program: str = TRAIN_STEP) -> Estimate:
        """Return a program's estimate by its schedule. Raises the errors of `compile_apart`."""
        return self._once((workload, program), lambda: with_tried_kernels(workload, compile_apart(workload, program)))

    def timed(self, workload: Workload) -> Estimate:
        """Return the train step's estimate with the seconds that plans compare: from machine code, if that is
        generated."""
        step = self.scheduled(workload)
        if not (self.thorough and self.generate_code and step.fits):
            return step
        return self._once((workload, "timed"), lambda: with_machine_code(workload, step, self.log))

    def _once(self, key: tuple[Workload, str], estimate: Callable[[], Estimate]) -> Estimate:
        if key not in self._scheduled:
            self._scheduled[key] = estimate()
        return self._scheduled[key]

    def run(self, workload: Workload) -> RunEstimate:
        """Compile every program of a run. Raises the errors of `compile_apart`."""
        run = RunEstimate(tuple(self.scheduled(workload, program) for program in PROGRAMS))
        if run.reasons_against or not self.generate_code:
            return run
        self.log("  fits; generating the machine code of its programs, which takes minutes")
        return RunEstimate(tuple(compile_apart(workload, program, generate_code=True) for program in PROGRAMS))


def programs_json(run: RunEstimate) -> dict[str, Any]:
    """Return whether the whole run fits, and the bytes per device of each of its programs."""
    return {
        "fits": not run.reasons_against,
        "reasons_against": run.reasons_against,
        "save_host_bytes": run.step.save_host_bytes,
        "programs": [_program_json(run, p) for p in run.programs],
    }


def _program_json(run: RunEstimate, p: Estimate) -> dict[str, Any]:
    return {
        "program": p.program,
        "fits": run.fits(p),
        "peak_bytes": run.peak_bytes(p),
        **fields(p, "argument_bytes", "temp_bytes", "alive_bytes", "code_bytes", "generated_code", "untried_kernels"),
        "compile_seconds": p.compile_seconds and round(p.compile_seconds, 1),
    }


def programs_text(run: RunEstimate) -> str:
    """Return the verdict on each program, the memory that saving needs, and the verdict on the run."""
    lines = [f"  the programs of a run, {how_far(run)}:"]
    for p in run.programs:
        lines.append(f"    {_program_line(run, p)}")
    lines += [f"  {save_line(run.step)}", f"  {verdict_line(run)}"]
    return "\n".join(lines)


def verdict_line(run: RunEstimate) -> str:
    """Return the verdict on the run: either that it fits, or which parts do not fit and by how much."""
    if reasons := run.reasons_against:
        return f"DOES NOT FIT: {'; '.join(reasons)}"
    return f"{fitting(run.untried_kernels)}: every program of the run and its saves, {how_far(run)}"


def how_far(run: RunEstimate) -> str:
    """Describe how far the compiler went with the programs."""
    if not run.step.fits:
        return "not scheduled: too large"
    if all(p.generated_code for p in run.programs):
        return "compiled to machine code"
    return "scheduled; machine code not tried"


def save_line(step: Estimate) -> str:
    """Describe the host memory that a save needs; saving and restoring run no program."""
    beside = f" beside {step.host_bytes / GiB:.2f} GiB that are offloaded" if step.host_bytes else ""
    return (
        f"save, restore and init_from run no program; a save copies {step.state_bytes / GiB:.2f} GiB per device to "
        f"the host{beside}; a host has {step.usual_host_bytes / GiB:.0f} GiB"
    )


def _program_line(run: RunEstimate, p: Estimate) -> str:
    verdict = "DOES NOT FIT"
    if run.fits(p):
        verdict = "should fit" if p.untried_kernels else "fits"
    line = f"{p.program:17}{verdict}, {run.peak_bytes(p) / GiB:.2f} of {p.hbm_bytes / GiB:.2f} GiB"
    if p.alive_bytes >= 0.005 * GiB:
        line += f", {p.alive_bytes / GiB:.2f} GiB alive beside it"
    if p.code_bytes is not None:
        line += f", {p.code_bytes / 2**20:,.1f} MiB of code"
    return line
