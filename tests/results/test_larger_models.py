"""Models whose state does not fit on the devices: what host memory saves and costs, as compiled."""

import json
from pathlib import Path

import pytest

from benchmarks.larger_models import BEGIN, CASES, END, table
from ringformer.estimate.closed_forms.training import host_bytes, peak_bytes
from ringformer.estimate.workloads.training import estimate_command
from ringformer.hardware import GiB

ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "results" / "larger_models.json").read_text())["steps"]


def row(model: str, target: str, state: str) -> dict:
    return next(r for r in ROWS.values() if (r["model"], r["target"], r["state"]) == (model, target, state))


def test_every_case_is_there_with_its_command():
    assert {name: r["command"] for name, r in ROWS.items()} == {c.name: estimate_command(c.workload()) for c in CASES}


def test_the_page_has_these_numbers():
    page = (ROOT / "docs" / "memory.md").read_text()
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == table(ROWS)


@pytest.mark.parametrize(("target", "devices"), [("8xH100", 8), ("v5p-128", 64)])
def test_moments_and_weights_leave_the_devices(target, devices):
    none, moments, state = (row("llama3_8b", target, kind) for kind in ("none", "moments", "state"))
    of_shard = 8.03e9 / devices
    assert none["host_bytes"] == 0
    assert moments["host_bytes"] == pytest.approx(8 * of_shard, rel=0.01)
    assert state["host_bytes"] == pytest.approx(12 * of_shard, rel=0.01)
    assert none["argument_bytes"] - moments["argument_bytes"] == pytest.approx(8 * of_shard, rel=0.01)
    assert state["argument_bytes"] < 0.01 * none["argument_bytes"]
    assert none["peak_bytes"] > moments["peak_bytes"] > state["peak_bytes"]


def test_gradients_leave_the_devices():
    state, everything = row("llama3_8b", "8xH100", "state"), row("llama3_8b", "8xH100", "all")
    gradients = 4 * 8.03e9 / 8
    assert everything["host_bytes"] - state["host_bytes"] == pytest.approx(gradients, rel=0.01)
    assert state["peak_bytes"] - everything["peak_bytes"] > 0.8 * gradients
    longer = everything["step_seconds_model"] - state["step_seconds_model"]
    assert 0 < longer < 3 * gradients / 63e9, "they leave under the backward, and arrive twice"


@pytest.mark.parametrize(("target", "most"), [("8xH100", 0.15), ("v5p-128", 0.05)])
def test_moments_in_host_memory_cost_a_share_of_a_short_step(target, most):
    """5% were wanted of both: on H100, the link takes 8% of the step at its full rate, both ways at once."""
    without, moments = row("llama3_8b", target, "none"), row("llama3_8b", target, "moments")
    longer = moments["step_seconds_model"] - without["step_seconds_model"]
    assert 0 < longer <= most * moments["step_seconds_model"]


def test_what_did_not_fit_fits():
    qwen, llama = row("qwen3_32b", "8xH100", "moments"), row("llama3_70b", "8xH100", "state")
    assert qwen["fits"] and qwen["fits_host"] and qwen["seq_len"] >= 2**20 and qwen["step_seconds_model"] < 1310
    assert llama["fits"] and llama["fits_host"] and llama["seq_len"] >= 2**17
    alone = ROWS["llama3_8b 1xH100 262144 state"]
    assert alone["fits"] and alone["fits_host"] and not ROWS["llama3_8b 1xH100 524288 state"]["fits"]
    longest = ROWS["llama3_8b 1xH100 524288 all"]
    assert longest["fits"] and longest["fits_host"], "500K tokens of 8B on one GPU"
    some, kept = row("qwen3_32b", "8xH100", "state"), row("qwen3_32b", "8xH100", "all")
    assert some["fits"] and some["fits_host"] and some["step_seconds_model"] <= 1150, "with the usual host"
    assert kept["fits"] and kept["fits_host"] and kept["step_seconds_model"] < 1050, "with 320 GiB of the host a GPU"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_closed_forms_rank_them_before_they_are_compiled(case):
    compiled = ROWS[case.name]
    workload = case.workload()
    assert peak_bytes(workload) == pytest.approx(compiled["peak_bytes"], rel=0.2)
    assert host_bytes(workload) == pytest.approx(compiled["host_bytes"], rel=0.01, abs=0.05 * GiB)


def test_a_sum_across_slices_is_exposed_and_said():
    """A float32 shard of 8B over 64 devices, with its padding, at the published rate of a v5p host's network."""
    joined = row("llama3_8b", "2xv5p-128", "none")
    alone = row("llama3_8b", "v5p-128", "none")
    seconds = joined["exposed_slices_seconds"]
    assert seconds == pytest.approx(4 * 8.03e9 / 64 / 6.25e9, rel=0.06)
    assert joined["step_seconds_model"] == pytest.approx(alone["step_seconds_model"] + seconds, rel=0.02)
    page = (ROOT / "docs" / "parallelism.md").read_text()
    gib = seconds * 6.25e9 / GiB
    assert f"{gib:.2f} GiB a device, {seconds:.2f} s of {joined['step_seconds_model']:.2f} (" in page


def test_a_sum_across_groups_is_exposed_and_said():
    """A float32 shard of 8B over 8 GPUs, with its padding, at the rate of the case."""
    joined = row("llama3_8b", "2x8xH100", "none")
    alone = row("llama3_8b", "8xH100", "none")
    seconds = joined["exposed_slices_seconds"]
    assert seconds == pytest.approx(4 * 8.03e9 / 8 / 1.6e9, rel=0.01)
    assert joined["step_seconds_model"] == pytest.approx(alone["step_seconds_model"] + seconds, rel=0.02)
    tokens = 9 * seconds / alone["step_seconds_model"] * 8192  # of a device, for a tenth of the step
    page = (ROOT / "docs" / "parallelism.md").read_text()
    together = joined["step_seconds_model"]
    one = alone["step_seconds_model"]
    assert f"takes {together:.2f} s instead of {one:.2f} s on 8xH100, of which {seconds:.2f} s are this sum" in page
    assert f"at most a tenth of the step from {round(tokens, -4):,.0f} tokens a device on" in page
