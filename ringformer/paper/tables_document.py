"""Writer of docs/tables.md and its figures, from closed forms and from compiled attempts."""

import re
from pathlib import Path
from typing import NamedTuple, cast

from ringformer.estimate.closed_forms import smallest_local_length
from ringformer.estimate.search.longest_context import MAX_STEP_SECONDS, counted_longest_within, longest_within
from ringformer.estimate.seconds.program_seconds import USUAL, efficiency
from ringformer.estimate.targets import find_target
from ringformer.hardware import CHIPS, GiB
from ringformer.models.llama_config import ATTENTION, LlamaConfig
from ringformer.models.llama_presets import preset
from ringformer.paper import activation_memory
from ringformer.paper.attempts import read, read_runs
from ringformer.paper.figures import Contexts, draw_longest_contexts, draw_training_cost
from ringformer.paper.max_context import REGIMES, ROWS, SCALING, Cell, K, Row, cells, longest
from ringformer.paper.mfu_figure import draw_training_mfu
from ringformer.paper.mfu_table import bars, table4
from ringformer.paper.tables_text import (
    BASELINES,
    BLOCKWISE,
    DAY,
    EXECUTABLES,
    FIGURES,
    FORMULAS,
    HEAD,
    KERNELS,
    PROVENANCE,
    SCALED,
    SOURCES,
    TABLE_1,
    TABLE_2,
    TABLE_3,
    TABLE_3_LEGEND,
    compiler,
    compiler_letters,
    compiler_list,
    seconds_by,
)
from ringformer.paper.training_mfu import PAPER_MFU


class Results(NamedTuple):
    """Files that the tables are made from."""

    contexts: Path
    """Attempts of Table 3."""
    activations: Path
    """Activations of Table 1."""
    mfu: Path
    """Runs of Table 4."""

    @staticmethod
    def beside(contexts: Path) -> "Results":
        """Return the results in the folder of Table 3's attempts."""
        return Results(contexts, *(contexts.with_name(name) for name in ("activations.json", "table4.json")))


def write_tables(results: Results, folder: Path) -> list[str]:
    """Write `folder`/tables.md and its figures to `folder`/figures; return the names of the files."""
    attempts, trained = read(results.contexts), read_runs(results.mfu)
    pictures = folder / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    draw_longest_contexts(contexts(attempts), path=pictures / "longest_contexts.svg")
    draw_training_cost(path=pictures / "training_cost.svg")
    draw_training_mfu(bars(trained), PAPER_MFU, path=pictures / "training_mfu.svg")
    sections = [
        HEAD,
        table3(attempts),
        kernels(attempts),
        baselines(attempts),
        details(attempts),
        scaling(attempts),
        table4(trained),
        table1(activation_memory.read(results.activations)),
        table2(),
        FIGURES,
        provenance(attempts),
    ]
    (folder / "tables.md").write_text("\n".join(sections).replace("\n\n\n", "\n\n"))
    names = ("longest_contexts", "training_cost", "training_mfu")
    return [f"{folder}/tables.md", *(f"figures/{name}.svg" for name in names)]


def provenance(attempts: dict) -> str:
    """Return the section on what the numbers are, the sources of the seconds, and the compilers."""
    tried = [a for cell in attempts.values() for a in cell]
    compilers = sorted({a["compiled_by"] for a in tried})
    sources = {a["seconds_source"] for a in tried if a["fits"]}
    part = r"^\d+% of the computation by ([^,]*), the rest FLOPs"
    seconds = sorted({re.sub(part, r"\1 for a part of the computation, and for the rest FLOPs", s) for s in sources})
    return PROVENANCE.format(seconds=_bullets(seconds), compilers=_bullets(compilers))


