"""Break a small run on purpose, and check that nothing is lost and nothing goes wrong silently.

Runs are real processes of `ringformer train`. Each run must end like a run without interruption: with the same losses
and gradient norms, and with the same bytes in the arrays of its last checkpoint.

    python scripts/chaos.py [FOLDER] [--kills=3] [--flips=10] [--seed=0] [--results=FILE]
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from ringformer.checkpoints.array_folder import WRITTEN_LAST

STEPS = 40
EVERY = 5
"""Steps between two saves."""
SIGNALS = {signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGINT: 130}
"""Exit codes that docs/reference/command-line.md documents."""
CONFIG = """
from ringformer.runs.config import base_config


def get_config():
    config = base_config("tiny")
    config.model.hidden_size, config.model.intermediate_size, config.model.num_layers = 32, 32, 1
    config.data.source, config.data.store, config.data.held_out = "text:{folder}/*.txt", "{folder}/store", 0.2
    config.run_dir, config.cpu_devices, config.mesh_dim = "{folder}/run", 2, "1,1,1,2"
    config.seq_len, config.batch_size, config.eval_batches = 64, 2, 1
    config.steps, config.checkpoint_every = {steps}, {every}
    return config
"""


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

    def start(self, name: str) -> subprocess.Popen[Any]:
        command = [
            sys.executable,
            "-m",
            "ringformer.cli",
            "train",
            f"--config={self._folder}/config.py",
            f"--config.run_dir={self._folder / name}",
        ]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def wait(self, process: subprocess.Popen[Any]) -> tuple[int, str]:
        said = process.communicate(timeout=600)[1]
        return process.returncode, said

    def expect(self, ended: tuple[int, str], code: int) -> None:
        if ended[0] != code:
            raise Wrong(f"exit code {ended[0]}, not {code}: {ended[1][-300:]}")

    def until(self, name: str, step: int, process: subprocess.Popen[Any]) -> None:
        """Wait until the run has reported `step`."""
        while step > len(self._rows(name)):
            if process.poll() is not None:
                raise Wrong(f"ended before step {step}: {self.wait(process)[1][-300:]}")
            time.sleep(0.02)

    def until_saving(self, name: str, step: int, process: subprocess.Popen[Any]) -> None:
        """Wait until the files of `step` are being written."""
        folder = self._folder / name / "checkpoints"
        while not any(folder.glob(f"{step}.*")) and not (folder / str(step)).exists():
            if process.poll() is not None:
                raise Wrong(f"ended before step {step} was saved: {self.wait(process)[1][-300:]}")
            time.sleep(0.001)

    def saved(self, name: str, step: int) -> bool:
        return (self._folder / name / "checkpoints" / str(step)).exists()

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
        if str(file) not in said.replace("\n", "") and not (code == 0 and file.name in WRITTEN_LAST):
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


def kills(runs: Runs, count: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Kill a run, alternately after a step and during a save."""
    for i in range(count):
        process = runs.start(name := f"killed-{i}")
        if i % 2 == 0:
            runs.until(name, step := rng.randrange(3, STEPS - 2), process)
            when = f"after step {step}"
        else:
            runs.until_saving(name, step := rng.randrange(EVERY, STEPS, EVERY), process)
            time.sleep(rng.uniform(0, 0.03))
        process.kill()
        runs.wait(process)
        if i % 2:
            when = f"when step {step} was just saved" if runs.saved(name, step) else f"while step {step} was saved"
        yield f"SIGKILL {when}", _said(lambda name=name: runs.goes_on(name))


def signals(runs: Runs, rng: random.Random) -> Iterator[tuple[str, str]]:
    for number, code in SIGNALS.items():
        step = rng.randrange(3, STEPS - 10)
        process = runs.start(name := f"signalled-{number.name}")
        runs.until(name, step, process)
        process.send_signal(number)

        def comes_back(process=process, code=code, name=name):
            runs.expect(runs.wait(process), code)
            runs.goes_on(name)

        yield f"{number.name} after step {step}: exit code {code}", _said(comes_back)


def flips(runs: Runs, folder: Path, count: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Flip bits in the newest checkpoint of a stopped run, in its config and record, and in the token store."""
    process = runs.start("stopped")
    runs.until("stopped", STEPS // 2, process)
    process.send_signal(signal.SIGTERM)
    runs.expect(runs.wait(process), SIGNALS[signal.SIGTERM])
    run = folder / "stopped"
    newest = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name))
    for _ in range(count):
        inside = rng.choice([newest, newest, run, folder / "store" / "train"])
        files = [run / "config.json", run / "identity.json"] if inside == run else inside.rglob("*")
        file = rng.choice(sorted(path for path in files if path.is_file() and path.stat().st_size))
        whole = file.read_bytes()
        bit = rng.randrange(8 * len(whole))
        file.write_bytes(_flipped(whole, bit))
        copy = folder / "flipped"
        shutil.copytree(run, copy)
        there = file if inside.parent.name == "store" else copy / file.relative_to(run)
        verdict = _said(lambda there=there: runs.damaged("flipped", there))
        shutil.rmtree(copy)
        file.write_bytes(whole)
        yield f"bit {bit} of {file.relative_to(folder)} flipped", verdict


def _flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _said(trial) -> str:
    try:
        trial()
    except (Wrong, subprocess.TimeoutExpired, OSError) as error:
        return f"WRONG: {error}"
    return "ok"


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no number of trials")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="empty or new folder (default: a temporary one)")
    parser.add_argument("--kills", type=count, default=3, help="number of kills")
    parser.add_argument("--flips", type=count, default=10, help="number of flipped bits")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of steps, files and bits")
    parser.add_argument("--results", type=Path, help="file for the table, as JSON")
    args = parser.parse_args()
    if args.results and not args.results.absolute().parent.is_dir():
        parser.error(f"--results={args.results}: there is no folder {args.results.parent}")
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="chaos-"))).absolute()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        parser.error(f"{folder} is not an empty folder: name another one")
    folder.mkdir(parents=True, exist_ok=True)
    # Compilation dominates for a small model: do it once, and quickly.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    os.environ |= {"JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    rng, rows = random.Random(args.seed), []
    print(f"in {folder}: an uninterrupted run of {STEPS} steps, for comparison", flush=True)
    runs = Runs(folder)
    for trial in (kills(runs, args.kills, rng), signals(runs, rng), flips(runs, folder, args.flips, rng)):
        for what, verdict in trial:
            rows.append({"what": what, "verdict": verdict})
            print(f"{what:<90} {verdict}", flush=True)
    wrong = sum(row["verdict"] != "ok" for row in rows)
    print(f"{len(rows)} trials, {wrong} of them wrong")
    if args.results:
        versions = {
            "python": platform.python_version(),
            **{name: version(name) for name in ("jax", "orbax-checkpoint")},
        }
        about = {
            "what": "measured on a CPU: real processes of ringformer train, killed, signalled and damaged",
            "command": " ".join(["python scripts/chaos.py", *sys.argv[1:]]),
            "versions": versions,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        }
        args.results.write_text(json.dumps(about | {"trials": rows}, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
