"""Seconds of packed documents, by closed forms and schedules: from one document that fills its sequence to chats."""

import json
from dataclasses import replace

import numpy as np
import pytest

from ringformer.data.packing.ring_work import in_rings, ring_work
from ringformer.estimate.closed_forms.block_costs import block_seconds
from ringformer.estimate.closed_forms.communication import exposed_seconds
from ringformer.estimate.closed_forms.training import attention_seconds, computation_seconds
from ringformer.estimate.commands import add_estimate
from ringformer.estimate.reports.packed_documents import seconds_of_documents, ways_to_pack
from ringformer.estimate.reports.time_report import duration, seconds_of
from ringformer.estimate.search.commands import add_plan
from ringformer.estimate.seconds.overlap import Schedule, Transfer
from ringformer.estimate.seconds.program_seconds import ATTENTION, OTHER, Rates, Seconds
from ringformer.estimate.workloads import targets
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import preset_workload
from tests.data.packing_samples import build
from tests.verbs import run_verb

T = 2**17


def on(target, model="llama2_7b", layout="zigzag", sp=8):
    plain = preset_workload(model, find_target(target), T, layout=layout)
    groups = plain.target.num_devices // sp
    return replace(plain, mesh_dim=f"1,{groups},1,{sp}", batch_size=groups).with_kernel()[0]


def by_closed_forms(workload):
    return computation_seconds(workload) + block_seconds(workload) + sum(exposed_seconds(workload).values())


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("target", ["v5e-64", "v5p-16"])
def test_one_document_takes_what_the_closed_form_says(target, layout):
    workload = on(target, layout=layout)
    work = ring_work(np.zeros(T, int), layout, 8, workload.model.q_chunk)
    assert seconds_of_documents(workload, {1: (1.0, work)}) == pytest.approx(by_closed_forms(workload), rel=1e-3)


