"""A run's folder in a bucket that two hosts mount, with the options of `scripts/tpu_pod.sh --bucket`. The mounts are
those of tests/bucket_mounts.py: nothing here asks Google's servers or runs gcsfuse itself."""

import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ringformer.checkpoints.saved_model import latest_step
from ringformer.checkpoints.verify import checkpoint_faults
from ringformer.processes import run_lock
from ringformer.processes.run_lock import RunLock
from ringformer.runs.config import base_config
from ringformer.runs.metrics import Reporter
from tests.cpu_flags import cpu_environment
from tests.damage import flip
from tests.scripts.launching import POD, dry_run
from tests.train.runs import saved_arrays

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="a mount takes root and /dev/fuse"
)
SUPPORTED = {
    *("lookup", "getattr", "setattr", "mkdir", "unlink", "rmdir", "rename", "create", "open", "read", "write", "flush"),
    *("fsync", "release", "opendir", "readdir", "releasedir", "statfs", "init", "destroy"),
}
"""Requests that gcsfuse answers (internal/fs/fs.go)."""
DISPENSABLE = {"getxattr", "ioctl", "lseek", "access", "fsyncdir", "copy_file_range"}
"""Requests that it does not answer, and after which the kernel goes on by itself: of a folder's fsync, nothing is left
to do; the others say that there is nothing of the kind, or are done with reads and writes."""


def documented():
    """gcsfuse's options on the hosts of a pod."""
    words = [
        c
        for c in dry_run(*POD, "--accelerator=v5litepod-256", "--bucket=gs://mine")["every host of pod"]
        if "mine" in c
    ]
    (command,) = words
    return command[command.index("mine") - 4 : command.index("mine")]


class Hosts:
    """Two hosts: the same bucket at `a` and at `b`."""

    def __init__(self, folder, options):
        self.folder, self.a, self.b, self._log = folder, folder / "a", folder / "b", folder / "requests"
        command = [sys.executable, "-m", "tests.bucket_mounts", *options, self._log, self.a, self.b]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self._server = subprocess.Popen(command, cwd=ROOT, **pipes)
        self._wait()

    def _wait(self):
        assert self._server.stdout.readline() == "mounted\n"

    def lose(self):
        """Both hosts are gone, with all that is not an object; two others take their places."""
        self._server.stdin.write("lose\n")
        self._wait()

    def requests(self):
        """(host, what, name) of each request."""
        return [tuple(line.split(" ", 2)) for line in self._log.read_text().splitlines()]

    def close(self):
        self._server.communicate(timeout=20)
        assert self._server.returncode == 0


@pytest.fixture
def hosts(tmp_path):
    """`hosts(*options)`: two hosts that mount with gcsfuse's options; without any, as gcsfuse chooses for TPU hosts."""
    made = []

    def mount(*options):
        made.append(Hosts(tmp_path, options))
        return made[-1]

    yield mount
    for each in made:
        each.close()


def test_the_options_are_those_that_matter():
    assert {word.split("=")[0] for word in documented()} == {
        "--metadata-cache-ttl-secs",
        "--metadata-cache-negative-ttl-secs",
        "--enable-streaming-writes",
        "--rename-dir-limit",
    }


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT", 0.1)
    monkeypatch.setattr(run_lock, "PATIENCE", 2.0)
    monkeypatch.setattr(run_lock, "POLL", 0.05)


def lock_of_another_machine(run_dir):
    lock = RunLock(run_dir)
    lock._holder |= {"host": "elsewhere", "machine": "elsewhere b00t pid:[1]"}
    return lock


def test_a_live_run_keeps_its_lock(hosts, quick):
    """Its beats are seen from the other host; with the metadata that gcsfuse keeps by itself, they are not."""
    two = hosts(*documented())
    held = lock_of_another_machine(two.a / "run")
    held.take()
    with pytest.raises(ValueError, match=r"run is being trained by process [0-9]+ on elsewhere"):
        RunLock(two.b / "run").take()
    held.release()
    after = RunLock(two.b / "run")
    after.take()
    after.release()


