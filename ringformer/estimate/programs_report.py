"""Reports on the programs of a run: JSON objects and text with the verdict on the run."""

from ringformer.estimate.closed_forms import host_bytes, state_bytes
from ringformer.estimate.program_estimate import NOT_TRIED, Estimate
from ringformer.estimate.report import fields
from ringformer.estimate.run_estimate import RunEstimate
from ringformer.estimate.workload import Workload
from ringformer.hardware import GiB


def programs_json(run: RunEstimate) -> dict:
    """Return whether the whole run fits, and the bytes per device of each of its programs."""
    return {
        "fits": not run.reasons_against,
        "reasons_against": run.reasons_against,
        "save_host_bytes": run.step.save_host_bytes,
        "programs": [
            {
                "program": p.program,
                "fits": run.fits(p),
                "peak_bytes": run.peak_bytes(p),
                **fields(p, "argument_bytes", "temp_bytes", "alive_bytes", "code_bytes"),
                **fields(p, "generated_code", "untried_kernels"),
                "compile_seconds": p.compile_seconds and round(p.compile_seconds, 1),
            }
            for p in run.programs
        ],
    }


def programs_text(run: RunEstimate) -> str:
    """Return the verdict on each program, the memory that saving needs, and the verdict on the run."""
    lines = [f"  the programs of a run, {how_far(run)}:", *(f"    {_program_line(run, p)}" for p in run.programs)]
    lines += [f"  {save_line(run.step)}", f"  {verdict_line(run)}"]
    return "\n".join(lines)


def save_closed_form(workload: Workload) -> str:
    """Return what closed forms show about the run beyond the train step's device memory, and what they do not show."""
    host, usual = host_bytes(workload) + state_bytes(workload), workload.target.chip.host_bytes
    verdict = "should fit" if host <= usual else "should not fit"
    return (
        f"  a save beside offloaded activations: {verdict}, {host / GiB:.1f} of {usual / GiB:.0f} GiB of host memory "
        "per device\n"
        "  not checked without the compiler: evaluation, init, machine code; by count they need less than a train step"
    )


def verdict_line(run: RunEstimate) -> str:
    """Return the verdict on the run: that it fits, or what does not fit and by how much."""
    if reasons := run.reasons_against:
        return f"DOES NOT FIT: {'; '.join(reasons)}"
    verdict = f"SHOULD FIT, {NOT_TRIED}" if run.untried_kernels else "FITS"
    return f"{verdict}: every program of the run and its saves, {how_far(run)}"


def how_far(run: RunEstimate) -> str:
    """Describe how far the compiler went with the programs."""
    if not run.step.fits:
        return "not scheduled: too large"
    generated = all(p.generated_code for p in run.programs)
    return "compiled to machine code" if generated else "scheduled; machine code not tried"


def save_line(step: Estimate) -> str:
    """Describe the host memory that a save needs; saving and restoring run no program."""
    beside = f" beside {step.host_bytes / GiB:.2f} GiB of offloaded activations" if step.host_bytes else ""
    return (
        f"save, restore and init_from run no program; a save copies {step.state_bytes / GiB:.2f} GiB per device to "
        f"the host{beside}; a usual host has {step.usual_host_bytes / GiB:.0f} GiB"
    )


def _program_line(run: RunEstimate, p: Estimate) -> str:
    code = f", {p.code_bytes / 2**20:,.1f} MiB of code" if p.code_bytes is not None else ""
    alive = f", {p.alive_bytes / GiB:.2f} GiB alive beside it" if p.alive_bytes >= 0.005 * GiB else ""
    verdict = ("should fit" if p.untried_kernels else "fits") if run.fits(p) else "DOES NOT FIT"
    peak = run.peak_bytes(p) / GiB
    return f"{p.program:17}{verdict}, {peak:.2f} of {p.hbm_bytes / GiB:.2f} GiB{alive}{code}"
