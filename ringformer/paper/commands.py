"""`ringformer tables`."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ringformer.cli.dataclass_flags import add_flags
from ringformer.files.output_place import check_output


@dataclass
class TablesOptions:
    """Options of `ringformer tables`."""

    row: str | None = None
    """One row, e.g. v5e-256/7b; default: all."""
    again: bool = False
    """With --row: compile the row again and print it beside the file's numbers; changes no file."""
    out: str = "results/max_context.json"
    """File of the attempts."""
    passes: int | None = None
    """Stop after this many lengths per cell; 0 compiles nothing, and prints the --row from the file."""
    only: str = ""
    """Only cells whose name contains this, e.g. ring/bfloat16 (Table 3), table4, table4/v4-1024, table5; or table1."""
    whole_runs: bool = False
    """Compile every program of a run at the longest contexts."""
    generate_code: bool = False
    """Compile every program of a run at the longest contexts to machine code; this takes minutes each on TPU."""


def add_tables(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    """Add the arguments of `ringformer tables`."""
    parser.description = (
        "Search the contexts of the paper's Table 3 with the actual compilers, and compile the programs of Tables 1, "
        "4 and 5. All of it takes hours; every attempt is saved, and a second call resumes."
    )
    add_flags(parser, TablesOptions)
    return _tables


def _tables(args: argparse.Namespace) -> None:
    from ringformer.estimate.workloads.targets import only_compilers
    from ringformer.paper import activation_memory, cells, max_context, training_mfu, trajectories
    from ringformer.paper.attempts import ResultFiles, other_compilers, read, read_runs

    only_compilers()
    every_row = cells.ROWS + cells.SCALING
    rows = tuple(row for row in every_row if args.row in (None, row.name))
    if not rows:
        raise ValueError(f"--row={args.row} is not a row; rows: {', '.join(row.name for row in every_row)}")
    whole = not (args.row or args.only or args.passes == 0)
    of_rows = cells.cells(rows)
    searched = _named(of_rows, args.only)
    compared = []
    agents = []
    if whole or args.only.startswith(training_mfu.TABLE):
        compared = _named(training_mfu.cells(), args.only)
    if whole or args.only.startswith(trajectories.TABLE):
        agents = _named(trajectories.cells(), args.only)
    if check_output(args.out, "--out").is_dir():
        raise ValueError(f"--out={args.out} is a folder; give a JSON file, e.g. results/max_context.json")
    if args.row and not searched:
        raise ValueError(f"--only={args.only} is in the name of no cell of --row={args.row}, e.g. {of_rows[0].name}")
    if not (searched or compared or agents or args.only == "table1"):
        names = ", ".join(of[0].name for of in (of_rows, training_mfu.cells(), trajectories.cells()))
        raise ValueError(f"--only={args.only} is in no cell's name; names look like {names}, or table1")
    if args.passes is not None and args.passes < 0:
        raise ValueError(f"--passes={args.passes} must be at least 0")
    if args.passes == 0 and not args.row:
        raise ValueError("--passes=0 compiles nothing: give --row=NAME to print a row of the file")
    if args.again and (not args.row or args.whole_runs or args.generate_code):
        raise ValueError("--again needs --row=NAME, and can be combined only with --only, --passes and --out")

    log = partial(print, flush=True)
    files = ResultFiles.beside(Path(args.out))
    activation_memory.read(files.activations)  # fails on a damaged file before the other tables take hours
    if args.again:
        with tempfile.TemporaryDirectory() as folder:
            anew = Path(folder) / "max_context.json"
            max_context.fill(anew, searched, log, args.passes)
            columns = {files.contexts.name: read(files.contexts), "again": read(anew)}
        print(*max_context.beside_paper(searched, columns), sep="\n")
        return
    if changed := max_context.renew_counted(files.contexts):
        log(f"{changed} attempts have new seconds by the current closed form")
    searches = {files.contexts: searched, files.trajectories: agents}
    runs = read_runs(files.mfu)
    made = []
    for path, wanted in searches.items():
        for cell in wanted:
            for attempt in read(path)[cell.name]:
                made.append((cell.target, attempt))
    for cell in compared:
        for run in runs.get(cell.name, {}).values():
            made.append((cell.target, run))
    for line in other_compilers(made):
        print(line, file=sys.stderr)
    if whole or args.only == "table1":
        activation_memory.fill(files.activations, log)
    if args.passes != 0:
        training_mfu.fill(files.mfu, compared, log)
    for path, wanted in searches.items():
        if args.whole_runs or args.generate_code:
            max_context.judge_maxima(path, wanted, log, args.generate_code)
        max_context.fill(path, wanted, log, args.passes)
    if args.row:
        columns = {files.contexts.name: read(files.contexts)}
        print(*max_context.beside_paper(searched, columns), sep="\n")
    filled = [path for path, wanted in (searches | {files.mfu: compared}).items() if wanted]
    print(*filled or [files.activations], sep=", ")


def _named(cells: list[Any], part: str) -> list[Any]:
    """Return the cells whose name contains a text."""
    return [cell for cell in cells if part in cell.name]
