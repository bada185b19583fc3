"""Heads exchanged, rings and gathered keys beside one another: results/parallelism.json, docs/figures/parallelism.svg.

    python benchmarks/parallelism.py                # all; a minute each
    python benchmarks/parallelism.py --only=4893    # those with this in their name; none: draws the figure alone

Measured: MaxText's steps on 64 chips of v5p, by their authors. LLaMA-2 7B at 32K, 64 sequences a step on rings of 16,
whose outputs of attention are kept (maxtext#4687); LLaMA-3.1 8B, one sequence on all chips (maxtext#4893). Ours is
compiled for the same sizes, and its seconds are modelled. The lines of the figure are closed forms.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.paper_page.figures import draw_parallelism
from benchmarks.result_files import made, write_results
from benchmarks.tables import write_table
from ringformer.cli.parser import output_argument
from ringformer.estimate.choices.candidates import counted
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.kernels.kernel_cycles import with_machine_code
from ringformer.estimate.reports.time_report import modelled_time
from ringformer.estimate.workloads.targets import compiled_by, find_target, only_compilers
from ringformer.estimate.workloads.training import Workload, preset_workload
from ringformer.ops.ring import RingForm

USP = "USP"
"""Name of their hybrid: 16 devices exchange heads, rings have 4 ranks."""


@dataclass(frozen=True)
class Row:
    """A step on 64 chips of v5p."""

    source: str
    """The pull request that measured it; "ours" if nobody has."""
    method: str
    """Name of the parallelism, theirs if they measured it."""
    model: str
    seq_len: int
    sp: int
    """Devices that share a sequence."""
    batch: int
    """Sequences of a step."""
    ulysses: int
    ring: RingForm
    remat: str
    measured: float | None
    """Seconds."""

    @property
    def name(self) -> str:
        return f"{self.source}/{self.model}/{self.seq_len // 1024}K/{self.method}"

    @property
    def workload(self) -> Workload:
        target = find_target("v5p-128")
        settings = {"remat": self.remat, "kernel": "pallas", "ulysses": self.ulysses, "ring": self.ring}
        plain = preset_workload(self.model, target, self.seq_len, **settings)
        mesh = replace(plain, mesh_dim=f"1,{target.num_devices // self.sp},1,{self.sp}", batch_size=self.batch)
        return mesh.with_kernel()[0]


def _rows_of_7b() -> list[Row]:
    where = "maxtext#4687", "llama2_7b", 2**15, 16, 64
    return [
        Row(where[0], "ring", *where[1:], 1, "one_way", "attention", 16.38),
        Row(where[0], "Ulysses", *where[1:], 16, "one_way", "attention", 8.90),
        Row(where[0], "all-gather", *where[1:], 1, "gathered", "attention", 8.83),
    ]


def _rows_of_8b() -> list[Row]:
    where = "maxtext#4893", "llama3.1_8b"
    measured: dict[tuple[str, int, RingForm], dict[int, float]] = {
        ("ring", 1, "one_way"): {2**16: 1.42, 2**17: 3.71, 2**18: 10.78},
        ("all-gather", 1, "gathered"): {2**16: 1.09, 2**17: 2.98, 2**18: 9.71},
        (USP, 16, "one_way"): {2**16: 1.04, 2**17: 2.88, 2**18: 9.50},
        ("USP 8x8", 8, "one_way"): {2**16: 1.20, 2**17: 2.93, 2**18: 9.34},
    }
    ours: dict[tuple[str, int, RingForm], tuple[int, ...]] = {
        ("both ways", 1, "both_ways"): (2**16, 2**17),
        ("heads exchanged", 4, "one_way"): (2**16, 2**17),
    }
    return [
        *(
            Row(where[0], name, where[1], length, 64, 1, ulysses, ring, "full", seconds)
            for (name, ulysses, ring), steps in measured.items()
            for length, seconds in steps.items()
        ),
        *(
            Row("ours", name, where[1], length, 64, 1, ulysses, ring, "full", None)
            for (name, ulysses, ring), lengths in ours.items()
            for length in lengths
        ),
    ]


ROWS = [*_rows_of_7b(), *_rows_of_8b()]

BEGIN, END = "<!-- parallelism: written by benchmarks/parallelism.py -->", "<!-- end of parallelism -->"

LENGTHS = [2**i for i in range(14, 21)]
LINES: dict[str, list[tuple[int, RingForm]]] = {
    "ring": [(1, "one_way")],
    "both ways": [(1, "both_ways")],
    "all-gather": [(1, "gathered")],
    "heads exchanged": [(2**i, "one_way") for i in range(1, 6)],
}
"""Lines of the figure: by name, the number of devices that exchange heads (the best is drawn) and the form of the
ring."""


def compile_row(row: Row) -> dict:
    """Compile a row's step; return its seconds, and those of the closed form."""
    workload = row.workload
    estimate = with_machine_code(workload, compile_apart(workload), print)
    time = modelled_time(workload, estimate)
    assert time is not None, f"{row.name} does not fit"
    return asdict(row) | {
        "chunks": [workload.model.q_chunk, workload.model.k_chunk],
        "seconds": time.step,
        "exposed_seconds": time.exposed,
        "closed_form_seconds": counted(workload).time.step,
        "over_measured": row.measured and time.step / row.measured,
        "compiled_by": compiled_by(workload.target),
        **made(),
    }


