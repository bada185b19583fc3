"""A small model's programs, compiled by the TPU compiler for eight v5e chips: memory, hops, what is hidden."""

import json
import re
from dataclasses import replace
from functools import lru_cache

import pytest

from ringformer.estimate.closed_forms.training import smallest_local_length
from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.compiler import process as compiler_process
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.compiler.program_estimate import Surroundings, read_refusal
from ringformer.estimate.reports.report import estimate_json, estimate_text
from ringformer.estimate.reports.time_report import duration
from ringformer.estimate.seconds.link_loads import Network, gather_rate
from ringformer.estimate.seconds.overlap import read_schedule
from ringformer.estimate.seconds.program_seconds import USUAL, Rates
from ringformer.estimate.seconds.transfers import FROM_HOST
from ringformer.estimate.workloads.programs import EVALUATION, FIRST_STATE, INIT, PROGRAMS, TRAIN_STEP, lower_program
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import Workload
from ringformer.hardware import CHIPS
from ringformer.models.families.llama import LlamaConfig
from ringformer.models.flops import model_flops_per_token
from ringformer.parallel.mesh import make_mesh
from tests.hlo import on_cuda, on_tpu

N, LAYERS = 8, 3
MODEL = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=LAYERS, num_heads=8, num_kv_heads=2, head_dim=128
)
"""Four queries a key: a hop hides from a quarter of the tokens on, and the compiler takes half as long as for MHA."""
MHA = replace(MODEL, num_heads=2, num_kv_heads=2)
SHORT, LONG = 2048, 4096
"""Local tokens: too few on v5e to hide a hop of MODEL, and enough."""


def workload(local: int, model: LlamaConfig = MODEL, target: str = "v5e-8", mesh_dim: str = "1,1,1,8") -> Workload:
    return Workload(model, find_target(target), mesh_dim, N * local)


@lru_cache
def estimate(local: int):
    return compile_apart(workload(local))


def hops(schedule, dtype, local, model=MODEL):
    """Executed permutes of [k, v] (bfloat16) or of dk and dv (float32), a layer."""
    shape = (1, model.num_kv_heads, local, model.head_dim)
    shape = (2, *shape) if dtype == "bf16" else shape
    return sum(t.count for t in schedule.transfers if t.dtype == dtype and t.shape == shape) / LAYERS


def assert_same(with_code, without):
    """But for the time, the code itself, the seconds that it says, and what takes some KiB of another memory than the
    device's (init: 209)."""
    assert with_code.generated_code and not without.generated_code
    memory = {
        "peak_bytes": pytest.approx(without.peak_bytes + (with_code.code_bytes or 0), abs=2**18),
        "temp_bytes": pytest.approx(without.temp_bytes, abs=2**18),
    }
    if with_code.own_machine_code:
        assumed = read_schedule(with_code.text, without.schedule.rates)
        with_code = replace(with_code, own_machine_code=False, schedule=assumed)
    code = {
        "code_bytes": with_code.code_bytes,
        "generated_code": True,
        "text": with_code.text,
        "compile_seconds": with_code.compile_seconds,
    }
    assert vars(with_code) == vars(without) | memory | code


@pytest.mark.slow
@on_tpu
@pytest.mark.parametrize("program", PROGRAMS)
def test_machine_code_changes_nothing(program):
    """All that an estimate says is known when the program is scheduled, but for the bytes of its code."""
    with_code = compile_apart(workload(SHORT), program, generate_code=True)
    assert with_code.code_bytes > 0
    assert_same(with_code, compile_apart(workload(SHORT), program))


