"""The paper's Table 3 and more rows: the longest context for each hardware, model and kind of attention, found by
compiling.

Cells are searched breadth first: the search tries one length of each cell in turn, and writes every attempt to a file
at once. An interrupted search resumes where it stopped, and the file always holds everything known so far.
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from ringformer.estimate.closed_forms.training import CLOSED_FORM, computation_time
from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.compiler.known_failures import known_failure
from ringformer.estimate.reports.time_report import time_json
from ringformer.estimate.search.longest_context import attempt, counted_within, next_length
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import MemorySettings, Workload, estimate_command
from ringformer.hardware import GiB
from ringformer.paper.attempts import compilable, read, stamp, write_results
from ringformer.paper.cells import Cell, Row, cells

Results = defaultdict[str, list[dict[str, Any]]]
"""Attempts of each cell, by the cell's name."""


def fill(path: Path, wanted: list[Cell], log: Callable[[str], None], passes: int | None = None) -> None:
    """Search the cells breadth first until all maxima and, with kernels, the longest contexts with steps of an hour are
    known, or for `passes` passes. Attempts are written to `path`.

    Cells whose compiler is not installed are left out. The search also ends if the compiler breaks down on every cell
    that is left, so that a pass learns nothing.
    """
    wanted = compilable(wanted, log)
    for _ in count() if passes is None else range(passes):
        results = read(path)
        learned = False
        pending = []
        for cell in wanted:
            if seq_len := _next_length(cell, results):
                pending.append((cell, seq_len))
        pending.sort(key=lambda item: len(results[item[0].name]))  # cells with the fewest attempts first
        for i, (cell, seq_len) in enumerate(pending, 1):
            log(f"[{i}/{len(pending)}] {cell.name} at {seq_len:,} tokens")
            if answer := _attempt(cell.workload(seq_len), log):
                write(path, cell, answer)
                learned = True
        if not learned:
            return


