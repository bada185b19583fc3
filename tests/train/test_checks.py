"""A run's batches and its state: odd batches are counted, a hundred in a row or a NaN stop it."""

import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from ringformer.hardware import CHIPS, GiB
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.models.kernel_choice import with_kernel
from ringformer.parallel.runtime_environment import HOST_POOL
from ringformer.runs import step_clock
from ringformer.runs.metrics import PATIENCE, BatchWatch
from ringformer.train.checks import check_host_memory
from ringformer.train.reports import StepReports
from ringformer.train.state import check_state_finite

QUESTION = {"trained_tokens": 0, "masked_tokens": 64}
ANSWER = {"trained_tokens": 64, "masked_tokens": 0}
CHAT = {"trained_tokens": 32, "masked_tokens": 32}


def test_odd_batches_are_counted_and_said_once():
    watch = BatchWatch(chats=True)
    said = [watch.see(step, values) for step, values in enumerate([CHAT, QUESTION, ANSWER, QUESTION, CHAT], 1)]
    assert said == [
        [],
        ["the batch of step 2 has no token to train on; such batches are counted"],
        ["the batch of step 3 has no question that is masked; such batches are counted"],
        [],
        [],
    ]
    assert watch.summary(5) == [
        "2 of 5 batches had no token to train on",
        "1 of 5 batches had no question that is masked",
    ]


def test_documents_mask_nothing():
    watch = BatchWatch(chats=False)
    assert all(watch.see(step, ANSWER) == [] for step in range(2 * PATIENCE)) and watch.summary(1) == []


@pytest.mark.parametrize(("values", "kind"), [(QUESTION, "no token to train on"), (ANSWER, "no question that")])
def test_a_hundred_odd_batches_in_a_row_stop(values, kind):
    watch = BatchWatch(chats=True)
    for step in range(1, PATIENCE):
        watch.see(step, values)
    watch.see(PATIENCE, CHAT)  # it begins to count again
    for step in range(PATIENCE + 1, 2 * PATIENCE):
        watch.see(step, values)
    with pytest.raises(ValueError, match=f"100 batches in a row, up to step {2 * PATIENCE}, have {kind}"):
        watch.see(2 * PATIENCE, values)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_state_must_be_finite(bad):
    state = {"step": jnp.zeros((), jnp.int32), "params": jnp.ones((4, 4)), "moments": jnp.zeros(7)}
    check_state_finite(state, "here")
    with pytest.raises(FloatingPointError, match="the state here has numbers that are not finite"):
        check_state_finite(state | {"moments": state["moments"].at[3].set(bad)}, "here")


def device(platform: str, *memories: str) -> SimpleNamespace:
    kinds = [SimpleNamespace(kind=kind) for kind in memories]
    return SimpleNamespace(platform=platform, device_kind=platform, addressable_memories=lambda: kinds)


GPU = device("gpu", "device", "pinned_host")


def check_offload(offload: bool, of_state: int = 0, of_gradients: int = 0, devices=(GPU,)) -> None:
    """13B with 262,144 tokens of a microbatch on each GPU: the inputs of 40 layers, 5,120 in bf16, are 100 GiB."""
    model = LlamaConfig(**preset("llama_13b") | {"offload": offload})
    check_host_memory(model, 2**18, of_state, of_gradients, devices)


@pytest.fixture
def large_machine(monkeypatch):
    """A machine with 1,024 GiB."""
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**28}.get)


def test_what_is_offloaded_must_have_its_pool(monkeypatch, large_machine):
    """XLA's own pool has 64 GiB; the error names what to set."""
    monkeypatch.delenv(HOST_POOL, raising=False)
    check_offload(False)
    with pytest.raises(
        ValueError, match=rf"would keep 100.0 GiB of each GPU .* a pool of 64 GiB per GPU: set {HOST_POOL}=102"
    ):
        check_offload(True)
    monkeypatch.setenv(HOST_POOL, "101")
    with pytest.raises(ValueError, match="a pool of 101 GiB"):
        check_offload(True)
    monkeypatch.setenv(HOST_POOL, "102")
    check_offload(True)
    with pytest.raises(ValueError, match=rf"optimizer.offload and model.offload .* 110.0 GiB .* {HOST_POOL}=112"):
        check_offload(True, of_state=10 * GiB)
    with pytest.raises(ValueError, match=rf"would keep 114.0 GiB of each GPU .* {HOST_POOL}=116"):
        check_offload(True, of_state=10 * GiB, of_gradients=4 * GiB)


def test_a_machine_must_hold_what_its_devices_offload(large_machine):
    check_offload(False, 100 * GiB, devices=[device("tpu", "device", "pinned_host")] * 5)
    with pytest.raises(
        ValueError,
        match=r"optimizer.offload .* 100.0 GiB of each of 6 devices .* 1200.0 GiB in all, .* 1024.0 GiB",
    ):
        check_offload(False, 100 * GiB, devices=[device("tpu", "device", "pinned_host")] * 6)


def test_a_backend_without_host_memory_is_refused():
    check_offload(False, devices=[device("npu", "device", "unpinned_host")])
    with pytest.raises(ValueError, match=r"pinned_host memory, but a npu has only device, unpinned_host: set .*=none"):
        check_offload(False, of_state=1, devices=[device("npu", "device", "unpinned_host")])


def test_a_model_that_offloads_nothing_is_asked_for_nothing():
    """Any family that says no `offloaded_bytes`."""
    check_host_memory(object(), 1, 0, 0, [GPU])


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_kernel_of_another_platform_is_refused(platform):
    model = LlamaConfig(**preset("llama_7b") | {"kernel": "pallas"})
    with_kernel(model, "tpu", None, 0)
    with_kernel(LlamaConfig(**preset("llama_7b")), platform, None, 0)
    with_kernel(object(), platform, None, 0)
    with pytest.raises(ValueError, match=f"kernel='pallas' runs on TPU; kernel='xla' runs on {platform} too"):
        with_kernel(model, platform, None, 0)


def test_cudnn_is_for_gpus_their_heads_and_whole_sequences():
    model = LlamaConfig(**preset("llama_7b") | {"kernel": "cudnn", "head_dim": 256})
    with_kernel(model, "gpu", CHIPS["H200"], 0)
    with pytest.raises(ValueError, match="at most 128 on GPUs of compute capability 8; kernel='xla' takes 256"):
        with_kernel(model, "gpu", CHIPS["A100-80"], 0)
    with pytest.raises(ValueError, match="kernel='cudnn' runs on GPU; kernel='pallas' and 'xla' run on tpu"):
        with_kernel(model, "tpu", CHIPS["v5e"], 0)


@pytest.mark.parametrize(("held", "order"), [(True, "1 s1 2 s2 3 s3"), (False, "1 2 s1 3 s2 s3")])
def test_a_step_that_holds_the_host_is_reported_before_the_next(held, order, monkeypatch):
    """Its line does not lag a step of ten minutes. Elsewhere devices do not wait for the host."""
    said = []
    monkeypatch.setattr(step_clock, "HELD_SECONDS", 0.0 if held else 100.0)
    reports = object.__new__(StepReports)
    reports._pending, reports._last = None, time.perf_counter()
    reports._report = lambda step, metrics, moment: said.append(f"s{step}")
    for step in (1, 2, 3):
        if reports.held:
            reports.flush()
        said.append(str(step))
        reports.handed_over(step, {"loss": jnp.float32(step)}, time.perf_counter())
    reports.flush()
    assert " ".join(said) == order