def test_without_the_options_a_live_run_loses_its_lock(hosts, quick):
    two = hosts()
    held = lock_of_another_machine(two.a / "run")
    held.take()
    taker = RunLock(two.b / "run")
    taker.take()
    time.sleep(0.5)
    with pytest.raises(OSError, match="saw no beat of this one"):
        held.check()
    taker.release()
    held.release()


def test_who_closes_a_moment_later_has_no_lock(hosts, quick, monkeypatch):
    """Both hosts could create the file: it is an object after it was closed, and the second to close gets ESTALE."""
    two = hosts(*documented())
    held, real_close = lock_of_another_machine(two.a / "run"), os.close

    def close_late(descriptor):
        monkeypatch.setattr(os, "close", real_close)
        held.take()
        real_close(descriptor)

    monkeypatch.setattr(os, "close", close_late)
    with pytest.raises(ValueError, match=r"run is being trained by process [0-9]+ on elsewhere"):
        RunLock(two.b / "run").take()
    held.release()


@pytest.mark.usual("documented")
@pytest.mark.parametrize("options", [documented(), ["--metadata-cache-ttl-secs=0"]], ids=["documented", "streamed"])
def test_rows_are_in_the_bucket_before_the_checkpoint_of_their_step(hosts, options):
    """`Reporter.sync` is what a save waits for. Streamed writes are no object before the file is closed."""
    two = hosts(*options)
    (two.a / "run").mkdir()
    reporter = Reporter(two.a / "run", 0, base_config("tiny"))
    reporter.step(1, {"loss": 1.0, "tokens_per_second": 1.0, "learning_rate": 0.1})
    reporter.sync()
    rows = (two.b / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == ([1] if options == documented() else [])
    reporter.close()
    assert (two.b / "run" / "metrics.jsonl").read_text()


def test_a_flat_bucket_renames_no_folder(hosts):
    """With the limit that gcsfuse chooses for TPU hosts it would, object by object."""
    two = hosts(*documented(), "--flat")
    (two.a / "1.tmp").mkdir()
    (two.a / "1.tmp" / "array").write_bytes(b"x")
    with pytest.raises(OSError) as failed:
        (two.a / "1.tmp").rename(two.a / "1")
    assert failed.value.errno == errno.EMFILE


CONFIG = """
from ringformer.runs.config import base_config


def get_config():
    config = base_config("tiny")
    config.data.source = "text:{share}/texts/*.txt"
    config.data.store = "{share}/store"
    config.data.held_out = 0.2
    config.run_dir = "{share}/run"
    config.mesh_dim = "1,2,1,2"
    config.cpu_devices = 2
    config.seq_len = 64
    config.batch_size = 4
    config.eval_batches = 1
    config.optimizer.schedule = "constant"
    config.optimizer.warmup_steps = 0
    config.model.hidden_size = 32
    config.model.num_layers = 1
    config.model.compute_dtype = "float32"
    config.checkpoint_every = 1
    config.keep_checkpoints = 2
    return config
"""


def write_texts(folder):
    rng = np.random.default_rng(0)
    (folder / "texts").mkdir(parents=True)
    for i in range(30):
        (folder / "texts" / f"{i}.txt").write_text(" ".join(rng.choice(["ring", "block", "key", "query"], 60)))


class Run:
    """The command in two processes. Each has a mount of its own at the same place, `share`, as two hosts have."""

    def __init__(self, folder, places, steps):
        self._folder, self._places, self._share = folder, places, folder / "share"
        self._share.mkdir(exist_ok=True)
        self._config = folder / "config.py"
        self._config.write_text(CONFIG.format(share=self._share))
        self._steps = steps

    def start(self):
        with socket.create_server(("", 0)) as free:
            address = f"localhost:{free.getsockname()[1]}"
        processes = []
        for index, place in enumerate(self._places):
            train = [sys.executable, "-m", "ringformer.cli", "train", f"--config={self._config}"]
            train += [f"--config.steps={self._steps}", "--distributed", f"--coordinator_address={address}"]
            train += ["--num_processes=2", f"--process_id={index}"]
            mounted = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', place, self._share]
            env = cpu_environment(PYTHONPATH=str(ROOT), JAX_COMPILATION_CACHE_DIR=str(self._folder / "compiled"))
            with (self._folder / f"errors-{index}.txt").open("w") as errors:
                processes.append(subprocess.Popen([*mounted, *train], env=env, stdout=errors, stderr=errors))
        return processes

    def finish(self):
        processes = self.start()
        codes = [process.wait(240) for process in processes]
        assert codes == [0, 0], self.said()

    def said(self):
        return "".join((self._folder / f"errors-{index}.txt").read_text()[-3000:] for index in range(2))

    def disturb(self, step, how):
        """Kill both processes after a step, which is while it is saved."""
        processes = self.start()
        end = time.monotonic() + 200
        while (latest_step(self._places[0] / "run") or 0) < step:
            assert all(process.poll() is None for process in processes) and time.monotonic() < end, self.said()
            time.sleep(0.05)
        time.sleep(random.Random(step).random() / 5)
        how()
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait(20)

    def outcome(self):
        """Losses and gradient norms of every step, and the bytes of the last checkpoint."""
        run_dir = self._places[1] / "run"
        rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        numbers = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}
        return numbers, saved_arrays(run_dir, self._steps)


