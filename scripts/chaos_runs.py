"""Processes of `ringformer` that scripts/chaos.py breaks, and the runs that it compares."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ringformer.checkpoints.array_folder import WRITTEN_LAST

STEPS = 40
EVERY = 5
"""Steps between two saves."""
CONFIG = """
import os

from ringformer.runs.config import base_config


def get_config():
    config = base_config("tiny")
    config.model.hidden_size, config.model.intermediate_size, config.model.num_layers = 32, 32, 1
    config.data.source, config.data.store, config.data.held_out = "text:{folder}/*.txt", "{folder}/store", 0.2
    config.run_dir, config.cpu_devices, config.mesh_dim = "{folder}/run", 2, "1,1,1,2"
    config.seq_len, config.batch_size, config.eval_batches = 64, 2, 1
    config.steps, config.checkpoint_every = {steps}, {every}
    return config


place = os.environ.get("CHAOS_PLACE")
fails_at = int(os.environ.get("CHAOS_STEP", "0"))

if place == "input":
    from ringformer.data import Loader

    def failing_iterate(self, start, sharding, iterate=Loader.iterate):
        for step, batch in enumerate(iterate(self, start, sharding), start + 1):
            if step == fails_at:
                raise OSError(5, "Input/output error")
            yield batch

    Loader.iterate = failing_iterate

if place == "report":
    from ringformer.runs.metrics import Reporter

    def failing_step(self, step, values, report=Reporter.step):
        report(self, step, values)
        if step == fails_at:
            raise OSError(28, "No space left on device")

    Reporter.step = failing_step
"""
"""Config of the runs. With CHAOS_PLACE, their host fails at CHAOS_STEP."""

Process = subprocess.Popen[str]


class Wrong(Exception):
    """Difference from the expected outcome of a trial."""


class Runs:
    """Runs of one config in `folder`, and the uninterrupted run that they are compared with."""

    def __init__(self, folder: Path):
        self._folder = folder
        rng = random.Random(0)
        for i in range(40):
            (folder / f"{i}.txt").write_text(" ".join(rng.choices(["ring", "block", "key", "query"], k=60)))
        (folder / "config.py").write_text(CONFIG.format(folder=folder, steps=STEPS, every=EVERY))
        self.expect(self.wait(self.start("undisturbed")), 0)
        self._undisturbed = self._outcome("undisturbed")

    def start(self, name: str, **environment: str) -> Process:
        config = f"--config={self._folder}/config.py"
        return self.launch("train", config, f"--config.run_dir={self._folder / name}", **environment)

    def launch(self, *words: str, **environment: str) -> Process:
        """Start any command of ringformer."""
        command = [sys.executable, "-m", "ringformer.cli", *words]
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ | environment
        )

    def wait(self, process: Process) -> tuple[int, str]:
        said = process.communicate(timeout=600)[1]
        return process.returncode, said

    def run(self, *words: str) -> tuple[int, str]:
        return self.wait(self.launch(*words))

    def expect(self, ended: tuple[int, str], code: int) -> None:
        if ended[0] != code:
            raise Wrong(f"exit code {ended[0]}, not {code}: {ended[1][-300:]}")

    def until(self, name: str, step: int, process: Process) -> None:
        """Wait until the run has reported `step`."""
        self.wait_for(process, lambda: self.reported(name) >= step, f"step {step}", pause=0.02)

    def until_saving(self, name: str, step: int, process: Process) -> None:
        """Wait until the files of `step` are being written."""
        folder = self._folder / name / "checkpoints"
        self.wait_for(
            process, lambda: any(folder.glob(f"{step}.*")) or self.saved(name, step), f"step {step} was saved"
        )

    def wait_for(self, process: Process, happened: Callable[[], bool], what: str, pause: float = 0.001) -> None:
        """Wait until something has happened, which the process must not end before."""
        while True:
            has_ended = process.poll() is not None
            if happened():
                return
            if has_ended:
                raise Wrong(f"ended before {what}: {self.wait(process)[1][-300:]}")
            time.sleep(pause)

    def saved(self, name: str, step: int) -> bool:
        return (self._folder / name / "checkpoints" / str(step)).exists()

    def reported(self, name: str) -> int:
        """Return the number of steps that the run has reported."""
        return len(self._rows(name))

    def goes_on(self, name: str) -> None:
        """Restart the run, wait for its end, and compare it."""
        self.expect(self.wait(self.start(name)), 0)
        if self._outcome(name) != self._undisturbed:
            raise Wrong("its losses or its last checkpoint are not those of the undisturbed run")

    def damaged(self, name: str, file: Path) -> None:
        """Start a run with a damaged file. The run must name the file, and end or reach the same result.

        Files outside of manifests need not be named, because nothing that is restored depends on them.
        """
        code, said = self.wait(self.start(name))
        if not is_named(file, said) and not (code == 0 and file.name in WRITTEN_LAST):
            raise Wrong(f"exit code {code} and no word of {file}: {said[-300:]}")
        if code == 0 and self._outcome(name) != self._undisturbed:
            raise Wrong("its losses or its last checkpoint are not those of the undisturbed run")

    def _rows(self, name: str) -> list[dict[str, Any]]:
        file = self._folder / name / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return [row for row in rows if "grad_norm" in row]

    def _outcome(self, name: str) -> tuple[list[tuple[int, float, float]], dict[str, bytes]]:
        """Return what every step reported, and the contents of the last checkpoint's chunks by path."""
        tree = self._folder / name / "checkpoints" / str(STEPS) / "default"
        chunks = {str(path.relative_to(tree)): path.read_bytes() for path in tree.glob("*.*/[0-9]*")}
        if not chunks:
            raise Wrong(f"{tree} has no arrays")
        return [(row["step"], row["loss"], row["grad_norm"]) for row in self._rows(name)], chunks


def is_named(file: Path, message: str) -> bool:
    """Return True if a message, which may be wrapped, names the file."""
    return str(file) in message.replace("\n", "")


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of a folder's files by path, without those that have the time of writing."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in WRITTEN_LAST:
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


@contextmanager
def flipped_bit(files: list[Path], rng: random.Random) -> Iterator[tuple[Path, int]]:
    """Flip a bit of one of the files that are not empty; yield the file and the bit, and mend the file at the end."""
    file = rng.choice(sorted(path for path in files if path.is_file() and path.stat().st_size))
    whole = file.read_bytes()
    bit = rng.randrange(8 * len(whole))
    changed = bytearray(whole)
    changed[bit // 8] ^= 1 << bit % 8
    file.write_bytes(changed)
    try:
        yield file, bit
    finally:
        file.write_bytes(whole)


def verdict_of(trial: Callable[[], None]) -> str:
    """Return "ok", or what went wrong in the trial."""
    try:
        trial()
    except (Wrong, subprocess.TimeoutExpired, OSError) as error:
        return f"WRONG: {error}"
    return "ok"
