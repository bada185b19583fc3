"""`ringformer tables`."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def add_tables(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    """Arguments of `ringformer tables`."""
    parser.description = (
        "Search the paper's Table 3 with the real compilers: hours for all of it. Each attempt is kept; run it again "
        "to go on."
    )
    parser.add_argument("--row", help="one row, e.g. v5e-256/7b; without: all")
    parser.add_argument("--out", default="results/max_context.json", help="the file of the attempts")
    parser.add_argument("--docs", metavar="DIR", help="write tables.md and its pictures to this folder")
    parser.add_argument("--passes", type=int, help="stop after this many lengths of each cell; 0 only writes --docs")
    parser.add_argument("--only", default="", help="cells with this in their name, e.g. ring/bfloat16; or table1")
    parser.add_argument("--whole_runs", action="store_true", help="compile every program of the runs at the maxima")
    parser.add_argument("--generate_code", action="store_true", help="the same, to machine code: minutes each on TPU")
    return _tables


def _tables(args: argparse.Namespace) -> None:
    from ringformer.estimate.targets import only_compilers
    from ringformer.paper import activation_memory
    from ringformer.paper.max_context import (
        ROWS,
        SCALING,
        cells,
        fill,
        judge_maxima,
        other_compilers,
        read,
        renew_counted,
    )
    from ringformer.paper.tables_document import write_tables

    only_compilers()
    known = ROWS + SCALING
    rows = tuple(row for row in known if args.row in (None, row.name))
    if not rows:
        raise ValueError(f"no row {args.row!r}; rows: {', '.join(row.name for row in known)}")
    wanted, out = [cell for cell in cells(rows) if args.only in cell.name], Path(args.out)
    if out.is_dir():
        raise ValueError(f"--out={args.out} is a folder; name the JSON file, e.g. results/max_context.json")
    if not wanted and args.only != "table1":
        raise ValueError(f"no cell has {args.only!r} in its name; a name is like {cells(rows)[0].name}, or table1")
    if args.passes is not None and args.passes < 0:
        raise ValueError(f"--passes={args.passes} must be at least 0")
    if args.passes == 0 and not args.docs:
        raise ValueError("--passes=0 searches nothing, and without --docs=DIR nothing is written")

    def log(line: str) -> None:
        print(line, flush=True)

    if changed := renew_counted(out):
        log(f"{changed} attempts have other seconds by today's closed form")
    for line in other_compilers(read(out), wanted):
        print(line, file=sys.stderr)
    table1 = out.with_name("activations.json")
    if args.only == "table1" or not (args.row or args.only or args.passes == 0):
        activation_memory.fill(table1, log)
    if args.whole_runs or args.generate_code:
        judge_maxima(out, wanted, log, args.generate_code)
    fill(out, wanted, log, args.passes)
    if args.docs:
        write_tables(out, table1, Path(args.docs))
    pages = [f"{args.docs}/tables.md, figures/longest_contexts.svg, figures/training_cost.svg"] if args.docs else []
    print(out, *pages, sep=", ")
