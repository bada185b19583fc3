"""Writer of docs/tables.md and its figures, from closed forms and from compiled attempts."""

import re
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.paper_page import mfu_table
from benchmarks.paper_page.figures import Contexts, draw_longest_contexts, draw_training_cost
from benchmarks.paper_page.mfu_figure import draw_training_mfu
from benchmarks.paper_page.text import BLOCKWISE, FORMULAS, PAGE, seconds_by, with_compilers
from ringformer.estimate.closed_forms.training import smallest_local_length
from ringformer.estimate.search.longest_context import MAX_STEP_SECONDS, counted_within, longest_within
from ringformer.estimate.workloads.targets import find_target
from ringformer.hardware import CHIPS, GiB
from ringformer.hardware.shares import SHARES
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.models.own_attention import ATTENTION
from ringformer.paper import activation_memory, max_context, trajectories
from ringformer.paper.attempts import ResultFiles, read, read_runs
from ringformer.paper.cells import REGIMES, ROWS, SCALING, Cell, K, Row, cells
from ringformer.paper.max_context import longest
from ringformer.paper.training_mfu import PAPER_MFU

DAY = 86400


def write_tables(results: ResultFiles, folder: Path) -> list[str]:
    """Write `folder`/tables.md and its figures to `folder`/figures; return the names of the files."""
    attempts = read(results.contexts)
    runs = read_runs(results.mfu)
    agents = read(results.trajectories)
    text = page(attempts, runs, activation_memory.read(results.activations), agents)
    names = ["figures/longest_contexts.svg", "figures/training_cost.svg", "figures/training_mfu.svg"]
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    draw_longest_contexts(contexts(attempts), path=folder / names[0])
    draw_training_cost(path=folder / names[1])
    draw_training_mfu(mfu_table.bars(runs), PAPER_MFU, path=folder / names[2])
    (folder / "tables.md").write_text(text)
    return [f"{folder}/tables.md", *names]


def page(
    attempts: max_context.Results,
    runs: dict[str, dict[str, Any]],
    activations: dict[str, dict[str, Any]],
    agents: max_context.Results,
) -> str:
    """Return the text of tables.md, from the contents of the files of results."""
    v4 = SHARES["v4"]
    v5e = SHARES["v5e"]
    sources: set[str] = set()
    compilers: set[str] = set()
    for attempt in chain.from_iterable(attempts.values()):
        compilers.add(attempt["compiled_by"])
        if attempt["fits"]:
            sources.add(_source(attempt))
    as_in_paper = []
    single = []
    baselines = []
    for row in ROWS:
        as_in_paper.append(_ring_row(row, row.sequences, attempts))
        baselines.append(_baseline_row(row, attempts))
        if row.sequences > 1:
            single.append(_ring_row(row, 1, attempts))
    kernels = []
    shorter_kernels = []
    for cell in cells():
        if cell.kernel != "xla":
            kernels.append(_kernel_row(cell, attempts))
            if 0 < _reached(attempts, cell) < _reached(attempts, cell.with_xla):
                shorter_kernels.append(cell.name)
    fields = {
        "paper_m": as_in_paper,
        "single": single,
        "hours": [f"{MAX_STEP_SECONDS / 3600:g}"],
        "seconds": [f"{MAX_STEP_SECONDS:,.0f}"],
        "counted": [
            f"FLOPs at {v5e.attention:.0%} of the peak in attention, {v5e.products:.0%} elsewhere "
            f"(v4: {v4.attention:.0%} and {v4.products:.0%})"
        ],
        "kernels": kernels,
        "shorter_kernels": [f"These contexts are shorter with the kernel: {', '.join(shorter_kernels) or 'none'}."],
        "baselines": baselines,
        "shorter_baselines": _shorter_baselines(attempts),
        "executables": _executables(attempts),
        "scaling": [_scaling_row(row, attempts) for row in (*SCALING, ROWS[-1])],
        "mfu_float32": mfu_table.rows(runs, "float32"),
        "mfu_bfloat16": mfu_table.rows(runs, "bfloat16"),
        "mfu_executables": mfu_table.executables(runs),
        "trajectories": trajectories.most_rows(agents),
        "trajectories_of_paper": trajectories.paper_rows(agents),
        "target": [activation_memory.TARGET],
        "activations": [_activations_row(kind, activations[kind]) for kind in ATTENTION if kind in activations],
        "hidden": _smallest_local_lengths(),
        "sources": _listed(sources),
        "compilers": _listed(compilers),
    }
    texts = {}
    for name, lines in fields.items():
        texts[name] = "\n".join(filter(None, lines))
    return PAGE.format(**texts)


