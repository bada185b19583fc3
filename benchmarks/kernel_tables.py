"""The tables of results/kernel_cycles.json: kernels and their shares of the ideal, by chip, and the page with them."""

import json
from pathlib import Path

from benchmarks.tables import write_table
from ringformer.estimate.kernels.pair_kernels import Pair

KERNELS = "pallas", "splash", "xla"
"""In the tables' order."""
KERNELS_OF_RINGS = "pallas", "xla"

BEGIN, END = "<!-- kernel cycles: results/kernel_cycles.json -->", "<!-- end of kernel cycles -->"
RINGS_BEGIN, RINGS_END = "<!-- rings: results/kernel_cycles.json -->", "<!-- end of rings -->"


def table(targets: dict[str, dict]) -> str:
    """The shares in markdown: a row a kernel and its shape, a column a chip."""
    cells: dict[tuple, dict[str, str]] = {}
    for target, said in targets.items():
        for row in said.get("rows", ()):
            what = {
                "packed": "segment ids",
                "heads": f"{row['heads']} query heads per key head",
                "head_dim": f"d = {row['head_dim']}",
            }
            unusual = [words for name, words in what.items() if row[name] != getattr(Pair(), name)]
            shape = ", ".join([f"{row['kind']} {row['q_chunk']} x {row['k_chunk']}", *unusual])
            masked = f" ({row['masked_step_cycles'] / row['step_cycles']:.2f})" if row["masked_step_cycles"] else ""
            place = row["kind"] != "forward", row["q_chunk"] * row["k_chunk"], row["packed"], row["heads"]
            name = *place, -row["head_dim"], KERNELS.index(row["kernel"]), f"{shape} | {row['kernel']}"
            cells.setdefault(name, {})[target] = f"{row['share_of_ideal']:.1%}{masked}"
    heads = ["ideal as a share of cycles (masked / unmasked)", "kernel", *targets]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    lines += [
        f"| {name[-1]} | {' | '.join(cells[name].get(t, 'too large') for t in targets)} |" for name in sorted(cells)
    ]
    return "\n".join(lines)


def ring_table(targets: dict[str, dict]) -> str:
    """The rings in markdown: a row a kernel, a column a chip: by cycles, and by bytes where they take longer."""
    chips = [target for target, said in targets.items() if "rings" in said]
    lines = [f"| {' | '.join(['share of the matrix units (with bytes)', *chips])} |", "|---" * (1 + len(chips)) + "|"]
    rings = {chip: {row["kernel"]: row for row in targets[chip]["rings"]} for chip in chips}
    for kernel in KERNELS_OF_RINGS:
        found = [rings[chip][kernel] for chip in chips]
        shares = [f"{row['share_of_cycles']:.1%} ({row['share_of_ideal']:.1%})" for row in found]
        lines.append(f"| {' | '.join([kernel, *shares])} |")
    return "\n".join(lines)


def write_tables(docs: Path, targets: dict[str, dict]) -> None:
    """Put each table between its two marks of a page."""
    write_table(docs, BEGIN, table(targets), END)
    write_table(docs, RINGS_BEGIN, ring_table(targets), RINGS_END)


def read_targets(path: Path) -> dict[str, dict]:
    """What is known of each target; nothing if there is no file. Raises ValueError if the tables cannot be made of
    it."""
    if not path.exists():
        return {}
    try:
        targets = json.loads(path.read_text())["targets"]
        table(targets), ring_table(targets)
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, RecursionError) as error:
        raise ValueError(
            f"{path} is no file of kernels' cycles ({error!r}); delete it, or restore it: git checkout {path}"
        ) from error
    return targets
