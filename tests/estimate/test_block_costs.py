"""Seconds of attention's blocks beyond their FLOPs, by hand."""

from dataclasses import replace

import pytest

from ringformer.estimate.closed_forms.block_costs import CYCLES_OF_A_PAIR, block_seconds
from ringformer.estimate.closed_forms.training import attention_seconds
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.hardware.shares import SHARES
from ringformer.models.families.llama import LlamaConfig, preset


def step(target, ulysses=1, batch=1, **chunks):
    model = LlamaConfig(**preset("llama3_8b"), ulysses=ulysses, **chunks)
    return Workload(model, find_target(target), "1,1,1,-1", 2**17, batch).with_kernel()[0]


def attention(w):
    return sum(attention_seconds(w).values())


def test_a_chunk_pair_costs_cycles():
    """32 heads and layers, three passes, half of the pairs of 128K tokens on 16 chips, each of 1,024 by 1,024."""
    small, tuned = (step("v5e-16", q_chunk=c, k_chunk=c) for c in (1024, 2048))
    pairs = 3 * 32 * 32 * (2**17 / 1024) ** 2 / 2 / 16
    assert block_seconds(small) == pytest.approx(0.75 * pairs * CYCLES_OF_A_PAIR / 1.5e9)
    assert block_seconds(tuned) == 0


def test_a_single_query_head_leaves_one_core_idle():
    """Of two on v5p: 32 devices hold one of 32 query heads each, with a key head. Eight hold four query heads of one
    key head, which the cores share. Two sequences are shared, too."""
    tuned = {"q_chunk": 2048, "k_chunk": 2048}
    for shared in (step("v5p-128", 4, **tuned), step("v5p-128", 8, **tuned), step("v5p-128", 32, batch=2, **tuned)):
        assert block_seconds(shared) == 0
    alone = step("v5p-128", 32, **tuned)
    assert block_seconds(alone) == pytest.approx(attention(alone))
    assert block_seconds(step("v5e-64", 32, **tuned)) == 0  # has one core
    three = replace(alone, batch_size=3)
    assert block_seconds(three) == pytest.approx(attention(three) / 3)


def test_blocks_of_gpus_add_to_accumulators():
    """o in bf16 is read, and a float32 sum read and written, after each block of a ring of eight; two if gathered."""
    w = step("8xH100")
    rate = SHARES["H100"].memory * w.target.chip.hbm_bandwidth
    added = 3 * 32 * 32 * 128 * (2 + 8) * 2**17 / 8 / rate
    assert block_seconds(w) == pytest.approx(8 * added)
    assert block_seconds(replace(w, model=replace(w.model, ring="gathered"))) == pytest.approx(2 * added)
