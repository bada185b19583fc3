"""Collectives of a compiled train step: gathers of weights and sums of gradients travel while a device computes."""

import math
from collections import defaultdict
from dataclasses import replace

import pytest

from ringformer.estimate.compiler.collectives import purpose
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.hardware import CHIPS
from ringformer.models.families.llama import LlamaConfig
from ringformer.parallel.gather_weight import padded_size
from tests.hlo import on_cuda, on_tpu

WEIGHTS = "weights gathered", "gradients reduced"
MODEL = LlamaConfig(
    vocab_size=2048, hidden_size=2048, num_layers=2, num_heads=16, num_kv_heads=16, head_dim=128, intermediate_size=8192
)

LAYERS = MODEL.num_layers * (4 * MODEL.hidden_size**2 + 3 * MODEL.hidden_size * MODEL.intermediate_size)
TABLES = 2 * MODEL.vocab_size * MODEL.hidden_size
"""Elements of the layers' matrices, and of the embedding and the head."""


def weight_bytes(target: str) -> dict[tuple[str, str, bool], float]:
    """Bytes of a step's gathers of weights and sums of gradients, by purpose, kind, and whether they are
    asynchronous."""
    workload = Workload(MODEL, find_target(target), "1,1,1,16", 16 * 1024)
    sums: dict[tuple[str, str, bool], float] = defaultdict(float)
    for t in compile_apart(workload).schedule.transfers:
        if purpose(t) in WEIGHTS and math.prod(t.shape) > MODEL.hidden_size:  # vectors are replicated
            sums[purpose(t), t.kind, t.asynchronous] += t.all_bytes
    return sums


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [pytest.param("v5p-32", marks=on_tpu), pytest.param("v6e-16", marks=[on_tpu, pytest.mark.slow])]
    + [pytest.param(name, marks=on_cuda) for name in ("16xA100-80", "16xH100")],
)
def test_weights_travel_while_a_device_computes(target):
    """On SparseCores, or on a stream of their own."""
    sums = weight_bytes(target)
    gathered, reduced = (sum(n for (of, _, _), n in sums.items() if of == name) for name in WEIGHTS)
    assert gathered == pytest.approx(2 * (2 * LAYERS + TABLES), rel=0.01), "bfloat16; layers forward and backward"
    assert reduced == pytest.approx(4 * (LAYERS + TABLES), rel=0.01), "float32"
    synchronous = sum(n for (_, _, asynchronous), n in sums.items() if not asynchronous)
    assert synchronous <= 0.1 * (gathered + reduced), sums


@pytest.mark.slow
@on_tpu
def test_gathers_are_asynchronous_without_sparse_cores():
    assert not CHIPS["v4"].tensor_cores.sparse_cores
    sums = weight_bytes("v4-32")
    gathered, reduced = ({key[1:]: n for key, n in sums.items() if key[0] == name} for name in WEIGHTS)
    assert gathered["all-gather", True] >= 0.9 * sum(gathered.values()), gathered
    assert reduced["all-reduce", False] == pytest.approx(2 * 4 * (LAYERS + TABLES), rel=0.01), "twice, in float32"


@pytest.mark.slow
@on_tpu
@pytest.mark.parametrize("vocab_size", [128256, 151936, 100278])
def test_gradients_of_a_vocabulary_are_scattered_while_a_device_computes(vocab_size):
    """On 64 devices, where equal shards of these vocabularies are no whole tiles: XLA would sum the whole gradient, or
    scatter it synchronously. Nothing of more than a megabyte is synchronous."""
    model = replace(MODEL, vocab_size=vocab_size)
    schedule = compile_apart(Workload(model, find_target("v5p-128"), "1,1,1,64", 64 * 1024)).schedule
    large = [t for t in schedule.transfers if t.bytes > 1e6]
    assert [t for t in large if not t.asynchronous] == []
    assert [t for t in large if t.kind == "all-reduce"] == []
    scattered = sum(t.all_bytes for t in large if t.kind == "reduce-scatter")
    tables = 2 * padded_size(vocab_size, 64) * model.hidden_size
    assert scattered == pytest.approx(4 * (LAYERS + tables), rel=0.01)
