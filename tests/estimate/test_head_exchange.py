"""Exchanges of heads and hops of a ring in compiled programs: their bytes, and how many are asynchronous."""

import math

import pytest

from ringformer.estimate.compiler.collectives import purpose
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.seconds.link_loads import QUEUED
from ringformer.estimate.workloads.programs import EVALUATION, TRAIN_STEP
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.hardware import CHIPS
from ringformer.models.families.llama import LlamaConfig
from tests.hlo import on_tpu

H, D, LOCAL, LAYERS = 8, 128, 1024, 2


def transfers(target: str, ulysses: int, key_heads: int, program: str = TRAIN_STEP):
    """Exchanges and hops of arrays of several dimensions, in a program over one ring of a target's devices."""
    model = LlamaConfig(
        vocab_size=256,
        hidden_size=H * D,
        num_layers=LAYERS,
        num_heads=H,
        num_kv_heads=key_heads,
        head_dim=D,
        intermediate_size=512,
        ulysses=ulysses,
        kernel="pallas",
        remat="full",
    )
    n = find_target(target).num_devices
    workload = Workload(model, find_target(target), f"1,1,1,{n}", n * LOCAL)
    schedule = compile_apart(workload.with_kernel()[0], program).schedule
    return [t for t in schedule.transfers if len(t.shape) > 2 and (t.kind == "all-to-all" or "ring" in purpose(t))]


@pytest.mark.slow
@on_tpu
@pytest.mark.parametrize(
    ("target", "ulysses", "key_heads"), [("v5p:2x2x2", 2, 4), ("v6e:4x2", 4, 2), ("v5e:4x2", 4, 4), ("v4:2x2x2", 4, 4)]
)
def test_exchanges_and_hops_of_a_layer(target, ulysses, key_heads):
    """T tokens of H heads go to heads and back, and the copied key heads go there, three times: forward, forward again
    and backward, where gradients of copies are float32. Keys and values then make a hop less than the ring has ranks,
    and so do their float32 gradients. All hops are asynchronous, and so are the exchanges, except on v5e."""
    found = transfers(target, ulysses, key_heads)
    sent = {kind: sum(t.all_bytes for t in found if t.kind == kind) / LAYERS for kind in QUEUED}
    ranks, copied = 8 // ulysses, math.lcm(ulysses, key_heads)
    head = 2 * LOCAL * D  # bytes of a head's tokens in bfloat16
    gradients = 2 * copied * (2 if copied > key_heads else 1)
    assert sent["all-to-all"] == pytest.approx(head * (3 * 2 * H + 2 * 2 * copied + gradients), rel=0.01)
    hops = [pytest.approx((5 * (ranks - 1) - shared) * 2 * head * copied, rel=0.01) for shared in (0, 1)]
    assert sent["collective-permute"] in hops, "the backward may share its first hop"
    asynchronous = CHIPS[target.partition(":")[0]].tensor_cores.async_all_to_all
    assert asynchronous == (not target.startswith("v5e"))
    assert all(t.asynchronous == (asynchronous or t.kind != "all-to-all") for t in found)


@pytest.mark.slow
@on_tpu
def test_an_evaluation_exchanges_heads_asynchronously():
    exchanges = [t for t in transfers("v5p:2x2x2", 4, 2, EVALUATION) if t.kind == "all-to-all"]
    assert exchanges and all(t.asynchronous for t in exchanges)
