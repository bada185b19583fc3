"""`ringformer estimate --mode=prefill|decode`: what it says and refuses, and what compilers say of small models.

Compiled on a CPU host for v5e; nothing here runs on a TPU.
"""

import json
from collections import Counter
from functools import lru_cache

import pytest

from ringformer.estimate.closed_forms.inference import cache_bytes, floor_seconds, weight_bytes
from ringformer.estimate.commands import add_estimate
from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.compiler import process as compiler_process
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.inference import search as inference_search
from ringformer.estimate.inference.report import inference_json, prefill_time
from ringformer.estimate.workloads import targets
from ringformer.estimate.workloads.inference import DECODE, FIRST_CHUNK, LOADING, PREFILL, InferenceWorkload
from ringformer.estimate.workloads.targets import find_target
from ringformer.models.families.llama import LlamaConfig
from tests.hlo import on_tpu
from tests.verbs import run_verb

B, H, K, d, L, D, F = 2, 8, 4, 128, 3, 512, 1024
SMALL = LlamaConfig(
    vocab_size=2048, hidden_size=D, intermediate_size=F, num_layers=L, num_heads=H, num_kv_heads=K, head_dim=d
)
CONTEXT = 32768


def small(mesh_dim, seq_len=CONTEXT, **more):
    workload = InferenceWorkload(SMALL, find_target("v5e:4x2"), mesh_dim, seq_len, B, name="small", **more)
    return workload.with_kernel()[0]


@lru_cache
def compiled(workload, program):
    return compile_apart(workload, program)


MESHES = ["1,1,1,8", "1,2,2,2"]


@pytest.mark.slow
@on_tpu
@pytest.mark.parametrize("mesh_dim", MESHES)
def test_the_cache_is_what_arguments_grow_by(mesh_dim):
    """Per device: total / (sp tp), within 2%; by the compiler's own count of its arguments at two contexts."""
    _, _, tp, sp = map(int, mesh_dim.split(","))
    shorter, longer = (compiled(small(mesh_dim, n), DECODE).argument_bytes for n in (CONTEXT, 2 * CONTEXT))
    total = 2 * L * B * CONTEXT * K * d * 2
    assert longer - shorter == pytest.approx(total / (sp * tp), rel=0.02)
    assert cache_bytes(small(mesh_dim)) == total // (sp * tp)
    assert shorter == pytest.approx(weight_bytes(small(mesh_dim)) + total / (sp * tp), rel=0.02)


@pytest.mark.slow
@on_tpu
@pytest.mark.parametrize("mesh_dim", MESHES)
def test_a_token_costs_no_collective_more_of_a_longer_context(mesh_dim):
    """Counted in what the reports say: kind, shape, dtype and how often."""
    counts = []
    for length in (CONTEXT, 2 * CONTEXT):
        found = inference_json(small(mesh_dim, length), DECODE, {DECODE: compiled(small(mesh_dim, length), DECODE)})
        counts.append(Counter())
        for t in found["collectives"]:
            counts[-1][t["kind"], t["dtype"], tuple(t["shape"])] += t["executed"]
        assert found["collectives_executed"] == sum(counts[-1].values()) <= 5 * L + 4
        assert {g["purpose"] for g in found["collective_groups"]} == {"activations gathered", "partial results merged"}
    assert counts[0] == counts[1]


@pytest.mark.usual("1,2,2,2")
@on_tpu
@pytest.mark.parametrize("mesh_dim", MESHES)
def test_a_token_takes_little_more_than_its_floor(mesh_dim):
    """It reads the cache once; the time model finds that in the program, on its own."""
    workload = small(mesh_dim, 2 * CONTEXT)
    found = inference_json(workload, DECODE, {DECODE: compiled(workload, DECODE)})
    assert floor_seconds(workload) < found["decode_seconds_model"] < 1.25 * floor_seconds(workload)
    assert found["tokens_per_second_model"] == pytest.approx(B / found["decode_seconds_model"])
    purposes = found["seconds_by_purpose"]
    assert max(purposes, key=purposes.get) == "attention to the cache"


@on_tpu
def test_a_prefill_computes_what_a_context_needs_and_moves_its_ring():
    """FLOPs of a device: its share of the products, and of the attention as many pairs as a balanced ring's ranks
    compute: at least the causal half, with whole diagonal chunks."""
    workload = small("1,1,1,8")
    estimates = {PREFILL: compiled(workload, PREFILL)}
    found = inference_json(workload, PREFILL, estimates)
    products = 2 * B * CONTEXT * L * (2 * D * d * (H + K) + 3 * D * F) / 8
    causal = 2 * B * CONTEXT**2 * H * d * L / 8
    assert products + causal < found["flops"] < products + 1.4 * causal
    purposes = {g["purpose"]: g for g in found["collective_groups"]}
    assert "gradients reduced" not in purposes and "weights gathered" in purposes
    ring = [t for t in found["collectives"] if t["kind"] == "collective-permute" and len(t["shape"]) > 3]
    keys = 2 * B * CONTEXT // 8 * K * d * 2  # of a rank, bf16
    assert sum(t["bytes"] * t["executed"] for t in ring) == 7 * L * keys
    assert found["chunks"] == 1 and found["prefill_seconds_model"] == found["last_chunk_seconds_model"]
    assert (
        prefill_time(workload, {PREFILL: estimates[PREFILL], FIRST_CHUNK: estimates[PREFILL]}).step
        == (found["prefill_seconds_model"])
    )


