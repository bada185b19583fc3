"""Add what `ringformer estimate` says of the GPU's training to its results; needs the compiler for the GPU, no GPU.

    python -m experiments.extension.estimates OUT --target=1xH200 --results=results/extension.json

OUT is a folder of the study that has the model and the documents of the form `gpu` or, with the same inputs, `toy`.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.extension.plans import LONG, THETA
from experiments.extension.study import ROOT
from ringformer.hardware import GiB


def estimates(out: Path, target: str) -> list[dict[str, Any]]:
    """Return the estimate of each stage, as `ringformer estimate --json` prints it."""
    words = ["--config=experiments/extension/long_config.py", f"--target={target}", "--json"]
    words += [f"--config.init_from={out / 'models' / THETA}", f"--config.data.store={out / 'train'}"]
    words += [f"--config.data.tokenizer={out / 'models' / THETA}"]
    command = [sys.executable, "-m", "ringformer", "estimate", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--results", type=Path, required=True)
    args = parser.parse_args()
    content = json.loads(args.results.read_text())
    stages = [row for row in content["gpu"]["training"] if row["model"] == LONG]
    found = estimates(args.out.absolute(), args.target)
    for row, estimate in zip(stages, found, strict=True):
        row["step_seconds_model"] = round(estimate["documents"]["step_seconds_model"], 3)
        row["peak_memory_gib_estimate"] = round(estimate["peak_bytes"] / GiB, 4)
        print(
            f"{row['seq_len']:,}: {row['step_seconds']} s, estimated {row['step_seconds_model']} s; "
            f"{row['peak_memory_gib']} GiB, estimated {row['peak_memory_gib_estimate']} GiB"
        )
    args.results.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
