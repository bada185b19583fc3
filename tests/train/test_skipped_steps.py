"""Steps with bad numbers: nothing of the optimizer moves, on any device; they are counted, told with what was in their
batches, and too many in a row stop the run."""

import dataclasses
import json
import math
import re
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import jax
import numpy as np
import pytest

from ringformer.checkpoints.verify import saved_steps
from ringformer.models.decoder import Decoder
from ringformer.runs.config import Config, DataConfig, OptimizerConfig
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from ringformer.train.skipped_steps import FEWEST, WINDOW, SkippedSteps
from ringformer.train.state import init_state
from ringformer.train.step import make_train_step
from tests.cpu_flags import cpu_environment
from tests.oracle.packing import read_store
from tests.train.poison import PoisonedData, poison, poisoned_loss
from tests.train.runs import MODEL, read_metrics, saved_arrays, write_chats

ROOT = Path(__file__).parent.parent.parent
SMALL = dataclasses.replace(MODEL, num_layers=1)


@pytest.fixture
def config(tmp_path):
    write_chats(tmp_path / "chats.json")
    return Config(
        model=SMALL,
        data=DataConfig(
            store=str(tmp_path / "store"), source=f"json:{tmp_path}/chats.json", format="messages", held_out=0.0
        ),
        optimizer=OptimizerConfig(learning_rate=0.02, warmup_steps=2, schedule="constant"),
        run_dir=str(tmp_path / "run"),
        mesh_dim="2,2,2,1",
        seq_len=64,
        batch_size=8,
        steps=6,
        seed=5,
        checkpoint_every=1,
        keep_checkpoints=6,
    )


def made(config, **options):
    run = prepare(config)
    of_run = run.program.model, run.program.optimizer, run.program.shardings, run.program.mesh
    state = init_state(*of_run, config.seed)
    step = make_train_step(*of_run, clip_norm=1.0, **options)
    return run, state, step


def shards(tree):
    return [np.array(shard.data) for x in jax.tree.leaves(tree) for shard in x.addressable_shards]


@pytest.mark.usual("up to a norm")
@pytest.mark.parametrize("skip_spikes", [False, True], ids=["any norm", "up to a norm"])
def test_nothing_but_the_number_of_a_bad_step_goes_on(skip_spikes, config, monkeypatch):
    """On each of eight devices, for one bad token of one of them; the state is donated all the same, every byte."""
    monkeypatch.setattr(Decoder, "loss", poisoned_loss)
    run, state, step = made(config, skip_spikes=skip_spikes)
    healthy = run.train_data.batch(0, run.program.batch_sharding)
    inf = (np.float32(np.inf),) if skip_spikes else ()
    compiled = step.lower(state, healthy, *inf).compile()
    of_a_device = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes == of_a_device
    state, metrics = compiled(state, healthy, *inf)
    assert int(metrics["skipped"]) == 0
    before = shards((state.params, state.opt_state))
    bad = [(poison(healthy, -1, (3, 60)), inf, (False, True)), (poison(healthy, -2, (7, 0)), inf, (True, False))]
    if skip_spikes:
        bad.append((healthy, (np.float32(float(metrics["grad_norm"]) / 4),), (True, True)))
    for batch, limit, finite in bad:
        given, number = jax.tree.leaves(state), int(state.step)
        state, metrics = compiled(state, batch, *limit)
        assert int(metrics["skipped"]) == 1 and int(state.step) == number + 1
        assert (math.isfinite(metrics["loss"]), math.isfinite(metrics["grad_norm"])) == finite
        assert all(x.is_deleted() for x in given)
        for a, b in zip(shards((state.params, state.opt_state)), before, strict=True):
            np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))
    state, metrics = compiled(state, healthy, *inf)
    assert int(metrics["skipped"]) == 0
    assert any((a != b).any() for a, b in zip(shards(state.params), before, strict=False))


def documents(config, sequence):
    """Of a sequence, by its tokens alone: those that have them at that place of the store's text."""
    run = prepare(config)
    row = run.train_data.sequences.read(sequence, np.arange(config.seq_len))
    ids = row.segment_ids
    pieces = [row.tokens[ids == i].tobytes() for i in np.unique(ids)]
    store = read_store(Path(config.data.store, "train")).documents
    return [{d for d, text in enumerate(store) if piece in text.astype(np.int32).tobytes()} for piece in pieces]


