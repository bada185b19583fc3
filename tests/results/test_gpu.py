"""Measurements of one H200: they are sound, near the estimates, and those that the documentation quotes."""

import json
import statistics
from pathlib import Path

import pytest

from benchmarks.gpu import STEPS
from benchmarks.gpu_inference import INFERENCE
from ringformer.estimate.closed_forms.training import computation_seconds
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.hardware.shares import SHARES
from ringformer.models.families.llama import LlamaConfig, preset

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "results" / "gpu.json").read_text())
PAGE = (ROOT / "docs" / "performance.md").read_text()
PEAK_TFLOPS = 989
GiB = 2**30


def test_the_op_and_its_gradients_are_those_of_dense_attention():
    """Also for packed documents, and outside of `jit`."""
    errors = {}
    for row in RESULTS["parity"]:
        kernel = row["dtype"], row["kernel"]
        errors[kernel] = max([errors.get(kernel, 0), *(row[x] for x in ("o", "dq", "dk", "dv"))])
    assert {row["segments"] for row in RESULTS["parity"] if row["kernel"] == "cudnn"} == {1, 3, 40}
    assert {row["jitted"] for row in RESULTS["parity"]} == {True, False}
    assert errors["float32", "xla"] <= 2.1e-6 and errors["bfloat16", "xla"] <= 4.7e-3
    assert errors["bfloat16", "cudnn"] <= 4.7e-3


def test_estimated_peaks_are_near_what_was_measured():
    """Within 6%, those of train steps within 2%."""
    assert [(r["model"], r["tokens"], r["chunk"], r["cache_dtype"]) for r in RESULTS["inference"]] == INFERENCE["full"]
    for row in RESULTS["inference"]:
        assert 0.98 < row["estimate_over_allocator"] < 1.06
    for row in RESULTS["steps"]:
        assert 0.98 < row["estimate_over_allocator"] < 1.01


def step_row(tokens, kernel):
    (row,) = (r for r in RESULTS["steps"] if (r["tokens"], r["kernel"]) == (tokens, kernel))
    return row


def without_waits(row):
    """Modelled seconds of a step, without what it waits for the host."""
    return row["step_seconds_model"] - row["host_waits"] * SHARES["H200"].host_wait


def estimates():
    """Yield (name, estimate over measured) of every row that an estimate speaks of. Shares come from other measurements
    than the row: where `chips.toml` has one from a row, another row says it here."""
    other_step = step_row(16384, "xla")
    other_wait = (other_step["step_seconds"] - without_waits(other_step)) / other_step["host_waits"]
    for row in RESULTS["steps"]:
        seconds = row["step_seconds_model"]
        if (row["tokens"], row["kernel"]) == (8192, "xla"):  # the row of `host_wait`
            seconds = without_waits(row) + row["host_waits"] * other_wait
        yield f"step of {row['model']}, {row['tokens']}", seconds / row["step_seconds"]
    whole, int8, _ = RESULTS["inference"]
    other_token = int8["token_seconds"] - (int8["token_seconds_model"] - SHARES["H200"].token)
    for row in RESULTS["inference"]:
        yield f"prefill of {row['model']}, {row['cache_dtype']}", row["prefill_seconds_model"] / row["prefill_seconds"]
        seconds = row["token_seconds_model"]
        if row is whole:  # the row of `token`
            seconds += other_token - SHARES["H200"].token
        yield f"token of {row['model']}, {row['cache_dtype']}", seconds / row["token_seconds"]


def test_estimates_take_as_long_as_was_measured():
    """Every row within 15%; the page has the range."""
    found = dict(estimates())
    assert len(found) == len(RESULTS["steps"]) + 2 * len(RESULTS["inference"])
    assert {name: ratio for name, ratio in found.items() if not 0.85 <= ratio <= 1.15} == {}
    least, most = min(found.values()), max(found.values())
    for page in ("performance.md", "estimating.md", "evidence.md"):
        text = " ".join((ROOT / "docs" / page).read_text().split())
        assert f"take {least:.2f} to {most:.2f} times as long as measured" in text, page


