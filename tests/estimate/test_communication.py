"""Seconds of exposed communication, by hand."""

from dataclasses import replace

import pytest

from ringformer.estimate.closed_forms.communication import exposed_seconds
from ringformer.estimate.closed_forms.training import attention_seconds, computation_seconds, memory, ring_hops
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.models.families.llama import LlamaConfig, preset

CHIP = find_target("v5p-128").chip
LAYERS, D, H, K, d = 32, 4096, 32, 8, 128
TOKENS = 1024


def step(ulysses=1, ring="one_way", target="v5p-128", sp=64, **settings):
    """LLaMA-3 8B with 1,024 tokens on a device, all layers recomputed."""
    target = find_target(target)
    model = LlamaConfig(**preset("llama3_8b") | {"kernel": "pallas", "ulysses": ulysses, "ring": ring} | settings)
    mesh = f"1,{target.num_devices // sp},1,{sp}"
    return Workload(model, target, mesh, TOKENS * sp, target.num_devices // sp).with_kernel()[0]


def test_a_ring_waits_for_what_its_blocks_do_not_hide():
    """63 hops of 4 MiB over 90 GB/s, three times in bf16 and once more in float32."""
    w = step()
    hop = 2 * 2 * TOKENS * K * d / CHIP.link_bandwidth
    link = {"forward": 2 * 63 * LAYERS * hop, "backward": 3 * 63 * LAYERS * hop}
    hidden = {name: seconds * 63 / 64 for name, seconds in attention_seconds(w).items()}
    assert link["forward"] > hidden["forward"] and link["backward"] > hidden["backward"]
    waits = sum(link.values()) - sum(hidden.values())
    assert exposed_seconds(w)["ring"] == pytest.approx(waits)
    both = exposed_seconds(step(ring="both_ways"))["ring"]
    assert both == pytest.approx(sum(max(0, link[name] / 2 - hidden[name]) for name in link))


@pytest.mark.parametrize(("window", "hops", "back"), [(257, 1, 1), (1025, 2, 2), (2**20, 63, None)])
def test_a_window_waits_for_the_keys_that_it_reaches(window, hops, back):
    """Zigzag's parts have 512 tokens, and keys move in both directions at once; gradients of several hops return as
    far."""
    w = step(window=window)
    assert w.hops(next(iter(w.windows))) == hops
    if back is None:  # a window of the whole sequence is none
        assert exposed_seconds(w)["ring"] == exposed_seconds(step())["ring"] > 0
        return
    sent = 2 * 2 * (window - 1) * 2 * K * d / (2 * CHIP.link_bandwidth)  # in bfloat16, of the two parts of a rank
    link = {"forward": 2 * LAYERS * sent, "backward": LAYERS * sent * (1 + 2 * back)}
    attention = attention_seconds(w)
    waits = sum(max(0, seconds - attention[name]) for name, seconds in link.items())
    assert exposed_seconds(w)["ring"] == pytest.approx(waits)
    gathered = step(window=window, ring="gathered")
    assert exposed_seconds(gathered) == exposed_seconds(w) and memory(gathered)["gathered keys"] == 0


def test_ranks_of_several_devices_have_fewer_and_longer_hops():
    """Of four devices: as many bytes a hop, four times the computation, a fourth of the hops; 16 copy key heads."""
    alone, four, sixteen = (ring_hops(step(ulysses=u))["forward"] for u in (1, 4, 16))
    assert four.bytes == alone.bytes and four.flops == 4 * alone.flops
    assert sixteen.bytes == 2 * alone.bytes and sixteen.flops == 16 * alone.flops
    assert exposed_seconds(step(ulysses=4))["ring"] == 0
    assert ring_hops(step(ulysses=4, ring="gathered")) == {}


def test_gathered_keys_are_hidden_by_the_own_block_and_half_of_the_others():
    """Keys of 64 ranks come over six links, three times; their float32 gradients leave twice the bytes."""
    w = step(ring="gathered")
    passes = 64 * 2 * 2 * TOKENS * K * d * LAYERS / (6 * CHIP.link_bandwidth)
    attention = attention_seconds(w)
    waits = [
        max(link / 2 - attention[name] / 64, link - attention[name] * (1 + 63 / 2) / 64)
        for name, link in (("forward", 2 * passes), ("backward", 3 * passes))
    ]
    assert min(waits) > 0 and exposed_seconds(w)["gathered keys"] == pytest.approx(sum(waits))
    odd = step(ring="gathered", num_kv_heads=2)  # a half that two cores cannot share
    whole = sum(
        link * passes / 4 - attention_seconds(odd)[name] / 64 for name, link in (("forward", 2), ("backward", 3))
    )
    assert exposed_seconds(odd)["gathered keys"] == pytest.approx(whole)
    assert exposed_seconds(w)["ring"] == exposed_seconds(step())["gathered keys"] == 0
    more = memory(w)["gathered keys"]
    assert more == 64 * TOKENS * 2 * K * d * (2 + 4) and memory(step())["gathered keys"] == 0


def test_an_exchange_of_heads():
    """q, k, v and o, in the forward, the recomputed forward and the backward; on v5e nothing hides it."""
    w = step(ulysses=4, target="v5e-16", sp=16)
    operand = 2 * TOKENS * d * (2 * H + 2 * K)
    link = 3 * LAYERS * operand / 2 / w.target.chip.link_bandwidth  # a 2x2 box
    assert exposed_seconds(w)["head exchange"] == pytest.approx(link)
    assert exposed_seconds(step(ulysses=4))["head exchange"] < link / 2
    kept = exposed_seconds(replace(w, model=replace(w.model, remat="attention")))["head exchange"]
    assert kept == pytest.approx(link * 2 / 3)
    assert exposed_seconds(step(target="v5e-16", sp=16))["head exchange"] == 0


def test_weights_decide_at_short_lengths():
    """Their gradients leave in float32 over six links; 16 times the tokens take as long to wait for them."""
    w = step(ulysses=8)
    sums = 4 * w.model.num_params / (6 * CHIP.link_bandwidth)
    assert exposed_seconds(w)["weights"] == pytest.approx(sums)
    assert exposed_seconds(replace(w, seq_len=16 * w.seq_len))["weights"] == pytest.approx(sums)
    tiny = replace(w, seq_len=w.seq_len // 8)  # gathers in bf16, with the forward and again with the backward
    forwards = computation_seconds(tiny) / 2
    assert exposed_seconds(tiny)["weights"] == pytest.approx(sums + max(0, sums - forwards))
    gpus = step(target="8xH100", sp=8, kernel="cudnn")
    assert exposed_seconds(replace(gpus, seq_len=2**19))["weights"] == 0


def test_fewer_devices_share_a_sequence():
    """Four rings of 16 have longer hops than one of 64, and as many sequences more."""
    many, few = step(), step(sp=16)
    assert few.batch_size == 4 and exposed_seconds(few)["ring"] < exposed_seconds(many)["ring"]
