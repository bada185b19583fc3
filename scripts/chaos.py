"""Break a small run on purpose, and check that nothing is lost and nothing goes wrong silently.

Runs are real processes of `ringformer train`. Each run must end like a run without interruption: with the same losses
and gradient norms, and with the same bytes in the arrays of its last checkpoint. Files of answers and converted models
must be those of a command without interruption.

    python scripts/chaos.py [FOLDER] [--kills=3] [--flips=10] [--others=10] [--seed=0] [--results=FILE]
"""

import argparse
import json
import os
import platform
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from scripts.chaos_outputs import answers, conversions, inspections
from scripts.chaos_runs import EVERY, STEPS, Runs, Wrong, flipped_bit, verdict_of

SIGNALS = {signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGINT: 130}
"""Exit codes that docs/reference/command-line.md documents."""


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
        yield f"SIGKILL {when}", verdict_of(partial(runs.goes_on, name))


def signals(runs: Runs, rng: random.Random) -> Iterator[tuple[str, str]]:
    for number, code in SIGNALS.items():
        step = rng.randrange(3, STEPS - 10)
        process = runs.start(name := f"signalled-{number.name}")
        runs.until(name, step, process)
        process.send_signal(number)

        def comes_back(process=process, code=code, name=name):
            runs.expect(runs.wait(process), code)
            runs.goes_on(name)

        yield f"{number.name} after step {step}: exit code {code}", verdict_of(comes_back)


def host_errors(runs: Runs, count: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Have the host of a run fail between two steps, alternately in its input and in a report, and start it again.

    A run stops before the step whose input fails. A step is reported while the next one is computed, or before a save:
    the run stops after one of the two.
    """
    places = {"input": [-1], "report": [0, 1]}
    for i in range(count):
        place = list(places)[i % len(places)]
        fails_at = rng.randrange(3, STEPS - 2)
        stops = [fails_at + later for later in places[place]]
        verdict = verdict_of(partial(fails_and_resumes, runs, f"host-error-{i}", place, fails_at, stops))
        yield f"error of the host: {place} of step {fails_at}, exit code 75", verdict


def fails_and_resumes(runs: Runs, name: str, place: str, fails_at: int, stops: list[int]) -> None:
    """Start a run whose host fails, and which must save one of the steps `stops`; then start it without the error."""
    process = runs.start(name, CHAOS_PLACE=place, CHAOS_STEP=str(fails_at))
    code, message = runs.wait(process)
    runs.expect((code, message), 75)
    stopped = re.search(r"stopped at step (\d+) of", message)
    if stopped is None or int(stopped[1]) not in stops:
        raise Wrong(f"it does not say that it stopped at a step of {stops}: {message[-300:]}")
    step = int(stopped[1])
    if not runs.saved(name, step) or runs.reported(name) != step:
        raise Wrong(f"step {step} is not saved, or not the last one in its metrics")
    runs.goes_on(name)


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
        files = [run / "config.json", run / "identity.json"] if inside == run else list(inside.rglob("*"))
        with flipped_bit(files, rng) as (file, bit):
            copy = folder / "flipped"
            shutil.copytree(run, copy)
            there = file if inside.parent.name == "store" else copy / file.relative_to(run)
            verdict = verdict_of(partial(runs.damaged, "flipped", there))
            shutil.rmtree(copy)
        yield f"bit {bit} of {file.relative_to(folder)} flipped", verdict


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no number of trials")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="empty or new folder (default: a temporary one)")
    parser.add_argument("--kills", type=count, default=3, help="number of kills")
    parser.add_argument("--flips", type=count, default=10, help="number of flipped bits")
    parser.add_argument("--others", type=count, default=10, help="number of trials of each other kind")
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
    rng = random.Random(args.seed)
    rows = []
    print(f"in {folder}: an uninterrupted run of {STEPS} steps, for comparison", flush=True)
    runs = Runs(folder)
    kinds = [
        kills(runs, args.kills, rng),
        signals(runs, rng),
        flips(runs, folder, args.flips, rng),
        host_errors(runs, args.others, rng),
        answers(runs, folder, args.others, rng),
        conversions(runs, folder, args.others, rng),
        inspections(runs, folder, args.others, rng),
    ]
    for trials in kinds:
        for what, verdict in trials:
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
            "what": "measured on a CPU: real processes of ringformer, killed, signalled and damaged",
            "command": " ".join(["python scripts/chaos.py", *sys.argv[1:]]),
            "versions": versions,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        }
        args.results.write_text(json.dumps(about | {"trials": rows}, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