def test_closed_forms_take_about_as_long_as_was_measured():
    """Without a compiler: train steps within 25%."""
    for name, tokens, settings in STEPS["full"]:
        model = LlamaConfig(**preset(name) | settings)
        workload = Workload(model, find_target("1xH200"), "1,1,1,1", tokens).with_kernel()[0]
        row = step_row(tokens, workload.model.kernel)
        assert 0.75 <= computation_seconds(workload) / row["step_seconds"] <= 1.25, (name, tokens)


def test_the_shares_of_the_chip_are_those_that_were_measured():
    """Each by the rule that `chips.toml` states."""
    shares = SHARES["H200"]
    assert str(shares) == f"measured: results/gpu.json, {RESULTS['date']}"
    at_32k = {row["head_dim"]: row for row in RESULTS["head_sizes"] if row["T"] == 32768}
    for kind, found in (("forward", shares.cudnn_forward), ("backward", shares.cudnn_backward)):
        measured = {size: row[f"{kind}_tflops"] / PEAK_TFLOPS for size, row in at_32k.items()}
        assert dict(found) == pytest.approx(measured, abs=0.001)
    rates = []
    for row in RESULTS["products"]:
        if 2 * row["rows"] * row["columns_in"] * row["columns_out"] > 1e12:
            rates += [row["forward_tflops"], row["backward_tflops"]]
    assert len(rates) == 4 and shares.products == pytest.approx(statistics.mean(rates) / PEAK_TFLOPS, abs=0.001)
    of_cache = {
        row["cache_dtype"]: row["gigabytes_per_second"] / 4800
        for row in RESULTS["token_attention"]
        if (row["queries_per_key_head"], row["form"]) == (1, "sums of words")
    }
    assert (shares.memory, shares.int8_cache) == pytest.approx((of_cache["compute"], of_cache["int8"]), abs=0.001)
    row = step_row(8192, "xla")
    (profile,) = (p for p in RESULTS["step_kernels"] if p["tokens"] == 8192)
    waiting = row["step_seconds"] - sum(profile["seconds_by_kind"].values())
    assert shares.host_wait == pytest.approx(waiting / row["host_waits"], rel=0.01)
    whole = RESULTS["inference"][0]
    of_bytes = whole["token_seconds_model"] - shares.token
    assert shares.token == pytest.approx(whole["token_seconds"] - of_bytes, rel=0.02)


def test_the_page_has_these_numbers():
    whole, int8, grouped = RESULTS["inference"]

    def seconds(row, key):
        return f"{row[key + '_seconds']:.1f} s, {row['prefill_mfu_causal']:.0%} | {row[key + '_seconds_model']:.1f} s |"

    def token(row):
        return f"{row['token_seconds'] * 1e3:.1f} ms | {row['token_seconds_model'] * 1e3:.1f} ms |"

    def peaks(row):
        return f"{row['peak_bytes_allocator'] / GiB:.1f} GiB | {row['peak_bytes_estimate'] / GiB:.1f} GiB |"

    def of_step(row):
        times = f"{row['step_seconds']:.2f} s | {row['step_seconds_model']:.2f} s | {row['mfu_causal']:.0%} |"
        return f"{row['tokens']:,} tokens | `{row['kernel']}` | {peaks(row)} {times}"

    rows = [
        f"| peak memory, 7B, 131,072 tokens in chunks of 16,384 | {peaks(whole)}",
        f"| prefill of the same, MFU (causal) | {seconds(whole, 'prefill')}",
        f"| prefill, Llama 3 8B, MFU (causal) | {seconds(grouped, 'prefill')}",
        f"| a token after it, 7B | {token(whole)}",
        f"| a token after it, 7B, int8 cache | {token(int8)}",
        f"| a token after it, Llama 3 8B | {token(grouped)}",
        *map(of_step, RESULTS["steps"]),
    ]
    for row in rows:
        assert row in PAGE, row
    rates = {
        (r["queries_per_key_head"], r["cache_dtype"], r["form"]): f"{r['gigabytes_per_second']:,.0f} GB/s"
        for r in RESULTS["token_attention"]
    }
    for queries, dtype, name in ((1, "compute", "bfloat16"), (1, "int8", "int8"), (4, "compute", "bfloat16")):
        heads = f"{queries} query head" + "s" * (queries > 1)
        of = [rates[queries, dtype, form] for form in ("sums of words", "product")]
        assert f"| {heads}, {name} | {of[0]} | {of[1]} |" in PAGE


