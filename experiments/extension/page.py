"""Write the tables of docs/extension.md from results/extension.json.

python -m experiments.extension.page
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from experiments.extension.figure import NAMES
from experiments.extension.plans import RELEASED, THETA
from experiments.extension.results import Results

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extension.md"
RESULTS = ROOT / "results" / "extension.json"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def losses(found: Results) -> str:
    """Losses by position of every model, and what theta and each training changed."""
    models = list(found["losses"])
    trained = [model for model in models if model not in (RELEASED, THETA)]
    pairs = [(THETA, RELEASED), *((model, base) for model in trained for base in (THETA, RELEASED))]
    pairs = [pair for pair in pairs if " - ".join(pair) in found["differences"]]
    head = ["position", *(NAMES[model] for model in models), *(f"{own} − {base}" for own, base in pairs)]
    rows = []
    for index, first in enumerate(row["from"] for row in found["losses"][RELEASED]):
        nats = [f"{found['losses'][model][index]['nats']:.3f}" for model in models]
        changes = [_change(found["differences"][f"{own} - {base}"][index]) for own, base in pairs]
        rows.append([f"{first:,} to {2 * first:,}", *nats, *changes])
    return table(head, rows)


def _change(row: Results) -> str:
    """A difference in nats; one document has no interval."""
    if row["interval"] is None:
        return f"{row['nats']:+.2f}"
    low, high = row["interval"]
    return f"{row['nats']:+.2f} ({low:+.2f} to {high:+.2f})"


def training(found: Results) -> str:
    """Steps of each stage: tokens per second and memory, beside the estimate where there is one."""
    head = ["sequence", "steps", "a step", "estimated", "tokens/s", "MFU (PaLM)", "peak memory", "estimated"]
    rows = []
    for row in found["training"]:
        rows.append(
            [
                f"{row['seq_len']:,}",
                str(row["steps"]),
                f"{row['step_seconds']:.2f} s",
                f"{row['step_seconds_model']:.2f} s",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['mfu_palm']:.0%}",
                f"{row['peak_memory_gib']:.2f} GiB",
                f"{row['peak_memory_gib_estimate']:.2f} GiB",
            ]
        )
    return table(head, rows)


def tasks(found: Results) -> str:
    """Scores of tasks, and right answers of the short task and of chats."""
    rows = [
        [
            f"{row['task']}, {row['length']:,} tokens",
            NAMES[row["model"]],
            f"{row['score']:.0%} of {row['cases']}",
            f"{row['interval'][0]:.0%} to {row['interval'][1]:.0%}",
        ]
        for row in found["tasks"]
    ]
    rows += counted("continuations of passages, short", found["short_task"])
    rows += counted("chats", found["chats"])
    return table(["task", "model", "score", "95% interval"], rows)


def counted(name: str, found: Sequence[Results]) -> list[list[str]]:
    """Rows of right answers."""
    rows = []
    for row in found:
        low, high = row["interval"]
        share = f"{row['right']} of {row['questions']}"
        rows.append([name, NAMES[row["model"]], share, f"{low:.0%} to {high:.0%}"])
    return rows


def longer(found: Results) -> str:
    """Losses by position of the documents that are longer than those of the first table."""
    ((_, of_longest),) = found["longer"].items()
    return losses(of_longest)


WRITERS = {"losses": losses, "longer": longer, "training": training, "tasks": tasks}


def written(page: str, results: Results) -> str:
    """Return the page with its tables as the results have them."""

    def of_results(match: re.Match[str]) -> str:
        form, what = match["form"], match["what"]
        return f"{match['begin']}\n{WRITERS[what](results[form])}\n\n{match['end']}"

    block = r"(?P<begin><!-- (?P<form>\w+) (?P<what>\w+): .*? -->\n).*?(?P<end><!-- end of (?P=form) (?P=what) -->)"
    return re.sub(block, of_results, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), json.loads(RESULTS.read_text())))
