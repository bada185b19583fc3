"""Durations and costs of runs of any size, as a person reads them."""

import re
from dataclasses import replace

import pytest

from ringformer.data import describe_passes
from ringformer.estimate.closed_forms.training import StepTime
from ringformer.estimate.reports.time_report import device_hours, device_time, duration, mfu, step_seconds
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import preset_workload
from ringformer.models.flops import working_params
from ringformer.parallel.lora import LoraConfig
from tests.estimate.test_commands import estimate


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.000217, "0.217 ms"),
        (0.217, "217 ms"),
        (31.4, "31.4 s"),
        (119, "119 s"),
        (312, "5.2 minutes"),
        (7199, "120 minutes"),
        (13.4 * 3600, "13.4 hours"),
        (2.51 * 86400, "2.51 days"),
        (12345 * 86400, "12,345 days"),
    ],
)
def test_a_duration_has_the_unit_that_suits_it(seconds, text):
    assert duration(seconds) == text


def test_few_device_hours_are_seconds():
    assert [device_time(hours) for hours in (6e-5, 0.5, 12345)] == [
        "0.216 device-seconds",
        "0.5 device-hours",
        "12,345 device-hours",
    ]
    assert [device_hours(hours) for hours in (6e-5, 0.5, 12345)] == ["<0.01", "0.5", "12,345"]
    assert [step_seconds(seconds) for seconds in (1e-5, 0.0123, 12.34, 1234)] == ["<0.001", "0.0123", "12.3", "1,234.0"]


@pytest.mark.parametrize(
    ("passes", "text"),
    [
        (2.5e-6, "<0.01% of a pass"),
        (0.0609, "6.1% of a pass"),
        (0.5, "50% of a pass"),
        (1.0, "1 pass"),
        (3.25, "3.25 passes"),
        (12345.6, "12,346 passes"),
    ],
)
def test_a_part_of_a_pass_is_a_share(passes, text):
    assert describe_passes("store", passes, 1200) == f"store: {text} in 1,200 steps"


def test_the_estimate_of_a_small_model_has_no_powers_of_ten(capsys):
    assert estimate("--model=tiny", "--target=v5e-8", "--seq_len=4096", "--closed_form", "--tokens=100000") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("1e+05 tokens: " in line and line.endswith(" device-seconds, modelled") for line in lines)
    assert any(" ms per step (" in line for line in lines)
    assert not [line for line in lines if re.search(r"\de-\d\d", line)]


def test_frozen_weights_count_no_gradient():
    """Beside adapters, 2 FLOPs less for each weight and token, by both conventions."""
    whole = preset_workload("llama3.1_8b", find_target("8xH100"), 2**15)
    adapters = replace(whole, lora=LoraConfig(rank=16))
    time = StepTime(1.0, 0.0, whole.step_tokens)
    saved = 2 * working_params(whole.model) * whole.step_tokens / (8 * whole.target.chip.bf16_flops)
    for convention, share in mfu(whole, time).items():
        assert mfu(adapters, time)[convention] == pytest.approx(share - saved)
