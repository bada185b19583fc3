"""What the committed steps with kernels say: how much faster than with XLA's blocks, and what they use of the chips."""

import json
from pathlib import Path

import pytest

from benchmarks.kernel_steps import STEPS as FLAGS
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.models.flops import model_flops_per_token
from ringformer.parallel.runtime_environment import GPU_FRACTION

ROOT = Path(__file__).parents[2]
STEPS = json.loads((ROOT / "results" / "kernel_steps.json").read_text())["steps"]


def test_every_step_was_compiled_fits_and_hides_its_ring():
    assert {name: step["command"] for name, step in STEPS.items()} == {
        name: f"ringformer estimate {flags}" for name, flags in FLAGS.items()
    }
    for step in STEPS.values():
        assert step["fits"] and not step["reasons_against"] and step["peak_bytes"] <= step["hbm_bytes"]
        on_gpu = "xH100" in step["command"]
        assert step["exposed_in_ring_loops_bytes"] == 0 and step["max_link_hops"] == (None if on_gpu else 1)
        assert ("by HBM bytes" if on_gpu else "by machine code") in step["seconds_source"]


def seconds(name):
    return STEPS[name]["step_seconds_model"]


def test_kernels_are_faster_than_blocks_of_xla():
    """On v5e, where XLA's logits stay on the chip with four head groups, and on v5p, where they never do."""
    assert seconds("7b/pallas") <= 0.7 * seconds("7b/xla")
    assert seconds("8b/pallas") <= 0.5 * seconds("8b/xla")
    assert seconds("7b/pallas/one head group") == pytest.approx(seconds("7b/pallas"), rel=0.005)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("7b/pallas/attention kept", 0.8),
        ("7b/pallas/attention kept, longest", 0.8),
        ("7b on v4/attention kept, longest", 0.7),
    ],
)
def test_mfu_with_attention_kept(name, wanted):
    """Of the causal pairs alone: below the ceiling of 6 products counted and 7 executed."""
    assert wanted <= STEPS[name]["mfu_causal_model"] < 6 / 7


def test_twice_the_longest_context_with_attention_kept_does_not_fit():
    """What it needs besides the state grows with the context: twice as much is more than the device has."""
    for name, devices in (("7b/pallas", 256), ("7b on v4", 512)):
        step = STEPS[f"{name}/attention kept, longest"]
        state = 20 * LlamaConfig(**preset("llama_7b")).num_params / devices
        assert 2 * step["peak_bytes"] - state > step["hbm_bytes"]


def test_llama3_8b_on_one_node_reaches_as_far_as_the_best_published():
    """With packed documents; with at most 2 TB of host memory for the node."""
    step = STEPS["8b on 8xH100"]
    assert "--seq_len=5242880" in step["command"] and 8 * step["host_bytes"] <= 2e12
    assert step["peak_bytes"] <= GPU_FRACTION * step["hbm_bytes"]


def test_mfu_is_that_of_its_seconds():
    """PaLM's convention without the masked half, at 197 TFLOP/s of 256 chips."""
    flops = model_flops_per_token(LlamaConfig(**preset("llama_7b")), 8388608, causal=True) * 8388608
    by_hand = flops / (256 * 197e12) / seconds("7b/pallas/attention kept")
    assert STEPS["7b/pallas/attention kept"]["mfu_causal_model"] == pytest.approx(by_hand, rel=0.01)


def test_the_page_says_these_numbers():
    page = (ROOT / "docs" / "performance.md").read_text()
    for name in (
        "7b/xla",
        "7b/pallas",
        "7b/pallas/attention kept",
        "7b/pallas/attention kept, longest",
        "7b on v4/attention kept, longest",
    ):
        step = STEPS[name]
        assert f"| {seconds(name):,.0f} s | {step['mfu_causal_model']:.1%} | {step['peak_bytes'] / 2**30:.2f}" in page
    one, four = (f"{seconds(f'8b/{kernel}'):,.0f} s" for kernel in ("xla", "pallas"))
    assert one in page and four in page