def closed_form_lines() -> dict[str, list[float]]:
    """Return the seconds of a step of LLaMA-3.1 8B on one ring of 64 chips of v5p at each of LENGTHS, by line."""
    plain = _rows_of_8b()[0]
    return {
        name: [
            min(counted(replace(plain, seq_len=n, ulysses=u, ring=ring).workload).time.step for u, ring in ways)
            for n in LENGTHS
        ]
        for name, ways in LINES.items()
    }


def table(rows: dict[str, dict]) -> str:
    """Format the rows in markdown."""
    head = "measured by | model | context | sp | sequences | way | u | measured s | ours s | exposed s | closed form s"
    lines = [f"| {head} |", "|---" * 11 + "|"]
    for row in rows.values():
        cells = [
            "not measured" if row["measured"] is None else row["source"],
            row["model"],
            f"{row['seq_len']:,}",
            row["sp"],
            row["batch"],
            row["method"],
            row["ulysses"],
            "" if row["measured"] is None else f"{row['measured']:.2f}",
            *(f"{row[name]:.2f}" for name in ("seconds", "exposed_seconds", "closed_form_seconds")),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_argument, default=Path("results/parallelism.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs/parallelism.md"))
    parser.add_argument("--figure", default="docs/figures/parallelism.svg")
    parser.add_argument("--only", default="", help="rows with this in their name")
    args = parser.parse_args()
    only_compilers()
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else {}
    lines = closed_form_lines()
    for row in [row for row in ROWS if args.only in row.name] or [None]:
        if row is not None:
            rows[row.name] = compile_row(row)
            print(row.name, rows[row.name]["seconds"], rows[row.name]["over_measured"], flush=True)
        content = {
            "what": "measured: MaxText's steps, by their authors; compiled, seconds modelled: ours; lines: by counts",
            "command": "python benchmarks/parallelism.py",
            "source": "github.com/AI-Hypercomputer/maxtext, pull requests 4687 and 4893, 2026",
            "rows": {row.name: rows[row.name] for row in ROWS if row.name in rows},
            "lengths": LENGTHS,
            "lines": lines,
        }
        write_results(args.out, content)
    write_table(args.docs, BEGIN, table(content["rows"]), END)
    points = [
        (row.method, row.seq_len // row.sp, rows[row.name]["seconds"])
        for row in ROWS
        if row.name in rows and row.sp == 64
    ]
    draw_parallelism([n // 64 for n in LENGTHS], lines, points, path=args.figure)


if __name__ == "__main__":
    main()
