"""Collectives of a compiled train step: gathers and sums on SparseCores travel while the TensorCores compute."""

import math
from collections import defaultdict

import pytest

from ringformer.estimate.compiler.collectives import purpose
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.targets import find_target
from ringformer.estimate.workload import Workload
from ringformer.hardware import CHIPS
from ringformer.models.llama_config import LlamaConfig
from tests.hlo import on_tpu

WEIGHTS = "weights gathered", "gradients reduced"
MODEL = LlamaConfig(
    vocab_size=2048, hidden_size=2048, num_layers=2, num_heads=16, num_kv_heads=16, head_dim=128, intermediate_size=8192
)


def weight_bytes(target: str) -> dict[tuple[str, str, bool], float]:
    """Bytes of a step's gathers of weights and sums of gradients, by purpose, kind, and whether they are
    asynchronous."""
    workload = Workload(MODEL, find_target(target), "1,1,1,16", 16 * 1024)
    sums: dict[tuple[str, str, bool], float] = defaultdict(float)
    for t in compile_apart(workload).schedule.transfers:
        if purpose(t) in WEIGHTS and math.prod(t.shape) > MODEL.hidden_size:  # vectors are replicated
            sums[purpose(t), t.kind, t.asynchronous] += t.all_bytes
    return sums


@on_tpu
@pytest.mark.parametrize("target", ["v6e-16", "v5p-32"])
def test_sparse_cores_run_what_weights_need(target):
    assert CHIPS[target.partition("-")[0]].tensor_cores.sparse_cores
    sums = weight_bytes(target)
    gathered, reduced = (sum(n for (of, _, _), n in sums.items() if of == name) for name in WEIGHTS)
    in_step = 2 * sum(size for _, size in matrices())  # bfloat16
    assert gathered >= 1.9 * in_step, "each layer's weights forward and backward; v5p sends them twice"
    assert reduced >= 0.99 * 2 * in_step, "float32"
    synchronous = sum(n for (_, _, asynchronous), n in sums.items() if not asynchronous)
    assert synchronous <= 0.1 * (gathered + reduced), sums


@on_tpu
@pytest.mark.parametrize("target", ["v5e-16", "v4-32"])
def test_elsewhere_most_gradients_are_not_sent_twice(target):
    """Three quarters are reduce-scattered; the others are reduced on every device, which takes twice the bytes."""
    assert not CHIPS[target.partition("-")[0]].tensor_cores.sparse_cores
    sums = weight_bytes(target)
    scattered, reduced = (
        sum(n for (of, kind, _), n in sums.items() if of == WEIGHTS[1] and kind == name)
        for name in ("reduce-scatter", "all-reduce")
    )
    assert scattered >= 3 * reduced / 2, sums


def matrices():
    """Matrices of the model, and their numbers of elements."""
    sizes, L = MODEL.sizes, MODEL.num_layers
    attention, feedforward = 4 * L * sizes["D"] ** 2, 3 * L * sizes["D"] * sizes["F"]
    yield from (("attention", attention), ("feed-forward", feedforward), ("embedding, head", 2 * 2048 * sizes["D"]))