@on_tpu
@pytest.mark.slow
def test_what_is_alive_beside_a_program_counts():
    """The optimizer's two moments beside the evaluation, the parameters beside the first state, and two batches that
    the loader has ready: 2 x (4 of int32, 2 of bool) a token."""
    params = 4 * MODEL.num_params / N
    batches = 2 * (4 * 4 + 2 * 1) * SHORT
    beside = {p: compile_apart(workload(SHORT), p) for p in (EVALUATION, FIRST_STATE, INIT)}
    assert beside[EVALUATION].alive_bytes == pytest.approx(2 * params + batches, rel=0.01)
    assert beside[FIRST_STATE].alive_bytes == pytest.approx(params, rel=0.01)
    assert beside[INIT].alive_bytes == 0 and estimate(SHORT).alive_bytes == batches
    assert beside[EVALUATION].peak_bytes >= 3 * params + batches + beside[EVALUATION].temp_bytes
    assert beside[FIRST_STATE].peak_bytes >= 3 * params and beside[INIT].peak_bytes >= params
    assert {e.state_bytes for e in beside.values()} == {estimate(SHORT).state_bytes}
    assert estimate(SHORT).state_bytes == pytest.approx(3 * params, rel=0.01)
    assert all(e.fits for e in beside.values())
    assert beside[EVALUATION].schedule.flops < estimate(SHORT).schedule.flops