@pytest.mark.slow
def test_a_resumed_run_skips_the_same_spikes(config):
    """Down to the bits of its last checkpoint, whether it was stopped twice in between or not at all."""
    optimizer = dataclasses.replace(config.optimizer, skip_spikes=1.0, learning_rate=0.002)
    whole = dataclasses.replace(config, optimizer=optimizer, steps=72, checkpoint_every=9, max_skipped_in_a_row=72)
    train(prepare(whole))
    stopped = dataclasses.replace(whole, run_dir=f"{config.run_dir}-stopped")
    for steps in (45, 60, 72):
        train(prepare(dataclasses.replace(stopped, steps=steps)))
    rows, again = (
        [
            {name: row[name] for name in ("step", "loss", "grad_norm", "skipped") if name in row}
            for row in read_metrics(run.run_dir)
        ]
        for run in (whole, stopped)
    )
    assert again == rows and [row["step"] for row in rows] == list(range(1, 73))
    spikes = [row["step"] for row in rows if "skipped" in row]
    assert min(spikes) < 45 and any(45 < step < 60 for step in spikes) and max(spikes) > 60
    assert saved_arrays(Path(stopped.run_dir), 72) == saved_arrays(Path(whole.run_dir), 72)


@pytest.mark.slow
def test_a_run_goes_on_and_tells(config, capfd, monkeypatch):
    """The schedule counts updates; a resumed run remembers; three in a row are one too many."""
    monkeypatch.setattr(Decoder, "loss", poisoned_loss)
    config = dataclasses.replace(config, max_skipped_in_a_row=2)
    run = prepare(config)
    train(run._replace(train_data=PoisonedData(run.train_data, {2: -1, 3: -2})))
    said = re.sub(r"\s+", " ", capfd.readouterr().err)
    assert "step 2 is skipped: loss is nan; its batch: sequences 8 to 15 of seed 5" in said
    assert "step 3 is skipped: gradient norm is nan" in said and "2 steps of the run were skipped: 2, 3" in said
    rows = read_metrics(config.run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and [("skipped" in row) for row in rows] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]
    assert [{"loss", "grad_norm"} & row.keys() for row in rows[1:3]] == [{"grad_norm"}, {"loss"}]
    assert rows[1]["learning_rate"] == rows[2]["learning_rate"] == rows[3]["learning_rate"] > rows[0]["learning_rate"]
    assert [c["sequence"] for c in rows[1]["contents"]] == list(range(8, 16))
    for contents in rows[1]["contents"][:2]:
        found = documents(config, contents["sequence"])
        assert len(found) == len(contents["documents"])
        assert all(d in possible for d, possible in zip(contents["documents"], found, strict=True))
    more = dataclasses.replace(config, steps=12)
    run = prepare(more)
    with pytest.raises(FloatingPointError, match=r"3 steps in a row are skipped, 8 to 10, and max_skipped_in_a_row=2"):
        train(run._replace(train_data=PoisonedData(run.train_data, {8: -1, 9: -1, 10: -1})))
    rows = read_metrics(config.run_dir)
    assert rows[-1]["step"] == 10 and rows[-1]["skipped_steps"] == 5
    assert saved_steps(config.run_dir)[-1] == 7, "the saves of 8 and 9 wait for the end of the streak"


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["none", "all"])
def test_debug_nans_names_the_operation(config, offload, monkeypatch):
    monkeypatch.setattr(Decoder, "loss", poisoned_loss)
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, offload=offload))
    run = prepare(config)
    run = run._replace(config=dataclasses.replace(config, debug_nans=True))
    with pytest.raises(FloatingPointError) as caught:
        train(run._replace(train_data=PoisonedData(run.train_data, {3: -1})))
    said = str(caught.value)
    assert re.match(r"step 3: loss nan, gradient norm [\d.]+\. First: log at ", said)
    assert "(poisoned_loss) gives NaN on device 0, forward" in said and "(dp 0, fsdp 0, tp 0, sp 0)" in said
    assert [row["step"] for row in read_metrics(config.run_dir)] == [1, 2]