def undisturbed(folder, steps):
    """The outcome of a run in a plain folder."""
    place = folder / "plain"
    write_texts(place)
    run = Run(folder, [place, place], steps)
    run.finish()
    numbers, arrays = run.outcome()
    assert sorted(numbers) == list(range(1, steps + 1)) and len(arrays) > 20
    return numbers, arrays


def nothing():
    pass


@pytest.mark.slow
def test_a_killed_run_of_two_hosts_goes_on_in_a_bucket(hosts, tmp_path):
    """It asks for nothing but what gcsfuse does. That it ends as in a plain folder: see the slow test."""
    two = hosts(*documented())
    write_texts(two.a)
    run = Run(tmp_path, [two.a, two.b], 8)
    run.disturb(2, nothing)
    run.finish()
    numbers, arrays = run.outcome()
    assert sorted(numbers) == list(range(1, 9)) and len(arrays) > 20
    assert checkpoint_faults(two.b / "run", 8) == []
    requests = two.requests()
    assert {what for _, what, _ in requests} <= SUPPORTED | DISPENSABLE
    ours, theirs = ({name for host, what, name in requests if (host, what) == (h, "create")} for h in "ab")
    assert len(theirs) > 20 and not ours & theirs, "locks of files do not reach another host"
    count = Counter((host, what) for host, what, _ in requests)
    assert 20 < count["b", "lookup"] / count["b", "rename"] < 80, "docs/reliability.md says some 50 for a file"


@pytest.mark.slow
def test_ten_kills_and_lost_hosts(hosts, tmp_path):
    """Half of them take what the hosts had not sent to the bucket; once, a bit of the newest checkpoint flips too."""
    expected = undisturbed(tmp_path, 24)
    two = hosts(*documented())
    write_texts(two.a)
    run = Run(tmp_path, [two.a, two.b], 24)
    for number in range(10):
        run.disturb(2 * number + 2, two.lose if number % 2 else nothing)
        if number == 6:
            newest = two.a / "run" / "checkpoints" / str(latest_step(two.a / "run")) / "default"
            flip(max(newest.glob("params.*/*"), key=lambda path: path.stat().st_size), np.random.default_rng(0))
    run.finish()
    assert run.outcome() == expected
    assert len(list((two.b / "run" / "damaged").iterdir())) == 1
    assert {what for _, what, _ in two.requests()} <= SUPPORTED | DISPENSABLE