def _bullets(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _longest_text(attempts: list[dict], paper: int | None = None) -> str:
    """Format the longest context that fits, and its ratio to the paper's; "≥" if twice the length was not tried yet."""
    best = longest(attempts)
    failed = [a["seq_len"] for a in attempts if not a["fits"]]
    if best is None:
        return f"< {min(failed) // K:,}K" if failed else ""
    sign = "" if 2 * best["seq_len"] in failed else "≥ "
    return sign + _length(best["seq_len"], paper)


def _length(tokens: int, paper: int | None = None) -> str:
    return f"{tokens // K:,}K" + (f" ({tokens / paper:g}×)" if paper else "")


def _fits_text(attempts: list[dict], paper: int) -> str:
    """Format a cell: the longest context that fits and the seconds of its step, marked if it takes more than a day."""
    text, best = _longest_text(attempts, paper), longest(attempts)
    if best is None:
        return text
    seconds = best["step_seconds_model"]
    took = f"**⚠ {seconds / DAY:.1f} days**" if seconds > DAY else _seconds_text(seconds)
    return f"{text} {took}"


def _seconds_text(seconds: float) -> str:
    """Format seconds, with a space before the unit at which no line breaks."""
    return f"{seconds:,.0f}\N{NO-BREAK SPACE}s"


def _within_text(cell: Cell, attempts: list[dict]) -> str:
    """Format a cell: the longest context whose step takes at most `MAX_STEP_SECONDS`. If every compiled step takes
    longer, the context follows from the closed form and is marked "~"."""
    fitting = [a["seq_len"] for a in attempts if a["fits"]]
    if not fitting:
        return ""
    if best := longest_within(attempts):
        return f"{_length(best['seq_len'], cell.paper)} {_seconds_text(best['step_seconds_model'])}"
    counted = counted_longest_within(cell.workload(min(fitting) // 2))
    return f"~ {_length(counted, cell.paper)}" if counted else ""


def table3(attempts: dict) -> str:
    """Return the ring's longest contexts in three regimes, with the paper's number of sequences and with one."""
    hours = MAX_STEP_SECONDS / 3600
    v4 = efficiency("v4")
    counted = f"{USUAL} (v4: {v4.pairs:.0%} and {v4.products:.0%})"
    text = TABLE_3
    single = [row for row in ROWS if row.sequences > 1]
    for title, rows, sequences in (("m as in the paper", ROWS, None), ("m = 1", single, 1)):
        names = [f"{name}: fits | {hours:g} h per step" for name in ("float32", "bf16", "bf16 + offload")]
        lines = [f"| hardware | model | n/m | paper | {' | '.join(names)} |", "|---" * 10 + "|"]
        for row in rows:
            cells = [Cell(row, "ring", regime, sequences or row.sequences) for regime in REGIMES]
            columns = []
            for cell in cells:
                tried = attempts.get(cell.name, [])
                columns += [_fits_text(tried, cell.paper), _within_text(cell, tried)]
            head = f"| {row.target} | {_size(row)} | {row.devices}/{cells[0].sequences} | {cells[0].paper // K:,}K | "
            lines.append(head + " | ".join(columns) + " |")
        text += f"\n### {title}\n\n" + "\n".join(lines) + "\n"
        if sequences:
            text += "\nThe other rows have m = 1 in the paper already.\n"
    return text + TABLE_3_LEGEND.format(hours=hours, seconds=MAX_STEP_SECONDS, counted=counted)


def kernels(attempts: dict) -> str:
    """Return the longest contexts with kernels and with XLA's blocks, and name the cells where the kernel's is
    shorter."""
    head = "| hardware | model | n/m | kernel | regime | XLA's blocks | the kernel |"
    lines, shorter = [head, "|---" * 7 + "|"], []
    for cell in (cell for cell in cells() if cell.regime.kernel != "xla"):
        tried, plain = (attempts.get(c.name, []) for c in (cell, cell.with_xla))
        best, without = longest(tried), longest(plain)
        if best and without and best["seq_len"] < without["seq_len"]:
            shorter.append(cell.name)
        row, regime = cell.row, "bf16 + offload" if cell.regime.offload else "bf16"
        kernel = cast(LlamaConfig, cell.workload(cell.paper).model).kernel
        head = f"| {row.target} | {_size(row)} | {row.devices}/{cell.sequences} | {kernel} | {regime} | "
        lines.append(head + f"{_fits_text(plain, cell.paper)} | {_fits_text(tried, cell.paper)} |")
    note = "No context is shorter with the kernel."
    if shorter:
        note = f"These contexts are shorter with the kernel: {', '.join(shorter)}."
    return "\n".join([KERNELS, *lines]) + f"\n\n{note}\n"


def baselines(attempts: dict) -> str:
    """Return the longest contexts without a ring beside the paper's, and name the cells that fall short of the
    paper."""
    lines = [BASELINES, "| hardware | model | vanilla | memory efficient | blockwise |", "|---|---|---|---|---|"]
    shorter = []
    for row in ROWS:
        columns = []
        for kind in ATTENTION[:3]:
            cell = Cell(row, kind, REGIMES[0], row.devices)
            tried = attempts.get(cell.name, [])
            columns.append(f"{_longest_text(tried)} ({cell.paper // K}K)")
            best = longest(tried)
            if best and best["seq_len"] < cell.paper:
                shorter.append(
                    f"{kind.replace('_', ' ')} of {row.target} {_size(row)} ({best['seq_len'] // K}K of "
                    f"{cell.paper // K}K)"
                )
        lines.append(f"| {row.target} | {_size(row)} | " + " | ".join(columns) + " |")
    note = f"These contexts are shorter than the paper's: {', '.join(shorter)}.\n{BLOCKWISE}" if shorter else ""
    return "\n".join(lines) + f"\n\n{note}\n"


def details(attempts: dict) -> str:
    """Return one row for each longest ring: memory, settings, and the bytes that its schedule exposes."""
    rows = [
        EXECUTABLES,
        "| cell | tokens | peak GiB | host GiB | head groups | remat group | exposed in loops | exposed | hop | "
        "modelled s/step | by | judged | compiler |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rings = {name: best for name, tried in attempts.items() if "/ring/" in name and (best := longest(tried))}
    letters = compiler_letters(rings.values())
    for name, best in rings.items():
        ring = best["hidden_permute_bytes"] + best["exposed_permute_bytes"]
        chip = find_target(name.partition("/")[0]).chip
        rows.append(
            f"| {name} | {best['seq_len']:,} | {best['peak_bytes'] / GiB:.2f} of {chip.hbm_bytes / GiB:.2f} | "
            f"{best['host_bytes'] / GiB:.1f} | {best['head_groups']} | {best['remat_group']} | "
            f"{best['exposed_in_ring_loops_bytes'] / max(ring, 1):.2%} | "
            f"{best['exposed_permute_bytes'] / max(ring, 1):.2%} | {best['max_link_hops'] or '-'} | "
            f"{best['step_seconds_model']:,.0f} | {SOURCES[seconds_by(best)]} | {_judged(best)} | "
            f"{letters[compiler(best)]} |"
        )
    return "\n".join([*rows, compiler_list(letters)]) + "\n"


def _judged(attempt: dict) -> str:
    """Describe which programs of a run an attempt compiled, and how far; the oldest attempts compiled one program
    only."""
    programs = len(attempt["programs"]) if "programs" in attempt else 1
    far = "machine code" if attempt["generated_code"] else "schedule"
    return f"{'the train step' if programs == 1 else f'all {programs} programs'}, {far}"


def scaling(attempts: dict) -> str:
    """Return the longest contexts by number of chips."""
    rows = [SCALED]
    for row in (*SCALING, ROWS[-1]):
        tried = attempts.get(Cell(row, "ring", REGIMES[1], 1).name, [])
        if best := longest(tried):
            local, peak = best["seq_len"] // row.devices, best["peak_bytes"] / GiB
            seconds = best["step_seconds_model"]
            rows.append(f"| {row.devices} | {_longest_text(tried)} | {local:,} | {peak:.2f} | {seconds:,.0f} |")
        else:
            rows.append(f"| {row.devices} | - | - | - | - |")
    return "\n".join(rows) + "\n"


def table1(held: dict[str, dict]) -> str:
    """Return the activations of a layer by the paper's closed form, and the growth of compiled programs."""
    rows = [TABLE_1.format(target=activation_memory.TARGET)]
    for kind in ATTENTION:
        if kind in held:
            h = held[kind]
            sizes = " | ".join(f"{h[k] / 2**20:,.0f}" for k in ("paper_bytes", "forward_bytes", "backward_bytes"))
            rows.append(f"| {kind.replace('_', ' ')} | {h['local_tokens']:,} | {FORMULAS[kind]} | {sizes} |")
    return "\n".join(rows) + "\n"


def table2() -> str:
    """Return the smallest local lengths that hide the ring."""
    model = LlamaConfig(**preset("llama_7b"))
    gqa = LlamaConfig(**preset("llama3_8b"))
    rows = [
        TABLE_2,
        "| device | F/B | 7B forward | 7B backward | LLaMA-3 8B (K/H = 1/4) forward | backward |",
        "|---|---|---|---|---|---|",
    ]
    for chip in CHIPS.values():
        lengths = [smallest_local_length(m, chip, backward=b) for m in (model, gqa) for b in (False, True)]
        plain = smallest_local_length(model, chip, causal=False)
        rows.append(f"| {chip.name} | {plain:,.0f} | " + " | ".join(f"{x:,.0f}" for x in lengths) + " |")
    return "\n".join(rows) + "\n"


def contexts(attempts: dict) -> list[Contexts]:
    """Return the ring columns of Table 3 with the paper's number of sequences, for the figure."""
    columns = []
    for row in ROWS:
        rings = [Cell(row, "ring", regime, row.sequences) for regime in REGIMES]
        best = [longest(attempts.get(ring.name, [])) for ring in rings]
        float32, bfloat16, offload = (attempt["seq_len"] if attempt else None for attempt in best)
        days = tuple(attempt["step_seconds_model"] / DAY if attempt else 0.0 for attempt in best)
        columns.append(Contexts(row.target, _size(row), rings[0].paper, (float32, bfloat16, offload), days))
    return columns


def _size(row: Row) -> str:
    return row.model.removeprefix("llama_").upper()
