"""The paper's Table 4, as text on the page of tables and as the rows of its figure."""

from typing import Any

from benchmarks.paper_page.mfu_figure import Bar, Shares
from benchmarks.paper_page.text import seconds_by, with_compilers
from ringformer.estimate.seconds.program_seconds import ATTENTION
from ringformer.estimate.workloads.targets import find_target
from ringformer.hardware import GiB
from ringformer.paper.training_mfu import (
    BLOCKWISE,
    PAPER_MFU,
    RING,
    RUNS,
    SHORTER,
    Cell,
    Measured,
    Utilisation,
    cells,
    expected_mfu,
    utilisation,
)

KERNELS = {"xla": "XLA", "pallas": "Pallas", "cudnn": "cuDNN"}
DTYPES = {"float32": "float32", "bfloat16": "bf16"}


def rows(results: dict[str, dict[str, Any]], dtype: str) -> list[str]:
    """Return the rows of the table for one dtype of the computation."""
    of_dtype = []
    for cell in cells():
        if cell.variant.compute_dtype == dtype:
            of_dtype.append(_row(cell, results.get(cell.name, {})))
    return of_dtype


def executables(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return a row for each run: memory, settings, seconds and utilisation of the peak."""
    of_runs = []
    for cell in cells():
        runs = results.get(cell.name, {})
        used = _used(cell, runs, causal=True)
        for run in RUNS:
            if run in runs:
                of_runs.append((_executable(cell, run, runs[run], used), runs[run]))
    return with_compilers(of_runs)


def bars(results: dict[str, Any]) -> list[Bar]:
    """Return the rows of the figure: every cell with results."""
    of_cells = []
    for cell in cells():
        runs = results.get(cell.name)
        if runs is not None:
            c = cell.configuration
            dtype, kernel = cell.variant
            palm = shares(cell, runs, causal=False)
            causal = shares(cell, runs, causal=True)
            variant = f"{DTYPES[dtype]}, {KERNELS[kernel]}"
            of_cells.append(Bar(f"{c.target}  {c.size}  {c.contexts}", variant, palm, causal))
    return of_cells


def shares(cell: Cell, runs: dict[str, dict[str, Any]], *, causal: bool) -> Shares:
    """Return the MFU of a cell's runs that fit, and the MFU expected of the ring."""
    used = _used(cell, runs, causal=causal)
    ring = cell.workload(RING)
    expected = None if used is None else expected_mfu(ring.model, ring.seq_len, used, causal=causal)
    return Shares(_mfu(runs, BLOCKWISE, causal), expected, _mfu(runs, RING, causal))


def _mfu(runs: dict[str, dict[str, Any]], run: str, causal: bool) -> float | None:
    attempt = runs.get(run)
    if not attempt or not attempt["fits"]:
        return None
    return attempt["mfu_causal_model" if causal else "mfu_palm_model"]


def _used(cell: Cell, runs: dict[str, dict[str, Any]], *, causal: bool) -> Utilisation | None:
    """Return how well the baselines use the peak; None unless two of them fit."""
    measured = {}
    for run in (BLOCKWISE, SHORTER):
        mfu = _mfu(runs, run, causal)
        if mfu is not None:
            measured[runs[run]["seq_len"]] = Measured(mfu, _attention(runs[run]))
    if len(measured) < 2:
        return None
    return utilisation(cell.workload(BLOCKWISE).model, measured, causal=causal)


def _attention(attempt: dict[str, Any]) -> float:
    """Return the share of attention in a step's seconds."""
    spent = attempt["seconds_by_purpose"]
    attention = sum(seconds for purpose, seconds in spent.items() if purpose.startswith(ATTENTION))
    return attention / sum(spent.values())


def _row(cell: Cell, runs: dict[str, dict[str, Any]]) -> str:
    c = cell.configuration
    columns = []
    for causal in (False, True):
        three = shares(cell, runs, causal=causal)
        for share, run in zip(three, (BLOCKWISE, BLOCKWISE, RING), strict=True):
            columns.append("" if share is None else f"{share:.1%} {seconds_by(runs[run])}")
        for column, run in ((-3, BLOCKWISE), (-1, RING)):
            if run in runs and not runs[run]["fits"]:
                columns[column] = "does not fit"
    columns.insert(3, "{:.0%} to {:.0%}".format(*PAPER_MFU))
    return f"| {c.target} | {c.size} | {KERNELS[cell.variant.kernel]} | {c.contexts} | {' | '.join(columns)} |"


def _executable(cell: Cell, run: str, a: dict[str, Any], used: Utilisation | None) -> str:
    """Return the table row of one of a cell's runs, without the compiler."""
    hbm = find_target(cell.target).chip.hbm_bytes
    seconds = a["step_seconds_model"]
    time = "- | - | -"
    if seconds:
        exposed = a["seconds_by_purpose"]["exposed communication"] / seconds
        source = a["seconds_source"].partition(",")[0].replace(" of the computation by", "")
        time = f"{seconds:,.1f} | {exposed:.1%} | {source}"
    fitted = ""
    if used and run == BLOCKWISE:
        fitted = f"{used.products:.0%} / {used.attention:.0%}"
    return (
        f"| {cell.name} | {run} | {a['mesh_dim']} | {a['batch_size']} x {a['seq_len']:,} | {a['accumulate']} | "
        f"{a['peak_bytes'] / GiB:.2f} of {hbm / GiB:.2f} | {a['head_groups']} | {a['remat_group']} | {time} | "
        f"{fitted} |"
    )
