"""A run is a function of its config: the same losses as ever, in every process, after a kill, on another mesh, and the
same examples however many hosts read them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from ringformer.checkpoints.manager import Checkpoints
from ringformer.checkpoints.retention import Keep
from ringformer.ops.layouts import permutation
from ringformer.parallel.parameters import weight_shardings
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from ringformer.train.state import abstract_state, init_state, state_shardings
from ringformer.train.step import make_train_step
from tests.data.packing_samples import LENGTHS, build
from tests.helpers import relative_error, unpadded
from tests.oracle import packing
from tests.train import golden, stream_process
from tests.train.runs import saved_arrays
from tests.train.states import OPTIMIZER
from tests.train.test_step import CONFIG, setup

ROOT = Path(__file__).parent.parent.parent
VERSION = jax.__version__


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("golden")


@pytest.fixture(scope="module")
def whole(folder):
    """The golden run, in this process and never stopped."""
    config = golden.golden_config(folder)
    train(prepare(config))
    return Path(config.run_dir)


def as_numbers(version: str) -> tuple[int, ...]:
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split("."))


def nearest(version: str, known: list[str]) -> str:
    """The version that is the same, or else the last one before, or else the first."""
    ordered = sorted(known, key=as_numbers)
    return next((v for v in reversed(ordered) if as_numbers(v) <= as_numbers(version)), ordered[0])


@pytest.mark.slow
def test_the_losses_are_those_that_are_kept(whole):
    """Twenty steps to 1e-4 with a JAX whose file there is; with another to 1e-2 with the nearest one's."""
    known = [path.stem for path in golden.FOLDER.glob("*.json")]
    version = nearest(VERSION, known)
    kept = json.loads((golden.FOLDER / f"{version}.json").read_text())
    found = golden.numbers(whole)
    assert len(kept["loss"]) == len(found["loss"]) == golden.STEPS and kept["loss"][-1] < 0.8 * kept["loss"][0]
    tolerance = 1e-4 if version == VERSION else 1e-2
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(
            found[name],
            kept[name],
            rtol=tolerance,
            err_msg=f"{name} of JAX {VERSION} against the file of {version}. There is no file for a new JAX until "
            "`python -m tests.train.golden` writes it; look at what changed before",
        )


def test_the_nearest_version():
    known = ["0.10.2", "0.12.0.1", "0.9.10"]
    pairs = {"0.10.2": "0.10.2", "0.11.0": "0.10.2", "0.12.0.1": "0.12.0.1", "0.13": "0.12.0.1", "0.9.2": "0.9.10"}
    assert {v: nearest(v, known) for v in pairs} == pairs


RUN = """
import tests.conftest
from pathlib import Path
from ringformer.train.loop import train
from ringformer.train.prepare import prepare
from tests.train.golden import golden_config
train(prepare(golden_config(Path({folder!r}), {run!r})))
"""


def start(folder: Path, run: str) -> subprocess.Popen:
    environment = os.environ | {"XLA_FLAGS": ""}  # what this process has, conftest adds again
    return subprocess.Popen(
        [sys.executable, "-c", RUN.format(folder=str(folder), run=run)],
        cwd=ROOT,
        text=True,
        env=environment,
        stderr=subprocess.PIPE,
    )


@pytest.mark.slow
def test_a_killed_process_goes_on_to_the_same_bits(whole, folder):
    """SIGKILL after step 10, which is not saved: another process has the losses of this one's before it, a third those
    after it, and the same bits at the end."""
    run_dir = folder / "killed"
    process, metrics = start(folder, "killed"), run_dir / "metrics.jsonl"
    while not (metrics.exists() and '"step": 10,' in metrics.read_text()):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    before = golden.numbers(run_dir) if metrics.read_text().endswith("\n") else None
    again = start(folder, "killed")
    said = again.communicate(timeout=300)[1]
    assert again.returncode == 0, said
    assert any(f"from step {step} to 20" in said for step in (4, 8, 12, 16)), "it resumed"
    expected = golden.numbers(whole)
    assert golden.numbers(run_dir) == expected
    if before:
        assert all(before[name] == expected[name][: len(before[name])] for name in before)
    ours, theirs = saved_arrays(whole, golden.STEPS), saved_arrays(run_dir, golden.STEPS)
    assert len(ours) > 30 and ours == theirs


CHAIN = "1,4,1,2", "1,1,1,8", "1,1,2,4", "1,1,1,1"


