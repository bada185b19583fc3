"""Writer of docs/tables.md and its figures, from closed forms and from compiled attempts."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.estimate.closed_forms.training import smallest_local_length
from ringformer.estimate.search.longest_context import MAX_STEP_SECONDS, counted_within, longest_within
from ringformer.estimate.seconds.program_seconds import USUAL, efficiency
from ringformer.estimate.workloads.targets import find_target
from ringformer.hardware import CHIPS, GiB
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.models.own_attention import ATTENTION
from ringformer.paper import activation_memory, max_context, mfu_table, trajectories
from ringformer.paper.attempts import read, read_runs
from ringformer.paper.cells import REGIMES, ROWS, SCALING, Cell, K, Row, cells
from ringformer.paper.figures import Contexts, draw_longest_contexts, draw_training_cost
from ringformer.paper.max_context import longest
from ringformer.paper.mfu_figure import draw_training_mfu
from ringformer.paper.tables_text import BLOCKWISE, FORMULAS, PAGE, seconds_by, with_compilers
from ringformer.paper.training_mfu import PAPER_MFU

DAY = 86400


class Results(NamedTuple):
    """Files that the tables are made from."""

    contexts: Path
    """Attempts of Table 3."""
    activations: Path
    """Activations of Table 1."""
    mfu: Path
    """Runs of Table 4."""
    trajectories: Path
    """Attempts of Table 5."""

    @staticmethod
    def beside(contexts: Path) -> "Results":
        """Return the results in the folder of Table 3's attempts."""
        return Results(
            contexts, *(contexts.with_name(name) for name in ("activations.json", "table4.json", "table5.json"))
        )


def write_tables(results: Results, folder: Path) -> list[str]:
    """Write `folder`/tables.md and its figures to `folder`/figures; return the names of the files."""
    attempts = read(results.contexts)
    runs = read_runs(results.mfu)
    agents = read(results.trajectories)
    text = page(attempts, runs, activation_memory.read(results.activations), agents)
    names = [f"figures/{name}.svg" for name in ("longest_contexts", "training_cost", "training_mfu")]
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
    v4 = efficiency("v4")
    tried = [attempt for cell in attempts.values() for attempt in cell]
    part = r"^\d+% of the computation by ([^,]*), the rest", r"\1 for a part of the computation, and for the rest"
    sources = {re.sub(*part, attempt["seconds_source"]) for attempt in tried if attempt["fits"]}
    rings = {name: best for name, cell in attempts.items() if "/ring/" in name and (best := longest(cell))}
    kernels = [cell for cell in cells() if cell.kernel != "xla"]
    shorter = [cell.name for cell in kernels if 0 < _reached(attempts, cell) < _reached(attempts, cell.with_xla)]
    fields = {
        "paper_m": [_ring_row(row, row.sequences, attempts) for row in ROWS],
        "single": [_ring_row(row, 1, attempts) for row in ROWS if row.sequences > 1],
        "hours": [f"{MAX_STEP_SECONDS / 3600:g}"],
        "seconds": [f"{MAX_STEP_SECONDS:,.0f}"],
        "counted": [f"{USUAL} (v4: {v4.pairs:.0%} and {v4.products:.0%})"],
        "kernels": [_kernel_row(cell, attempts) for cell in kernels],
        "shorter_kernels": [f"These contexts are shorter with the kernel: {', '.join(shorter) or 'none'}."],
        "baselines": [_baseline_row(row, attempts) for row in ROWS],
        "shorter_baselines": _shorter_baselines(attempts),
        "executables": with_compilers((_executable(name, best), best) for name, best in rings.items()),
        "scaling": [_scaling_row(row, attempts) for row in (*SCALING, ROWS[-1])],
        "mfu_float32": mfu_table.rows(runs, "float32"),
        "mfu_bfloat16": mfu_table.rows(runs, "bfloat16"),
        "mfu_executables": mfu_table.executables(runs),
        "trajectories": trajectories.most_rows(agents),
        "trajectories_of_paper": trajectories.paper_rows(agents),
        "target": [activation_memory.TARGET],
        "activations": [_activations_row(kind, activations[kind]) for kind in ATTENTION if kind in activations],
        "hidden": _smallest_local_lengths(),
        "sources": [f"- {source}" for source in sorted(sources)],
        "compilers": [f"- {compiler}" for compiler in sorted({attempt["compiled_by"] for attempt in tried})],
    }
    return PAGE.format(**{name: "\n".join(filter(None, lines)) for name, lines in fields.items()})


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
        return f"< {min(failed) // K:,}K" if failed else ""
    sign = "" if 2 * best["seq_len"] in failed else "≥ "
    return sign + _length(best["seq_len"], paper)


def _length(tokens: int, paper: int | None = None) -> str:
    return f"{tokens // K:,}K" + (f" ({tokens / paper:g}×)" if paper else "")


def _fits_text(attempts: list[dict[str, Any]], paper: int) -> str:
    """Format a cell: the longest context that fits and the seconds of its step, marked if it takes more than a day."""
    text = _longest_text(attempts, paper)
    best = longest(attempts)
    if best is None:
        return text
    seconds = best["step_seconds_model"]
    return f"{text} **⚠ {seconds / DAY:.1f} days**" if seconds > DAY else f"{text} {_seconds(seconds)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}\N{NO-BREAK SPACE}s"