@pytest.mark.slow
@on_tpu
def test_the_schedule_has_the_host_memory(monkeypatch):
    """Offloaded inputs of the layers, in bf16; the embedding's output is one of them. In any environment."""
    for name in ("JAX_PLATFORMS", "ALLOW_MULTIPLE_LIBTPU_LOAD", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.delenv(name, raising=False)
    e = compile_apart(workload(LONG, replace(MODEL, offload=True)))
    assert e.fits and e.host_bytes == LAYERS * LONG * MODEL.hidden_size * 2


WIDE = replace(MHA, hidden_size=4096, intermediate_size=8192, num_heads=8, num_kv_heads=8, offload=True)
"""The transfers of layers as wide as 7B's: of a narrow one libtpu starts them too late, whatever waits."""


@pytest.mark.slow
@on_tpu
@pytest.mark.parametrize(
    ("ahead", "exposed"), [(True, (0, 0.4)), pytest.param(False, (0.5, 1.1), marks=pytest.mark.slow)]
)
def test_inputs_fetched_a_layer_ahead_are_hidden(ahead, exposed):
    """But for the first of the backward, which has nothing to travel under; in its own turn each is waited for."""
    schedule = compile_apart(workload(LONG, replace(WIDE, fetch_ahead=ahead))).schedule
    fetched = [t for t in schedule.transfers if t.kind == FROM_HOST and t.bytes > 4096]
    assert sum(t.count for t in fetched) == LAYERS + ahead
    alone = LAYERS * LONG * WIDE.hidden_size * 2 / CHIPS["v5e"].host_bandwidth
    least, most = exposed
    assert least * alone <= schedule.exposed_host_seconds < most * alone


@pytest.mark.slow
@on_tpu
@pytest.mark.parametrize("kernel", [pytest.param("xla", marks=pytest.mark.slow), "pallas"])
def test_attention_kept_in_host_memory(kernel):
    """Beside the layers' inputs their attention's outputs, of all heads, and m and l; no forward ring runs again."""
    e = compile_apart(workload(LONG, replace(MODEL, offload=True, remat="attention", kernel=kernel)))
    outputs = MODEL.num_heads * (MODEL.head_dim * 2 + 2 * 4)
    assert e.fits and e.host_bytes == LAYERS * LONG * (MODEL.hidden_size * 2 + outputs)
    assert "attention recomputed" not in e.schedule.purposes


@pytest.mark.slow
@on_tpu
@pytest.mark.parametrize("generate_code", [False, True])
def test_what_does_not_fit(generate_code):
    e = compile_apart(replace(workload(LONG), batch_size=1024), generate_code=generate_code)
    assert not e.fits and e.peak_bytes > e.hbm_bytes and e.schedule is None


@on_tpu
@pytest.mark.parametrize(
    ("name", "links"),
    [("v3:2x2", 4 / 2), ("tpu7x:2x2x2", 6 / 2), ("v3:1x1", 1 / 2), ("v5e:4x2", 4), ("v4:2x2x1", 4), ("v5p:2x2x2", 6)],
)
def test_the_cores_of_a_chip_share_its_links(name, links):
    """A gather spreads over both directions of each dimension; two devices of one chip have half of them each."""
    target = find_target(name)
    mesh = make_mesh("1,-1,1,1", target.devices())
    rates = compiler_process._rates(Workload(MODEL, target, "1,-1,1,1", LONG), mesh)
    assert gather_rate(rates.network, ()) == links * target.chip.link_bandwidth


@pytest.mark.slow
@on_tpu
@pytest.mark.parametrize("local", [pytest.param(SHORT, marks=pytest.mark.slow), LONG])
def test_hops(local):
    """n-1 in the forward, in the recomputed forward and in the backward (which may share its first), n-1 of dk and of
    dv; all over one link."""
    e = estimate(local)
    assert e.fits and e.max_link_hops == 1
    assert hops(e.schedule, "bf16", local) in (3 * (N - 1), 3 * (N - 1) - 1)
    assert hops(e.schedule, "f32", local) == 2 * (N - 1)


@pytest.mark.slow
@on_tpu
def test_memory_is_linear():
    short, long = estimate(SHORT), estimate(LONG)
    assert short.peak_bytes < long.peak_bytes <= 2.15 * short.peak_bytes


@pytest.mark.slow
@on_tpu
def test_hops_are_hidden_from_the_length_that_the_closed_form_says():
    """The closed form is of the units' full rate: LONG is more than it wants. An eighth of it is too short at the rate
    that blocks reach. What is left of LONG is outside of the loops, and no more than one hop in sp."""
    model, chip = MODEL, CHIPS["v5e"]
    for backward in (False, True):
        assert SHORT < smallest_local_length(model, chip, backward=backward) < LONG
    assert estimate(LONG // 8).schedule.exposed_in_ring_loops > 0
    schedule = estimate(LONG).schedule
    assert schedule.exposed_in_ring_loops == 0
    assert schedule.exposed_permute_bytes <= (schedule.hidden_permute_bytes + schedule.exposed_permute_bytes) / N


@on_tpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sp"),
    [
        ("v4:2x2x2", 4),
        ("v4:2x2x2", 8),
        ("v5p:2x2x2", 4),
        ("v5p:2x2x2", 8),
        ("v6e:4x2", 4),
        ("v6e:4x2", 8),
        ("v5e-8", 4),
    ],
)
def test_every_ring_is_hidden(name, sp):
    """From 32,768 local tokens, more than v6e's 24,480: one link a hop, exposed at most 1/sp of the ring's bytes."""
    e = compile_apart(Workload(MHA, find_target(name), f"1,{8 // sp},1,{sp}", sp * 32768, batch_size=8 // sp))
    s = e.schedule
    assert e.fits and e.max_link_hops == 1 and s.exposed_in_ring_loops == 0
    assert s.exposed_permute_bytes <= (s.hidden_permute_bytes + s.exposed_permute_bytes) / sp


@pytest.mark.slow
@on_tpu
def test_flops_are_those_of_the_mathematics():
    """Weights 8 a token and parameter (the forward runs twice, but for the head), attention 4 d + 4 d + 10 d for each
    visible pair of a query and a key: the count from the executed program agrees to a tenth."""
    T = N * LONG
    weights = LAYERS * (256 * 128 * (2 * MODEL.num_heads + 2 * MODEL.num_kv_heads) + 3 * 256 * 512)
    expected = (8 * weights + 6 * 256 * 512) * T + LAYERS * MODEL.num_heads * (4 + 4 + 10) * 128 * T * T / 2
    assert estimate(LONG).schedule.flops * N == pytest.approx(expected, rel=0.1)


@pytest.mark.slow
@on_cuda
@pytest.mark.parametrize("generate_code", [False, True])
def test_a_gpu_target_with_heads_of_100(generate_code):
    """As 3B has, of which JAX 0.10.2 finds no tiles for a Triton product. With offload."""
    odd = replace(MHA, hidden_size=3200, num_heads=32, num_kv_heads=32, head_dim=100, num_layers=2, offload=True)
    local = 16384
    e = compile_apart(workload(local, odd, "8xA100-80"), generate_code=generate_code)
    assert e.fits and e.host_bytes == 2 * local * 3200 * 2
    assert e.argument_bytes == pytest.approx(12 * odd.num_params / N, rel=0.01)


@pytest.mark.slow
@on_cuda
def test_a_gpu_target():
    """The same by the GPU compiler: n-1 hops, nothing exposed inside the loops, exposed at most 2/sp of all."""
    local = 16384
    gpus = workload(local, MHA, "8xA100-80")
    e = compile_apart(gpus)
    assert e.fits and e.max_link_hops is None
    assert_same(compile_apart(gpus, generate_code=True), e)
    assert hops(e.schedule, "f32", local, MHA) == 2 * (N - 1)
    s = e.schedule
    assert s.exposed_in_ring_loops == 0
    assert s.exposed_permute_bytes <= 2 / N * (s.hidden_permute_bytes + s.exposed_permute_bytes)


@on_tpu
def test_reports():
    e, w = estimate(LONG), workload(LONG)
    found = json.loads(json.dumps(estimate_json(w, e)))
    keys = (
        "fits",
        "peak_bytes",
        "hbm_bytes",
        "host_bytes",
        "temp_bytes",
        "hidden_permute_bytes",
        "compile_seconds",
        "exposed_permute_bytes",
        "exposed_gather_bytes",
        "max_link_hops",
        "step_seconds_model",
    )
    assert set(keys) <= found.keys() and found["step_seconds_model"] > 0
    text = estimate_text("a title", w, e)
    assert "FITS" in text and "longest hop 1 link" in text
    permutes = [c for c in found["collectives"] if c["kind"] == "collective-permute"]
    assert sum(c["executed"] for c in permutes if c["shape"] == [2, 1, 2, 4096, 128]) == LAYERS * hops(
        e.schedule, "bf16", LONG
    )
    groups = re.findall(r"^  (?:ring, inside its loops|ring, at their ends) +collective-permute +([\d,]+) ", text, re.M)
    assert sum(int(n.replace(",", "")) for n in groups) == sum(c["executed"] for c in permutes)
    assert sum(len(line) > 0 for line in text.splitlines()) < 50, "groups instead of hundreds of collectives"
    assert "days_model" not in found
    days = estimate_json(replace(w, tokens=1e9), e)
    assert days["days_model"] == pytest.approx(1e9 / found["tokens_per_second_model"] / 86400)
    assert days["hours_model"] == pytest.approx(24 * days["days_model"])
    assert days["device_hours_model"] == pytest.approx(N * 24 * days["days_model"])
    assert duration(3600 * days["hours_model"]) in estimate_text("a title", replace(w, tokens=1e9), e)


@on_tpu
def test_a_report_says_how_much_is_free_and_how_well_the_devices_are_used():
    e, w = estimate(LONG), workload(LONG)
    found, text = estimate_json(w, e), estimate_text("a title", w, e)
    assert found["headroom_bytes"] == w.target.budget - e.peak_bytes > 0
    assert f"{found['headroom_bytes'] / 2**30:.2f} GiB ({found['headroom_bytes'] / w.target.budget:.1%}) free" in text
    per_device = found["tokens_per_second_model"] / N / w.target.chip.flops(w.model.compute_dtype)
    assert found["mfu_palm_model"] == pytest.approx(per_device * model_flops_per_token(w.model, w.seq_len))
    attention = 12 * w.model.num_layers * w.model.num_heads * w.model.head_dim * w.seq_len
    assert found["mfu_palm_model"] - found["mfu_causal_model"] == pytest.approx(per_device * attention / 2)
    assert str(USUAL) in text and "from the batch on the devices to the updated state" in text


@on_tpu
def test_a_report_names_what_is_alive_at_the_peak():
    """Of a long context without groups, the layer inputs that are kept; all of it at most what the compiler placed."""
    e, w = estimate(LONG), workload(LONG)
    found = estimate_json(w, e)
    assert 0.8 * e.peak_bytes < found["alive_at_peak_bytes"] <= e.peak_bytes
    assert len(found["largest_buffers"]) == 10
    assert sum(b["source"].startswith("ringformer/") or b["is_argument"] for b in found["largest_buffers"]) >= 8
    for buffer in found["largest_buffers"]:
        assert buffer["type"] in estimate_text("a title", w, e)


AROUND = Surroundings(TRAIN_STEP, Rates(1.0, Network((), 1.0), 1.0, 0.0), 1, state_bytes=0, alive_bytes=0)


def test_what_does_not_fit_and_what_is_a_failure():
    """Both forms of the compiler's verdict are read; any other error of it is never taken for one."""
    messages = {
        "CompileTimeHbmOom: Ran out of memory ... Used 20.50G of 15.25G hbm. Exceeded by 4.75G.": 20.5,
        "Ran out of memory on HBM, the total memory required for HLO temporaries (16.18G) exceeds available HBM "
        "(15.25G). HLO module: jit_step.": 16.18,
    }
    w = workload(LONG)
    for message, gigabytes in messages.items():
        e = read_refusal(message, AROUND, w.target, 2.0)
        assert not e.fits and e.peak_bytes == int(gigabytes * 2**30)
        assert e.hbm_bytes == 15.25 * 2**30, "what the compiler has, whatever the table of chips says"
        assert "DOES NOT FIT" in estimate_text("a title", w, e)
        assert estimate_json(w, e)["exposed_permute_bytes"] is None
    with pytest.raises(CompilerFailure, match="Mosaic failed"):
        read_refusal("INTERNAL: Mosaic failed to compile", AROUND, w.target, 2.0)


@on_tpu
@pytest.mark.parametrize(
    ("mesh_dim", "message"),
    [
        ("1,1,1,7", "needs 7 devices, there are 8"),
        ("1,1,3,-1", "not a multiple of 3"),
        ("1,1,4,2", "tp=4 does not divide"),
    ],
)
def test_meshes_that_cannot_be(mesh_dim, message):
    with pytest.raises(ValueError, match=message):
        lower_program(workload(1024, MHA, mesh_dim=mesh_dim), TRAIN_STEP)


@on_tpu
@pytest.mark.parametrize(
    ("mesh_dim", "seq_len", "message"),
    [
        ("1,1,1,8", 1001, "1001 is not divisible by 16"),
        ("1,1,1,8", 0, "seq_len=0 must be at least 1"),
        ("1,2,1,4", 8192, "batch_size=1 is not a multiple of 2"),
    ],
)
def test_batches_that_cannot_be(mesh_dim, seq_len, message):
    with pytest.raises(ValueError, match=message):
        lower_program(Workload(MODEL, find_target("v5e-8"), mesh_dim, seq_len), TRAIN_STEP)


@on_tpu
def test_a_report_says_where_the_time_goes():
    """Purposes and exposed communication sum up to the step, which lies between its bounds; the chunk pairs' seconds
    are attention's, and the source is said."""
    e, w = estimate(LONG), workload(LONG)
    found, text = estimate_json(w, e), estimate_text("a title", w, e)
    spent = found["seconds_by_purpose"]
    assert sum(spent.values()) == pytest.approx(found["step_seconds_model"])
    least, most = found["step_seconds_bounds"]
    assert 0 < least <= found["step_seconds_model"] <= most
    assert {
        "attention forward",
        "attention recomputed",
        "attention backward",
        "projections",
        "feed-forward",
        "loss",
        "embedding",
        "optimizer",
    } <= set(spent)
    assert spent["attention backward"] > spent["attention forward"] > spent["feed-forward"]
    assert found["seconds_source"] in text and f"{next(iter(spent))}" in text.partition("seconds by purpose:")[2]


@pytest.mark.slow
@on_tpu
def test_a_step_that_may_be_skipped_has_one_state():
    """What a skipped step keeps is chosen in the loops that write the new state: beside it there is a gradient, of most
    parameters, and no second copy of anything: one of the embedding would be 15% of the state."""
    model = replace(MODEL, vocab_size=16384, hidden_size=1024, num_layers=1)
    e = compile_apart(Workload(model, find_target("v5e-1"), "1,1,1,1", 256))
    assert e.state_bytes < e.peak_bytes < 1.3 * e.state_bytes
