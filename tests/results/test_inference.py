"""What is committed of the contexts of inference: sound by count, and what the documentation says."""

import json
from pathlib import Path

import pytest

from benchmarks.inference_contexts import AT_A_MILLION, LONGEST, MARKS, write_tables
from ringformer.estimate.workloads.inference import DECODE, PREFILL
from ringformer.estimate.workloads.targets import find_target
from ringformer.hardware.shares import SHARES
from ringformer.models.families.llama import preset

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "results" / "inference.json").read_text())
ENTRIES = [pytest.param(entry, id=name) for kind in MARKS for name, entry in RESULTS[kind].items()]


def test_all_that_was_asked_for_is_there():
    assert set(RESULTS["at_a_million"]) == set(AT_A_MILLION) and set(RESULTS["longest"]) == set(LONGEST)
    for name, case in (AT_A_MILLION | LONGEST).items():
        entry = (RESULTS["longest"] | RESULTS["at_a_million"])[name]
        assert case == tuple(entry[field] for field in ("model", "target", "compute_dtype", "cache_dtype"))
        assert {"jax", "jaxlib"} < set(entry["versions"]) and len(entry["versions"]) == 4  # and the compiler's


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_cache_is_shared_out(entry):
    """total / (sp tp) by the preset's own numbers, within 2% of what the compiled programs' arguments leave for it."""
    shape, (dp, fsdp, tp, sp) = preset(entry["model"]), map(int, entry["mesh_dim"].split(","))
    head = shape["head_dim"] * {"bfloat16": 2, "float32": 4}[entry["compute_dtype"]]
    if entry["cache_dtype"] == "int8":
        head = shape["head_dim"] + 4  # and a scale
    total = 2 * shape["num_layers"] * entry["seq_len"] * shape["num_kv_heads"] * head
    assert entry["cache_bytes"] == total // (sp * tp) and (dp, fsdp) == (1, 1)
    for program in (PREFILL, DECODE):
        left = entry[program]["argument_bytes"] - entry["weight_bytes"]
        assert left == pytest.approx(total / (sp * tp), rel=0.02)


@pytest.mark.parametrize("entry", ENTRIES)
def test_it_fits_and_takes_no_less_than_it_can(entry):
    budget = find_target(entry["target"]).budget
    assert entry["fits"] and entry["prefill"]["fits"] and entry["loading_peak_bytes"] < budget
    for program in (PREFILL, DECODE):
        assert entry["cache_bytes"] < entry[program]["argument_bytes"] <= entry[program]["peak_bytes"] <= budget
        assert f"--mode={program.split()[0]} " in entry[program]["command"]
    shape, chip = preset(entry["model"]), find_target(entry["target"]).chip
    grouped = shape["num_heads"] > shape["num_kv_heads"]
    most = 1.15 if grouped and chip.kind == "gpu" else 1.1 if entry["cache_dtype"] == "int8" else 1.05
    floor = entry[DECODE]["floor_seconds"]
    shares = SHARES[find_target(entry["target"]).generation]
    reached = shares.int8_cache if entry["cache_dtype"] == "int8" else shares.memory
    assert floor <= entry[DECODE]["decode_seconds_model"] < most * floor / reached + shares.token
    pairs = 2 * entry["seq_len"] ** 2 * shape["num_heads"] * shape["head_dim"] * shape["num_layers"]
    peak = chip.flops(entry["compute_dtype"]) * entry["devices"]
    assert entry[PREFILL]["prefill_seconds_model"] > pairs / peak


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("llama_7b/8xH100/bfloat16", 0.45),
        ("llama_7b/8xH100/bfloat16/int8", 0.45),
        ("llama_7b/8xA100-80/bfloat16", 0.45),
        ("llama_7b/v5e-256/bfloat16", 0.60),
        ("llama_7b/v5p-128/bfloat16", 0.60),
    ],
)
def test_the_share_of_the_peak_that_a_prefill_reaches(name, least):
    """Of a million tokens, counted here: 2 FLOPs a weight and token, and 4 d a pair and head."""
    entry = RESULTS["at_a_million"][name]
    shape, T = preset(entry["model"]), entry["seq_len"]
    D, F, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_heads"] * shape["head_dim"]
    weights = shape["num_layers"] * (2 * D * heads + 2 * D * shape["num_kv_heads"] * shape["head_dim"] + 3 * D * F)
    flops = 2 * T * weights + 2 * T**2 * heads * shape["num_layers"]
    peak = find_target(entry["target"]).chip.flops(entry["compute_dtype"]) * entry["devices"]
    mfu = flops / entry[PREFILL]["prefill_seconds_model"] / peak
    assert mfu == pytest.approx(entry[PREFILL]["mfu_causal_model"], rel=1e-3) and mfu >= least


def test_an_int8_cache_doubles_the_longest_context():
    longest = RESULTS["longest"]
    assert longest["llama_7b/8xH100/int8"]["seq_len"] == 2 * longest["llama_7b/8xH100"]["seq_len"]


def test_the_longest_are_the_longest():
    for entry in RESULTS["longest"].values():
        (reason,) = entry["why_not_longer"]
        assert reason.startswith(f"{2 * entry['seq_len']:,} tokens: weights and cache alone are ")
        held = 2 * entry["cache_bytes"] + entry["weight_bytes"]
        assert held > find_target(entry["target"]).budget


def test_the_committed_page_has_these_numbers(tmp_path):
    page = tmp_path / "page.md"
    page.write_text((ROOT / "docs" / "estimating.md").read_text())
    write_tables(page, RESULTS)
    assert page.read_text() == (ROOT / "docs" / "estimating.md").read_text()
    (count,) = {RESULTS["at_a_million"]["llama_7b/v5e-256/bfloat16"][DECODE]["collectives_executed"]}
    assert f"runs {count:.0f} collectives per token" in page.read_text()


def test_the_page_on_performance_has_the_token_of_grouped_heads():
    entry = RESULTS["longest"]["llama3_8b/8xH100"][DECODE]
    page = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    token, floor = (f"{1e3 * entry[key]:.1f}" for key in ("decode_seconds_model", "floor_seconds"))
    assert f"a token of Llama 3 8B at 4M tokens on 8xH100 takes {token} ms (floor {floor})" in page
