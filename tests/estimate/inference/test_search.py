"""What is compiled for a context of inference, and the longest context, with a compiler that is a formula."""

from dataclasses import replace

import pytest

from ringformer.estimate.closed_forms.inference import prefill_peak, prefill_seconds
from ringformer.estimate.inference import search as inference_search
from ringformer.estimate.inference.search import first_accepted, likely, longest
from ringformer.estimate.workloads.inference import DECODE, LOADING, PREFILL
from ringformer.hardware import GiB
from tests.estimate.inference.test_closed_forms import inference
from tests.estimate.search.test_longest_context import estimate_of


@pytest.fixture
def compiler(monkeypatch):
    """(workload, program) of what was compiled; what `refuses` says of, does not fit."""
    asked = []

    def compile_apart(workload, program):
        asked.append((workload, program))
        return replace(estimate_of(workload, fits=not compiler.refuses(workload, program)), program=program)

    def compiler():
        return asked

    compiler.refuses = lambda workload, program: False
    monkeypatch.setattr(inference_search, "compile_apart", compile_apart)
    return compiler


def say_nothing(line):
    pass


def test_the_fastest_that_should_fit_is_first_and_the_smallest_last():
    options = likely(inference("llama_7b", "8xH100", 2**20), mesh=True, chunk=True)
    assert 1 < len(options) <= 3
    first, *_, last = options
    assert prefill_peak(first) <= first.target.budget and prefill_seconds(first) <= prefill_seconds(last)
    assert prefill_peak(last) == min(map(prefill_peak, options)) and last.chunk < first.chunk
    # the whole context at once would need a second cache's worth of activations
    whole = replace(first, prefill_chunk=None)
    assert prefill_peak(whole) > first.target.budget


def test_what_is_given_is_not_searched():
    given = inference("llama_7b", "v5e-32", 2**16, "1,1,4,8", prefill_chunk=2**13)
    (only,) = likely(given, mesh=False, chunk=False)
    assert (only.mesh_dim, only.prefill_chunk) == ("1,1,4,8", 2**13)
    with pytest.raises(ValueError, match="chunks of 8200 tokens do not work on mesh 1,1,32,1: use a multiple of 32"):
        likely(replace(given, mesh_dim="1,1,32,1", prefill_chunk=8200), mesh=False, chunk=False)
    with pytest.raises(ValueError, match="chunks of 65537 tokens"):
        likely(replace(given, seq_len=2**16 + 1, prefill_chunk=None), mesh=True, chunk=True)


@pytest.mark.parametrize(
    ("model", "target", "length"),
    [
        # 512 KiB a token and 12.6 GiB of weights in 32 x 15.75 GiB; 13B: 800 KiB; 8B, a quarter of the heads: 128 KiB
        ("llama_7b", "v5e-32", 2**19),
        ("llama_13b", "v5e-32", 2**19),
        ("llama3_8b", "v5e-32", 2**21),
        ("llama_7b", "v4-1024", 2**24),
        ("llama3_8b", "v4-1024", 2**26),
    ],
)
def test_the_longest_by_count_if_the_compiler_lets_all_fit(compiler, model, target, length):
    found, (reason,) = longest(inference(model, target, 1), mesh=True, chunk=True, log=say_nothing)
    assert found.workload.seq_len == length and set(found.estimates) == {PREFILL, DECODE, LOADING}
    assert reason.startswith(f"{2 * length:,} tokens: weights and cache alone are ")


def test_a_refused_prefill_is_tried_in_smaller_chunks_then_half_the_context(compiler):
    compiler.refuses = lambda w, program: program == PREFILL and (w.seq_len > 2**18 or w.chunk > 2**16)
    found, reasons = longest(inference("llama_7b", "v5e-32", 1), mesh=True, chunk=True, log=say_nothing)
    assert found.workload.seq_len == 2**18 and found.workload.chunk <= 2**16
    assert reasons[1] == f"524,288 tokens: the prefill needs 1.00 of {15.75:.2f} GiB"
    assert [p for w, p in compiler() if w.seq_len == 2**19] == [PREFILL] * 3


def test_a_decode_step_that_does_not_fit_halves_the_context_too(compiler):
    compiler.refuses = lambda w, program: program == DECODE and w.seq_len > 2**17
    found, reasons = longest(inference("llama_7b", "v5e-32", 1), mesh=True, chunk=True, log=say_nothing)
    assert found.workload.seq_len == 2**17 and "the decode step needs" in reasons[-1]


def test_weights_that_cannot_be_loaded_are_tried_once(compiler):
    compiler.refuses = lambda w, program: program == LOADING
    found, reasons = longest(inference("llama_7b", "v5e-1", 1), mesh=True, chunk=True, log=say_nothing)
    assert found is None and "the layout of the weights needs" in reasons[-1]
    assert [program for _, program in compiler()].count(LOADING) == 1


def test_a_model_too_large_for_any_context(compiler):
    found, reasons = longest(inference("llama_65b", "v5e-1", 1), mesh=True, chunk=True, log=say_nothing)
    assert found is None and "weights and cache alone are" in reasons[0]


def test_the_last_is_the_answer_if_none_fits(compiler):
    compiler.refuses = lambda w, program: True
    options = likely(inference("llama_7b", "v5e-32", 2**19), mesh=True, chunk=True)
    found = first_accepted(options, PREFILL, say_nothing)
    assert not found.fits and found.workload == options[-1] and len(compiler()) == len(options)
    assert found.estimates[PREFILL].hbm_bytes == 15.75 * GiB