@pytest.mark.slow
@on_tpu
def test_a_context_in_chunks_takes_what_its_chunks_take():
    """Queries travel here, and read 0, 1/4, 1/2, 3/4 of the cache: the last cost, by the sum of the attended slots."""
    workload = small("1,1,1,8", prefill_chunk=CONTEXT // 4)
    assert [workload.attended_slots(i) / (CONTEXT // 8) for i in range(4)] == [0, 0.25, 0.5, 0.75]
    estimates = {name: compiled(workload, name) for name in (PREFILL, FIRST_CHUNK)}
    found = inference_json(workload, PREFILL, estimates)
    first, last = found["first_chunk_seconds_model"], found["last_chunk_seconds_model"]
    assert last > 2 * first
    assert found["prefill_seconds_model"] == pytest.approx(4 * first + 2 * (last - first))
    assert not any(t["in_ring_loop"] and t["bytes"] > CONTEXT * K * d for t in found["collectives"])


@pytest.mark.slow
@on_tpu
def test_the_verb_says_it_all(capsys):
    flags = ["--model=tiny", "--target=v5e-4", "--seq_len=8192", "--mesh_dim=1,1,1,4", "--batch_size=2"]
    assert run_verb(add_estimate, "--mode=decode", *flags, "--json", "--require_fit") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["mode"], found["model"], found["target"]) == ("decode", "tiny", "v5e-4")
    assert found["fits"] and found["cache_bytes"] == 2 * 2 * 2 * 8192 * 1 * 32 * 2 // 4
    assert found["versions"]["libtpu"] and found["loading_peak_bytes"] > found["weight_bytes"]
    assert run_verb(add_estimate, "--mode=prefill", *flags, "--prefill_chunk=4096", "--quick") == 0
    out = capsys.readouterr().out
    assert (
        "tiny, 2 x 8,192 tokens, mesh 1,1,1,4, v5e-4, kernel pallas\n  the prefill SHOULD FIT, if its kernels compile, "
        in out
    )
    assert "s for the whole context in 2 chunks of 4,096 tokens" in out and "the layout of the weights FITS" in out
    assert "their latency is not modelled" in out


@on_tpu
def test_what_does_not_fit_is_the_compilers_word(capsys):
    flags = ["--model=llama_7b", "--target=v5e-1", "--seq_len=65536", "--mesh_dim=1,1,1,1"]
    assert run_verb(add_estimate, "--mode=decode", *flags, "--require_fit") == 3
    out = capsys.readouterr().out
    assert "the decode step DOES NOT FIT: " in out and "by count: weights 12.55 GiB, cache 32.00 GiB" in out


def estimate(*flags):
    return run_verb(add_estimate, "--mode=prefill", "--target=v5e-8", "--model=tiny", *flags)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        *[
            (flag, f"{flag.partition('=')[0]} does not apply to --mode=prefill")
            for flag in (
                "--remat=full",
                "--remat_group=2",
                "--head_groups=2",
                "--offload",
                "--accumulate=1",
                "--tokens=1e9",
                "--stage=1",
                "--config=x.py",
                "--attention=ring",
                "--generate_code",
                "--closed_form",
            )
        ],
        ("--seq_len=0", "--seq_len=0 must be at least 1"),
        ("--prefill_chunk=0", "--prefill_chunk=0 must be at least 1"),
        ("--batch_size=-1", "--batch_size=-1 must be at least 1"),
        ("--config.steps=3", "unexpected arguments: --config.steps=3"),
        ("--target=v5e-3", "unknown slice 'v5e-3'"),
        ("--target=2xv5e-4", "does not apply to 2xv5e-4: its slices share nothing, so estimate one of them"),
        ("--target=2x8xH100", "does not apply to 2x8xH100: .*, with its rows: --target=8xH100"),
        ("--model=llama_9b", "unknown model 'llama_9b'"),
    ],
)
def test_flags_that_mean_nothing(flag, message, monkeypatch):
    monkeypatch.setattr(compiler_process, "compile_apart", lambda *call, **kw: pytest.fail("nobody is asked"))
    with pytest.raises(ValueError, match=message):
        estimate("--seq_len=8192", flag)


def test_a_chunk_is_of_inference():
    with pytest.raises(ValueError, match="--prefill_chunk=512 needs --mode=prefill or --mode=decode"):
        run_verb(add_estimate, "--target=v5e-8", "--seq_len=8192", "--prefill_chunk=512")


def test_without_a_compiler_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install libtpu"):
        estimate("--seq_len=8192")


def test_a_broken_compiler_is_not_called_too_large(monkeypatch, capsys):
    def breaks(workload, program):
        raise CompilerFailure(f"{program}: INTERNAL")

    monkeypatch.setattr(targets, "find_spec", lambda name: "there")
    monkeypatch.setattr(inference_search, "compile_apart", breaks)
    assert estimate("--seq_len=8192") == 1
    out, err = capsys.readouterr()
    assert not out and "so it is unknown whether it fits: prefill: INTERNAL" in err


@on_tpu
def test_loading_holds_the_largest_parameter_twice():
    """On one device what goes in is as large as what comes out."""
    workload = InferenceWorkload(SMALL, find_target("v5e-1"), "1,1,1,1", 2048, 1)
    largest = 2 * max(L * D * F, SMALL.vocab_size * D)
    assert weight_bytes(workload) + largest <= compiled(workload, LOADING).peak_bytes < 2 * weight_bytes(workload)
