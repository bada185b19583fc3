"""bfloat16 weights train as float32 ones do, and rounded to nearest they do not, by what was measured."""

import json
from pathlib import Path

import pytest

from benchmarks.quickstart_losses import SEEDS, above
from ringformer.hardware import GiB

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "results" / "params_dtypes.json").read_text())
STEPS = json.loads((ROOT / "results" / "larger_models.json").read_text())["steps"]
PAGE = (ROOT / "docs" / "memory.md").read_text()


def test_chance_trains_what_rounding_to_nearest_does_not():
    """By half a percent at most for each seed, and by five at least."""
    assert FOUND["steps"] >= 500 and tuple(FOUND["seeds"]) == SEEDS
    for name in ("bfloat16", "nearest"):
        assert FOUND[name] == above(FOUND["eval_loss"]["float32"], FOUND["eval_loss"][name])
    assert max(FOUND["bfloat16"]["above_float32"]) <= 0.005
    assert min(FOUND["nearest"]["above_float32"]) >= 0.05


def test_the_page_has_these_numbers():
    rows = zip(SEEDS, *(FOUND["eval_loss"][name] for name in ("float32", "bfloat16", "nearest")), strict=True)
    for seed, wide, narrow, nearest in rows:
        differences = f"{narrow / wide - 1:+.2%} | {nearest:.4f} | {nearest / wide - 1:+.1%}"
        assert f"| {seed} | {wide:.4f} | {narrow:.4f} | {differences} |" in PAGE
    found = FOUND["bfloat16"]
    assert (
        f"difference is {found['mean']:+.2%}, the standard deviation over the seeds {found['standard_deviation']:.2%}"
        in PAGE
    )


def test_a_compiled_step_takes_two_bytes_a_parameter_less():
    wide, narrow = (STEPS[f"llama3_8b 8xH100 8192 none{dtype}"] for dtype in ("", " bfloat16"))
    of_shard = 8.03e9 / 8
    assert wide["argument_bytes"] - narrow["argument_bytes"] == pytest.approx(2 * of_shard, rel=0.01)
    assert narrow["temp_bytes"] <= wide["temp_bytes"], "no float32 copy"
    assert f"{narrow['peak_bytes'] / GiB:.1f} GiB instead of {wide['peak_bytes'] / GiB:.1f}" in PAGE
    state, temporaries = ((wide[name] - narrow[name]) / GiB for name in ("argument_bytes", "temp_bytes"))
    assert f"{state:.1f} GiB less of state, and {temporaries:.1f} GiB less of temporaries" in PAGE