def test_no_rate_is_above_the_peak():
    """A count of twice the operations would be."""
    for row in (*RESULTS["attention"], *RESULTS["head_sizes"], *RESULTS["products"]):
        rates = [value for key, value in row.items() if key.endswith("_tflops")]
        assert len(rates) == 2 and all(30 < rate < 0.8 * PEAK_TFLOPS for rate in rates), row


def test_the_page_has_the_rates_of_attention():
    """Rows of the table: of both lengths, forward and with the backward."""
    names = {
        "cuDNN's calls": "cuDNN's calls alone",
        "cudnn": "`cudnn`",
        "cudnn, one packed document": "`cudnn`, one packed document",
        "cudnn, 16 documents": "`cudnn`, 16 packed documents",
        "xla": "`xla`",
        "xla, 16 documents": "`xla`, 16 packed documents",
    }
    found = {(row["kernel"], row["T"]): row for row in RESULTS["attention"]}
    for kernel, name in names.items():
        cells = []
        for length in (16384, 65536):
            row = found[kernel, length]
            cells += [f"{row['forward_tflops']:.0f}", f"{row['both_tflops']:.0f}"]
        assert f"| {name} | {' | '.join(cells)} |" in PAGE
    for row in RESULTS["head_sizes"]:
        sizes = f"| {row['head_dim']} | {row['T']:,}, {row['heads']}, {row['key_heads']} |"
        assert f"{sizes} {row['forward_tflops']:.0f} | {row['backward_tflops']:.0f} |" in PAGE


def test_the_page_says_where_the_seconds_of_a_step_go():
    profile = RESULTS["step_kernels"][0]
    (step,) = (row for row in RESULTS["steps"] if (row["tokens"], row["kernel"]) == (32768, "cudnn"))
    seconds = profile["seconds_by_kind"]
    assert 0.9 < sum(seconds.values()) / step["step_seconds"] < 1  # the rest: no kernel ran
    text = " ".join(PAGE.split())
    shares = (
        f"{seconds['attention']:.2f} s attention, {seconds['products']:.2f} s products, "
        f"{seconds['other']:.2f} s elementwise kernels and sums, {seconds['copies']:.2f} s copies"
    )
    assert shares in text


def test_the_page_has_the_rates_of_products_and_the_cost_of_packing():
    text = " ".join(PAGE.split())
    of_shape = {(row["rows"], row["columns_in"], row["columns_out"]): row for row in RESULTS["products"]}
    shown = [of_shape[16384, 576, 1536], of_shape[16384, 2048, 8192], of_shape[16384, 4096, 14336]]
    small, middle, large = (f"{row['forward_tflops']:.0f}" for row in shown)
    assert f"{small} TFLOP/s at 16,384 × 576 × 1,536, {middle} at 16,384 × 2,048 × 8,192 and {large} at" in text
    small, middle, large = (f"{row['backward_tflops']:.0f}" for row in shown)
    assert f"those of their backward {small}, {middle} and {large}." in text
    ratios = []
    rates = {(row["kernel"], row["T"]): row for row in RESULTS["attention"]}
    for length in (16384, 65536):
        plain = rates["cudnn", length]
        packed = rates["cudnn, one packed document", length]
        ratios += [plain[key] / packed[key] for key in ("forward_tflops", "both_tflops")]
    assert f"{min(ratios):.2f} to {max(ratios):.1f} times as long" in text
