"""The stages of the shipped configs, as they ship: how long a step takes at most, and how well the chips are used."""

import json
from pathlib import Path

import pytest

from benchmarks.stages import SHIPPED, stages

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "results" / "stages.json").read_text())["stages"]

MOST_SECONDS = {
    "llama3_8b_512k_8xh100/stage-2": 560,
    "llama_13b_512k_32xa100/stage-3": 340,
    "llama_13b_512k_v5e_256/stage-3": 95,
    "lwm_7b_1m/stage-5": 100,
    "qwen3_8b_512k_8xh100/run": 625,
    "llama3_8b_512k_lora_8xh100/run": 280,
    "qwen3_8b_512k_lora_8xh100/run": 310,
    "ultralong_8b_1m/run": 260,
    "ultralong_8b_4m/run": 985,
    "olmo3_7b_64k/run": 16,
}
"""Seconds of a step at the longest context, modelled: of 4M tokens, A100 and adapters 2M, UltraLong 8M."""


def test_every_stage_is_there_with_its_command():
    assert {name: row["command"] for name, row in ROWS.items()} == {name: of[1] for name, of in stages().items()}


@pytest.mark.parametrize("name", ROWS)
def test_a_stage_fits_and_uses_its_chips(name):
    row, target = ROWS[name], SHIPPED[name.partition("/")[0]].target
    floor = 0.4 if any(gpu in target for gpu in ("A100", "H100", "H200")) else 0.5
    assert row["fits"] and row["fits_host"] and row["mfu_causal_model"] > floor
    assert row["step_seconds_model"] <= MOST_SECONDS.get(name, float("inf"))
    assert not row["host_waits"]  # of loops on GPUs for their host
