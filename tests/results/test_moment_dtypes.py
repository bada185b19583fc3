"""bfloat16 moments train as float32 ones do, by what was measured."""

import json
from pathlib import Path

from benchmarks.quickstart_losses import SEEDS, above

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "results" / "moment_dtypes.json").read_text())


def test_losses_are_at_most_three_thousandths_above_those_of_float32():
    assert FOUND["steps"] >= 500 and tuple(FOUND["seeds"]) == SEEDS
    losses = FOUND["eval_loss"]
    for name, value in above(losses["float32"], losses["bfloat16"]).items():
        assert FOUND[name] == value
    assert FOUND["mean"] + FOUND["standard_deviation"] <= 0.003


def test_the_page_has_these_numbers():
    page = (ROOT / "docs" / "memory.md").read_text()
    losses = FOUND["eval_loss"]
    for seed, wide, narrow in zip(SEEDS, losses["float32"], losses["bfloat16"], strict=True):
        assert f"| {seed} | {wide:.4f} | {narrow:.4f} | {narrow / wide - 1:+.2%} |" in page
    assert f"difference is {FOUND['mean']:+.2%}" in page and f"seeds {FOUND['standard_deviation']:.2%}" in page