def _within_text(cell: Cell, attempts: list[dict[str, Any]]) -> str:
    """Format a cell: the longest context whose step takes at most `MAX_STEP_SECONDS`. If every compiled step takes
    longer, the context is taken from the closed form and marked "~"."""
    if best := longest_within(attempts):
        return f"{_length(best['seq_len'], cell.paper)} {_seconds(best['step_seconds_model'])}"
    counted = counted_within(attempts, cell.workload)
    return f"~ {_length(counted, cell.paper)}" if counted else ""


def _ring_row(row: Row, sequences: int, attempts: max_context.Results) -> str:
    """Return the ring's longest contexts in three regimes."""
    cells = [Cell(row, "ring", regime, sequences) for regime in REGIMES]
    tried = {cell: attempts[cell.name] for cell in cells}
    columns = [f"{_fits_text(of_cell, cell.paper)} | {_within_text(cell, of_cell)}" for cell, of_cell in tried.items()]
    paper = f"{cells[0].paper // K:,}K"
    return f"| {row.target} | {row.size} | {row.devices}/{sequences} | {paper} | {' | '.join(columns)} |"


def _kernel_row(cell: Cell, attempts: max_context.Results) -> str:
    """Return the longest contexts with XLA's blocks and with a kernel, that fit and whose step takes an hour."""
    row = cell.row
    regime = "bf16 + offload" if cell.regime.offload else "bf16"
    kernel = cell.workload(cell.paper).model.kernel
    pair = [(c, attempts[c.name]) for c in (cell.with_xla, cell)]
    columns = [f"{_fits_text(tried, cell.paper)} | {_within_text(c, tried)}" for c, tried in pair]
    return (
        f"| {row.target} | {row.size} | {row.devices}/{cell.sequences} | {kernel} | {regime} | {' | '.join(columns)} |"
    )


def _baseline_cells(row: Row) -> list[Cell]:
    return [Cell(row, kind, REGIMES[0], row.devices) for kind in ATTENTION[:3]]


def _baseline_row(row: Row, attempts: max_context.Results) -> str:
    """Return the longest contexts without a ring beside the paper's."""
    columns = [f"{_longest_text(attempts[cell.name])} ({cell.paper // K}K)" for cell in _baseline_cells(row)]
    return f"| {row.target} | {row.size} | {' | '.join(columns)} |"


def _shorter_baselines(attempts: max_context.Results) -> list[str]:
    """Name the baselines whose context is shorter than the paper's, and the reason."""
    shorter = [
        f"{cell.attention.replace('_', ' ')} of {row.target} {row.size} ({reached // K}K of {cell.paper // K}K)"
        for row in ROWS
        for cell in _baseline_cells(row)
        if 0 < (reached := _reached(attempts, cell)) < cell.paper
    ]
    return [f"These contexts are shorter than the paper's: {', '.join(shorter)}.", BLOCKWISE] if shorter else []


def _executable(name: str, best: dict[str, Any]) -> str:
    """Return the memory and the settings of a cell's longest ring, and the bytes that its schedule exposes. The row
    does not name the compiler."""
    ring = max(best["hidden_permute_bytes"] + best["exposed_permute_bytes"], 1)
    chip = find_target(name.partition("/")[0]).chip
    programs = len(best.get("programs", [1]))  # the oldest attempts compiled one program only
    judged = "the train step" if programs == 1 else f"all {programs} programs"
    return (
        f"| {name} | {best['seq_len']:,} | {best['peak_bytes'] / GiB:.2f} of {chip.hbm_bytes / GiB:.2f} | "
        f"{best['host_bytes'] / GiB:.1f} | {best['head_groups']} | {best['remat_group']} | "
        f"{best['exposed_in_ring_loops_bytes'] / ring:.2%} | {best['exposed_permute_bytes'] / ring:.2%} | "
        f"{best['max_link_hops'] or '-'} | {best['step_seconds_model']:,.0f} | {seconds_by(best)} | "
        f"{judged}, {'machine code' if best['generated_code'] else 'schedule'} |"
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
    sizes = " | ".join(f"{held[f'{part}_bytes'] / 2**20:,.0f}" for part in ("paper", "forward", "backward"))
    return f"| {kind.replace('_', ' ')} | {held['local_tokens']:,} | {FORMULAS[kind]} | {sizes} |"


def _smallest_local_lengths() -> list[str]:
    """Return the smallest local lengths that hide the ring, for each chip."""
    seven, grouped = (LlamaConfig(**preset(name)) for name in ("llama_7b", "llama3_8b"))
    rows = []
    for chip in CHIPS.values():
        lengths = [smallest_local_length(seven, chip, causal=False)]
        lengths += [smallest_local_length(m, chip, backward=b) for m in (seven, grouped) for b in (False, True)]
        rows.append(f"| {chip.name} | " + " | ".join(f"{length:,.0f}" for length in lengths) + " |")
    return rows


def contexts(attempts: max_context.Results) -> list[Contexts]:
    """Return the ring columns of Table 3 with the paper's number of sequences, for the figure."""
    rows = []
    for row in ROWS:
        rings = [Cell(row, "ring", regime, row.sequences) for regime in REGIMES]
        best = [longest(attempts[ring.name]) for ring in rings]
        ours = tuple(attempt["seq_len"] if attempt else None for attempt in best)
        days = tuple(attempt["step_seconds_model"] / DAY if attempt else 0.0 for attempt in best)
        rows.append(Contexts(row.target, row.size, rings[0].paper, ours, days))
    return rows