def _attempt(workload: Workload, log: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the answer for a workload; None if the compiler broke down, so that the workload is tried again."""
    if failure := known_failure(workload):  # this is an answer: it does not compile
        log(f"  does not fit: {failure}")
        refused = {"seq_len": workload.seq_len, "command": estimate_command(workload)} | vars(workload.settings)
        return refused | {"fits": False, "reasons_against": [failure]}
    try:
        answer = attempt(workload, log)
    except CompilerFailure as error:
        log(f"  the compiler broke down: {error}")
        return None
    verdict = "fits:" if answer["fits"] else "does not fit:"
    if not answer["fits_host"]:
        verdict += f" {answer['host_bytes'] / GiB:.0f} GiB of a host's memory,"
    log(
        f"  {verdict} {answer['peak_bytes'] / GiB:.2f} of "
        f"{answer['hbm_bytes'] / GiB:.2f} GiB in {answer['compile_seconds']:.0f} s"
    )
    return answer


def _next_length(cell: Cell, results: Results) -> int | None:
    """Return the length to compile next; None: the cell is complete."""
    attempts = results[cell.name]
    attempted = {a["seq_len"] for a in attempts}
    if required := set(cell.row.required_lengths(cell.attention)) - attempted:
        return min(required)
    longer = next_length(attempts, _first_length(cell, results))
    if longer is None and cell.kernel != "xla":
        return counted_within(attempts, cell.workload)
    return longer


def _first_length(cell: Cell, results: Results) -> int:
    """Return the first length of a search. For a cell with a kernel, it is the longest length that fits without the
    kernel."""
    without = longest(results[cell.with_xla.name])
    if without and cell.kernel != "xla":
        return without["seq_len"]
    return cell.first_length


def longest(attempts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the attempt at the longest context that fits; None if none does."""
    return max((a for a in attempts if a["fits"]), key=lambda a: a["seq_len"], default=None)


def beside_paper(wanted: list[Cell], columns: dict[str, Results]) -> list[str]:
    """Return the lines of a table with the longest context of each cell, in tokens: in the paper, and in each of
    `columns` (attempts, by the column's title)."""
    rows = [["cell", "paper", *columns]]
    compilers: set[str] = set()
    for cell in wanted:
        row = [cell.name, f"{cell.paper:,}" if cell.row.paper else "-"]
        for results in columns.values():
            row.append(_longest_text(cell, results))
            for a in results[cell.name]:
                compilers.add(a["compiled_by"])
        rows.append(row)
    width = max(len(name) for name, *_ in rows)
    lines = []
    for name, *texts in rows:
        line = f"{name:<{width}}"
        for text in texts:
            line += f"  {text:>18}"
        lines.append(line)
    about = f"longest context in tokens whose train step fits; compilers: {'; '.join(sorted(compilers)) or 'none yet'}"
    return [*lines, about]


def _longest_text(cell: Cell, results: Results) -> str:
    """Format the longest context that fits; the text shows whether the search is complete."""
    attempts = results[cell.name]
    best = longest(attempts)
    complete = next_length(attempts, _first_length(cell, results)) is None
    if best is None:
        return "none" if complete else "not known"
    length = f"{best['seq_len']:,}"
    return length if complete else f"at least {length}"


def judge_maxima(path: Path, wanted: list[Cell], log: Callable[[str], None], generate_code: bool) -> None:
    """Compile every program of the runs at the longest contexts that fit so far, either to a schedule or to machine
    code.

    Runs that were already compiled that far are skipped. If a program of a run fails, that run counts as one that does
    not fit, and `fill` continues the search from there.
    """
    pending = []
    for cell in compilable(wanted, log):
        if best := _unjudged(read(path)[cell.name], generate_code):
            pending.append((cell, best))
    for i, (cell, before) in enumerate(pending, 1):
        log(f"[{i}/{len(pending)}] {cell.name} at {before['seq_len']:,} tokens: every program of the run")
        try:
            answer = attempt(cell.workload(before["seq_len"]), log, whole_run=True, generate_code=generate_code)
        except CompilerFailure as error:  # its step was scheduled before, so it does not compile
            log(f"  {error}")
            answer = before | {"fits": False, "reasons_against": [str(error)]}
        if answer["fits"]:
            log("  fits")
        else:
            log(f"  does not fit: {'; '.join(answer['reasons_against'])}")
        write(path, cell, answer)


def _unjudged(attempts: list[dict[str, Any]], generate_code: bool) -> dict[str, Any] | None:
    """Return the attempt at the longest context that fits, unless its run was already compiled that far."""
    best = longest(attempts)
    if best and len(best.get("programs", ())) > 1 and (best["generated_code"] or not generate_code):
        return None
    return best


def renew_counted(path: Path) -> int:
    """Update the seconds of every attempt that uses the closed form; return the number of attempts that changed."""
    results = read(path)
    changed = 0
    for cell in cells():
        for a in results.get(cell.name, []):
            if (a.get("seconds_source") or "").startswith(CLOSED_FORM):
                settings = MemorySettings(a["head_groups"], a["remat_group"], a.get("q_chunk"), a.get("k_chunk"))
                renewed = time_json(computation_time(cell.workload(a["seq_len"]).with_settings(settings)))
                changed += a | renewed != a
                a |= renewed
    if changed:
        _write(path, results)
    return changed


def write(path: Path, cell: Cell, answer: dict[str, Any]) -> None:
    """Add today's attempt at a cell to the file; it replaces an older attempt at the same length. The file is read
    again first, so that two searches can share it."""
    results = read(path)
    others = [a for a in results[cell.name] if a["seq_len"] != answer["seq_len"]]
    results[cell.name] = [*others, answer | stamp(find_target(cell.target))]
    _write(path, results, cell.row.command)


def _write(path: Path, results: Results, command: str = Row.command) -> None:
    about = "compiled: whole train steps of `ringformer train`, one attempt per length; bytes of one device"
    write_results(path, what=about, command=command, cells=dict(sorted(results.items())))