def skipped(rows, factor=10.0, told=None):
    values = dict(optimizer=OptimizerConfig(skip_spikes=factor))
    return SkippedSteps(type("C", (), values | dict(max_skipped_in_a_row=3, seed=0)), None, rows, told or {})


def test_the_largest_norm_is_the_same_after_any_resume():
    """The median and ten deviations of the window's norms, the last step's not among them; through JSON."""
    rng = np.random.default_rng(0)
    norms = rng.lognormal(size=3 * WINDOW).astype(np.float32).astype(float)
    norms[[40, 200]] = math.nan, 1e6
    rows, running = [], skipped([])
    for step, norm in enumerate(norms, 1):
        limit = running.largest_norm(step)
        seen = np.array([x for x in norms[max(0, step - 2 - WINDOW) : max(0, step - 2)] if math.isfinite(x)])
        if len(seen) < FEWEST:
            assert limit == math.inf
        else:
            assert limit == pytest.approx(np.median(seen) + 10 * np.median(abs(seen - np.median(seen))), rel=1e-12)
        if step % 37 == 0:
            assert skipped(json.loads(json.dumps(rows))).largest_norm(step) == limit
            assert skipped([], told=json.loads(json.dumps(running.notes()))).largest_norm(step) == limit, "without rows"
        running.see(step, {"grad_norm": norm, "loss": 1.0, "skipped": 0})
        assert running.largest_norm(step + 1) == running.largest_norm(step + 1)
        rows.append({"step": step} | ({"grad_norm": norm} if math.isfinite(norm) else {}))
    level = [{"step": s, "grad_norm": 2.0} for s in range(1, 100)]
    assert skipped(level).largest_norm(101) == pytest.approx(2.2), "norms that hardly differ make no spike of the next"


def test_what_is_told_does_not_change_while_it_is_written():
    running = skipped([])
    told = running.notes()
    running.steps.append(3)
    assert told["skipped_steps"] == []


CONFIG = """
from ringformer.runs.config import base_config


def get_config():
    config = base_config("tiny")
    config.data.source, config.data.store = "text:{folder}/*.txt", "{folder}/store"
    config.data.held_out, config.mesh_dim, config.cpu_devices = 0.0, "2,1,1,2", 2
    config.seq_len, config.batch_size, config.steps = 32, 2, 4
    config.optimizer.warmup_steps, config.checkpoint_every, config.keep_checkpoints = 0, 1, 4
    config.model.hidden_size, config.model.num_layers, config.run_dir = 32, 1, "{folder}/run"
    return config
"""


def state_of(folder: Path, step: int) -> dict[str, bytes]:
    """Every byte of every array of a checkpoint but the step's, by its file."""
    arrays = folder / "checkpoints" / str(step) / "default"
    found = {f"{p.parent.name}/{p.name}": p.read_bytes() for p in arrays.glob("*/*") if p.parent.name != "step"}
    return {name: data for name, data in found.items() if name.startswith(("params", "opt_state"))}


@pytest.mark.slow
def test_a_bad_number_of_one_of_two_processes_is_skipped_by_both(tmp_path):
    """It comes at the last step in process 1 alone."""
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text(f"{i} ring block key " * 20)
    (tmp_path / "config.py").write_text(CONFIG.format(folder=tmp_path))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    together = [
        f"--config={tmp_path}/config.py",
        "--distributed",
        f"--coordinator_address={address}",
        "--num_processes=2",
    ]
    command = [sys.executable, "-m", "tests.train.poison", "4"]
    processes = [
        subprocess.Popen(
            [*command, str(i), *together], cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True, env=cpu_environment()
        )
        for i in range(2)
    ]
    said = [process.communicate(timeout=540) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "skipped" in row] == [4]
    assert "step 4 is skipped: loss is nan" in said[0][1]
    states = {step: state_of(tmp_path / "run", step) for step in (1, 2, 3, 4)}
    assert len(states[3]) > 20 and states[3] == states[4]
    for other in (1, 2):
        assert states[other].keys() == states[3].keys()
        assert sum(states[other][name] != data for name, data in states[3].items()) > 20