def _listed(texts: set[str]) -> list[str]:
    """Return texts as a list in Markdown."""
    return [f"- {text}" for text in sorted(texts)]


def _source(attempt: dict[str, Any]) -> str:
    """Return on what an attempt's seconds are based, whatever the shares of the computation."""
    part = r"^\d+% of the computation by ([^,]*), the rest"
    return re.sub(part, r"\1 for a part of the computation, and for the rest", attempt["seconds_source"])


def _reached(attempts: max_context.Results, cell: Cell) -> int:
    """Return the longest context of a cell that fits; 0 if none is known."""
    best = longest(attempts[cell.name])
    return best["seq_len"] if best else 0


def _longest_text(attempts: list[dict[str, Any]], paper: int | None = None) -> str:
    """Format the longest context that fits, and its ratio to the paper's; with "≥" if twice the length was not tried
    yet."""
    best = longest(attempts)
    failed = [a["seq_len"] for a in attempts if not a["fits"]]
    if best is None:
        return f"< {_length(min(failed))}" if failed else ""
    text = _length(best["seq_len"], paper)
    if 2 * best["seq_len"] in failed:
        return text
    return f"≥ {text}"


def _length(tokens: int, paper: int | None = None) -> str:
    text = f"{tokens // K:,}K"
    if paper:
        return f"{text} ({tokens / paper:g}×)"
    return text


def _fits_text(attempts: list[dict[str, Any]], paper: int) -> str:
    """Format a cell: the longest context that fits and the seconds of its step, marked if it takes more than a day."""
    text = _longest_text(attempts, paper)
    best = longest(attempts)
    if best is None:
        return text
    seconds = best["step_seconds_model"]
    if seconds > DAY:
        return f"{text} **⚠ {seconds / DAY:.1f} days**"
    return f"{text} {_seconds(seconds)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}\N{NO-BREAK SPACE}s"


def _within_text(cell: Cell, attempts: list[dict[str, Any]]) -> str:
    """Format a cell: the longest context whose step takes at most `MAX_STEP_SECONDS`. If every compiled step takes
    longer, the context is taken from the closed form and marked "~"."""
    if best := longest_within(attempts):
        return f"{_length(best['seq_len'], cell.paper)} {_seconds(best['step_seconds_model'])}"
    counted = counted_within(attempts, cell.workload)
    return f"~ {_length(counted, cell.paper)}" if counted else ""


def _columns(cell: Cell, attempts: max_context.Results) -> str:
    """Format two cells: the longest context that fits, and the longest whose step takes an hour."""
    tried = attempts[cell.name]
    return f"{_fits_text(tried, cell.paper)} | {_within_text(cell, tried)}"


def _rings(row: Row, sequences: int) -> list[Cell]:
    return [Cell(row, "ring", regime, sequences) for regime in REGIMES]


def _ring_row(row: Row, sequences: int, attempts: max_context.Results) -> str:
    """Return the ring's longest contexts in three regimes."""
    rings = _rings(row, sequences)
    text = f"| {row.target} | {row.size} | {row.devices}/{sequences} | {_length(rings[0].paper)} |"
    for ring in rings:
        text += f" {_columns(ring, attempts)} |"
    return text


def _kernel_row(cell: Cell, attempts: max_context.Results) -> str:
    """Return the longest contexts with XLA's blocks and with a kernel, that fit and whose step takes an hour."""
    row = cell.row
    regime = "bf16 + offload" if cell.regime.offload else "bf16"
    kernel = cell.workload(cell.paper).model.kernel
    columns = f"{_columns(cell.with_xla, attempts)} | {_columns(cell, attempts)}"
    return f"| {row.target} | {row.size} | {row.devices}/{cell.sequences} | {kernel} | {regime} | {columns} |"


def _baseline_cells(row: Row) -> list[Cell]:
    return [Cell(row, kind, REGIMES[0], row.devices) for kind in ATTENTION[:3]]


def _baseline_row(row: Row, attempts: max_context.Results) -> str:
    """Return the longest contexts without a ring beside the paper's."""
    text = f"| {row.target} | {row.size} |"
    for cell in _baseline_cells(row):
        text += f" {_longest_text(attempts[cell.name])} ({cell.paper // K}K) |"
    return text