@pytest.mark.slow
def test_a_state_goes_from_mesh_to_mesh(tmp_path):
    """Restored and saved again on each: the same parameters to the bit, and the next step's loss to 1e-5."""
    losses, logical = [], None
    for link, mesh_dim in enumerate(CHAIN):
        devices = int(np.prod([int(n) for n in mesh_dim.split(",")]))
        mesh, _, _, _, batch = setup(mesh_dim, CONFIG, devices)
        shardings = state_shardings(weight_shardings(CONFIG, mesh), OPTIMIZER)
        step = make_train_step(CONFIG, OPTIMIZER, shardings, mesh, clip_norm=1.0)
        if link == 0:
            state = init_state(CONFIG, OPTIMIZER, shardings, mesh, seed=0)
            for _ in range(3):
                state, _ = step(state, batch)
            logical = unpadded(state, shardings)
        else:
            before = Checkpoints(
                tmp_path / str(link - 1), abstract_state(shardings, OPTIMIZER, mesh), shardings, Keep()
            )
            state = before.restore(3)
            before.close()
        jax.tree.map(np.testing.assert_array_equal, unpadded(state, shardings), logical)
        saving = Checkpoints(tmp_path / str(link), abstract_state(shardings, OPTIMIZER, mesh), shardings, Keep())
        saving.save(state)
        saving.close()
        losses.append(float(step(state, batch)[1]["loss"]))
    assert max(relative_error(loss, losses[0]) for loss in losses) < 1e-5, losses


def examples(parts: list[Path], seq_len: int) -> dict[str, np.ndarray]:
    """A batch in natural order from the parts that several processes held, no place of it missing."""
    order = np.argsort(permutation("zigzag", seq_len, 4))
    found = {name: np.full((stream_process.BATCH_SIZE, seq_len), -1) for name in stream_process.FIELDS}
    for path in parts:
        for key, part in np.load(path).items():
            name, bounds = key.split("/")
            row, row_end, column, column_end = map(int, bounds.split("_"))
            found[name][row : row_end or None, column : column_end or None] = part
    assert all((x >= 0).all() for x in found.values())
    return {name: x[:, order] for name, x in found.items()}


def check_examples(out: Path, processes: int, store: Path, seq_len: int, steps: range) -> None:
    for step in steps:
        found = examples([out / f"{i}-{step}.npz" for i in range(processes)], seq_len)
        rows = packing.batch(store, step, stream_process.BATCH_SIZE, seq_len, stream_process.SEED)
        for name in stream_process.FIELDS:
            kept = rows.mask if name == "targets" else np.ones_like(rows.mask)
            np.testing.assert_array_equal(found[name][kept], getattr(rows, name)[kept], err_msg=f"{name} of {step}")


def read_with(processes: int, store: Path, seq_len: int, steps: range, out: Path) -> None:
    """Each in a process of its own, if there are several."""
    out.mkdir()
    if processes == 1:
        return stream_process.read(store, seq_len, steps, out)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    rest = [str(x) for x in (processes, store, seq_len, steps.start, steps.stop, out)]
    command = [sys.executable, "-m", "tests.train.stream_process", address]
    running = [
        subprocess.Popen([*command, str(i), *rest], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for i in range(processes)
    ]
    said = [process.communicate(timeout=240)[1] for process in running]
    assert [process.returncode for process in running] == [0] * processes, said


SCHEDULES = [
    pytest.param((1, 1, 1), id="one host, resumed twice"),
    pytest.param((1, 2, 4), marks=pytest.mark.slow, id="1, 2 and 4 hosts"),
    pytest.param((4, 1, 2), marks=pytest.mark.slow, id="4, 1 and 2 hosts"),
]


@pytest.mark.parametrize("hosts", SCHEDULES)
def test_examples_are_a_function_of_seed_and_step(tmp_path, hosts):
    """Two stages of different lengths, each stopped in its midst and gone on with by other hosts, across the borders of
    epochs: every batch is the oracle's, which knows of no hosts."""
    store = build(tmp_path / "s", LENGTHS, True).path
    for seq_len in (64, 128):
        per_epoch = (int(sum(LENGTHS)) - 1) // seq_len
        assert per_epoch < 9 * stream_process.BATCH_SIZE, "an epoch ends among these steps"
        for i, processes in enumerate(hosts):
            steps, out = range(3 * i, 3 * i + 3), tmp_path / f"{seq_len}-{i}"
            read_with(processes, store, seq_len, steps, out)
            check_examples(out, processes, store, seq_len, steps)