def test_documents_on_rings_of_one_make_no_hops():
    """Half of the pairs of an eighth of the sequence each, and no wait for the ring."""
    workload = on("v5e-64")
    work = in_rings(np.arange(8).repeat(T // 8), "zigzag", 8, 8, workload.model.q_chunk)
    attention = sum(attention_seconds(workload).values())
    least = by_closed_forms(workload) - attention - exposed_seconds(workload)["ring"]
    seconds = seconds_of_documents(workload, {8: (1.0, work)})
    assert 1 / 8 <= (seconds - least) / attention <= 1.2 / 8
    whole = seconds_of_documents(
        workload, {1: (1.0, ring_work(np.arange(8).repeat(T // 8), "zigzag", 8, workload.model.q_chunk))}
    )
    assert whole > seconds  # the hops of a ring of 8 are not hidden under so few pairs


def test_buckets_count_by_their_shares():
    workload = on("v5e-64")
    long = ring_work(np.zeros(T, int), "zigzag", 8, workload.model.q_chunk)
    short = in_rings(np.arange(64).repeat(T // 64), "zigzag", 8, 8, workload.model.q_chunk)
    each = [seconds_of_documents(workload, {n: (1.0, work)}) for n, work in ((1, long), (8, short))]
    both = seconds_of_documents(workload, {1: (0.25, long), 8: (0.75, short)})
    assert both == pytest.approx(0.25 * each[0] + 0.75 * each[1])


def test_small_chunks_are_slower_kernels():
    workload = on("v5e-64")
    work = ring_work(np.zeros(T, int), "zigzag", 8, 256)
    slow, fast = (seconds_of_documents(workload, {1: (1.0, work)}, chunk=chunk) for chunk in (256, 1024))
    assert slow > 1.2 * fast


def test_xla_computes_pieces_beside_cudnn():
    """Documents of a rank each: XLA computes those within pieces of 1024 tokens, an eighth of a part of zigzag."""
    cudnn = on("8xH100")
    assert cudnn.model.kernel == "cudnn"
    xla = replace(cudnn, model=replace(cudnn.model, kernel="xla"))
    work = in_rings(np.arange(8).repeat(T // 8), "zigzag", 8, 8, 1024)
    one, less = (w.times(factor) for w, factor in ((work, 1.0), (work, 0.999)))
    by_cudnn, by_xla = (
        1e3 * (seconds_of_documents(w, {8: (1.0, one)}) - seconds_of_documents(w, {8: (1.0, less)}))
        for w in (cudnn, xla)
    )
    assert by_xla > 3 * by_cudnn
    pieces = 2 * 8192**2 / 8
    extra = seconds_of_documents(cudnn, {8: (1.0, one)}) - seconds_of_documents(xla, {8: (1.0, one)})
    assert extra == pytest.approx((1 - pieces / work.slowest) * (by_cudnn - by_xla), rel=0.2)


def schedule(attention, hop, cover, wait):
    transfer = Transfer("collective-permute", "bf16", (1,), 7.0, 1, True, hop, cover, wait, True, "")
    purposes = {f"{ATTENTION} forward": Seconds(overlapped=attention), OTHER: Seconds(overlapped=3.0)}
    return Schedule([transfer], 0.0, Rates(1.0, None, 1.0, 1.0), purposes)


def test_a_compiled_step_keeps_all_but_its_pairs_and_what_they_hide():
    workload = on("v5e-64")
    one = ring_work(np.zeros(T, int), "zigzag", 8, workload.model.q_chunk)
    compiled = schedule(8.0, 0.5, 1.0, 0.0)
    assert seconds_of_documents(workload, {1: (1.0, one)}, compiled) == pytest.approx(11.0, rel=1e-3)
    quarter = seconds_of_documents(workload, {1: (1.0, one.times(0.25))}, compiled)
    assert quarter == pytest.approx(3 + 2 + 7 * 0.25, rel=1e-2)  # half a second a hop, a quarter of it hidden
    assert seconds_of_documents(workload, {8: (1.0, one.times(0.25))}, compiled) == pytest.approx(5.0, rel=1e-3)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    lengths = np.clip(np.random.default_rng(0).lognormal(5, 1, 3000), 8, 4096).astype(int)
    return build(tmp_path_factory.mktemp("store") / "chats", lengths)


def test_chats_are_fastest_on_small_rings(chats):
    workload = replace(on("v5e-64"), seq_len=2**14).with_kernel()[0]
    ways = ways_to_pack(workload, str(chats.path))
    assert ways[0].way.buckets == 3 and ways[0].step < ways[-1].step
    steps = [float(f"{packed.step:.3g}") for packed in ways]
    assert steps == sorted(steps)


def test_equal_ways_are_those_with_the_least_work(chats):
    """If a step waits for its hops, chunks and layouts take equally long."""
    workload = replace(on("v5e-64"), seq_len=2**14).with_kernel()[0]
    ways = [packed for packed in ways_to_pack(workload, str(chats.path)) if packed.way.buckets == 0]
    equal = [packed.way.work.product for packed in ways if f"{packed.step:.3g}" == f"{ways[0].step:.3g}"]
    assert equal == sorted(equal)


@pytest.mark.parametrize("changes", [(), ("--config.data.packing=whole", "--config.data.buckets=2")])
def test_an_estimate_counts_the_documents_of_a_store_that_is_built(chats, capsys, monkeypatch, changes):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    command = ["--target=v5e-8", "--config=configs/quickstart.py", "--config.cpu_devices=0"]
    command += [f"--config.data.store={chats.path.parent}", "--config.mesh_dim=1,1,1,8", "--config.seq_len=8192"]
    command += ["--config.data.tokenizer=bytes", *changes]
    assert run_verb(add_estimate, *command, "--json") == 0
    counted = json.loads(capsys.readouterr().out)
    documents = counted["documents"]
    assert 0 < documents["step_seconds_model"] < 2 * counted["step_seconds_model"]
    assert documents["slowest_over_mean"] > 1.2 and documents["days_model"] > 0
    assert run_verb(add_estimate, *command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("  by the documents of its store: modelled")
    (whole,) = [line for line in lines if "with one document a sequence, modelled" in line]
    assert seconds_of(counted["step_seconds_model"]) in whole
    assert seconds_of(documents["step_seconds_model"]) in lines[2]
    assert duration(86400 * documents["days_model"]) in lines[2] and not any("device-hours" in line for line in lines)


def test_the_table_of_stages_counts_documents(chats, capsys, monkeypatch):
    """A stage's seconds, tokens a second, duration and device-hours are by the documents of its store."""
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    command = ["--target=v5e-8", "--config=configs/tiny_extension.py", "--config.cpu_devices=0"]
    command += [f"--config.data.store={chats.path.parent}"]
    assert run_verb(add_estimate, *command, "--json") == 0
    stages = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert run_verb(add_estimate, *command) == 0
    lines = capsys.readouterr().out.splitlines()
    for stage in stages:
        (row,) = [line.split() for line in lines if line.startswith(f"{stage['stage']} ") and "fit" in line]
        documents = stage["documents"]
        assert f"{documents['tokens_per_second_model']:,.0f}" in row
        assert f"{stage['tokens_per_second_model']:,.0f}" not in row
        duration_shown = duration(86400 * documents["days_model"])
        assert duration_shown in " ".join(row)


def test_tokens_that_see_their_sequence_are_no_documents(chats, capsys, monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    command = ["--target=v5e-8", "--config=configs/quickstart.py", "--json"]
    command += [f"--config.data.store={chats.path.parent}", "--config.data.packed_attention=sequence"]
    assert run_verb(add_estimate, *command) == 0
    assert json.loads(capsys.readouterr().out)["documents"] is None


def test_a_plan_packs_a_store(chats, capsys, monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    assert run_verb(add_plan, "--model=tiny", "--target=v5e-8", "--seq_len=16384", f"--store={chats.path.parent}") == 0
    text = capsys.readouterr().out
    assert "the documents of" in text and "--config.data.buckets=" in text.splitlines()[-1]


def test_a_plan_of_a_store_needs_a_length(chats):
    with pytest.raises(ValueError, match="needs --seq_len"):
        run_verb(add_plan, "--model=tiny", "--target=v5e-8", f"--store={chats.path.parent}")