def _shorter_baselines(attempts: max_context.Results) -> list[str]:
    """Name the baselines whose context is shorter than the paper's, and the reason."""
    shorter = []
    for row in ROWS:
        for cell in _baseline_cells(row):
            reached = _reached(attempts, cell)
            if 0 < reached < cell.paper:
                attention = cell.attention.replace("_", " ")
                lengths = f"{reached // K}K of {cell.paper // K}K"
                shorter.append(f"{attention} of {row.target} {row.size} ({lengths})")
    if not shorter:
        return []
    return [f"These contexts are shorter than the paper's: {', '.join(shorter)}.", BLOCKWISE]


def _executables(attempts: max_context.Results) -> list[str]:
    """Return a row for the longest ring of each cell."""
    rows = []
    for name, tried in attempts.items():
        best = longest(tried)
        if best and "/ring/" in name:
            rows.append((_executable(name, best), best))
    return with_compilers(rows)


def _executable(name: str, best: dict[str, Any]) -> str:
    """Return the memory and the settings of a cell's longest ring, and the bytes that its schedule exposes. The row
    does not name the compiler."""
    ring = max(best["hidden_permute_bytes"] + best["exposed_permute_bytes"], 1)
    chip = find_target(name.partition("/")[0]).chip
    programs = len(best.get("programs", [1]))  # the oldest attempts compiled one program only
    judged = "the train step" if programs == 1 else f"all {programs} programs"
    code = "machine code" if best["generated_code"] else "schedule"
    return (
        f"| {name} | {best['seq_len']:,} | {best['peak_bytes'] / GiB:.2f} of {chip.hbm_bytes / GiB:.2f} | "
        f"{best['host_bytes'] / GiB:.1f} | {best['head_groups']} | {best['remat_group']} | "
        f"{best['exposed_in_ring_loops_bytes'] / ring:.2%} | {best['exposed_permute_bytes'] / ring:.2%} | "
        f"{best['max_link_hops'] or '-'} | {best['step_seconds_model']:,.0f} | {seconds_by(best)} | "
        f"{judged}, {code} |"
    )


def _scaling_row(row: Row, attempts: max_context.Results) -> str:
    """Return the longest context for a number of chips."""
    tried = attempts[Cell(row, "ring", REGIMES[1], 1).name]
    best = longest(tried)
    if best is None:
        return f"| {row.devices} | - | - | - | - |"
    return (
        f"| {row.devices} | {_longest_text(tried)} | {best['seq_len'] // row.devices:,} | "
        f"{best['peak_bytes'] / GiB:.2f} | {best['step_seconds_model']:,.0f} |"
    )


def _activations_row(kind: str, held: dict[str, Any]) -> str:
    """Return the activations of a layer by the paper's closed form, and the growth of compiled programs."""
    sizes = [f"{held[f'{part}_bytes'] / 2**20:,.0f}" for part in ("paper", "forward", "backward")]
    return f"| {kind.replace('_', ' ')} | {held['local_tokens']:,} | {FORMULAS[kind]} | {' | '.join(sizes)} |"


def _smallest_local_lengths() -> list[str]:
    """Return the smallest local lengths that hide the ring, for each chip."""
    seven = LlamaConfig(**preset("llama_7b"))
    grouped = LlamaConfig(**preset("llama3_8b"))
    rows = []
    for chip in CHIPS.values():
        row = f"| {chip.name} | {smallest_local_length(seven, chip, causal=False):,.0f} |"
        for model in (seven, grouped):
            forward = smallest_local_length(model, chip)
            backward = smallest_local_length(model, chip, backward=True)
            row += f" {forward:,.0f} | {backward:,.0f} |"
        rows.append(row)
    return rows


def contexts(attempts: max_context.Results) -> list[Contexts]:
    """Return the ring columns of Table 3 with the paper's number of sequences, for the figure."""
    rows = []
    for row in ROWS:
        rings = _rings(row, row.sequences)
        ours: list[int | None] = []
        days = []
        for ring in rings:
            best = longest(attempts[ring.name])
            ours.append(best["seq_len"] if best else None)
            days.append(best["step_seconds_model"] / DAY if best else 0.0)
        rows.append(Contexts(row.target, row.size, rings[0].paper, tuple(ours), tuple(days)))
    return rows
