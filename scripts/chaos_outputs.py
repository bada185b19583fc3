"""Trials of scripts/chaos.py with files that commands write beside a run: answers, converted models, token stores."""

import json
import random
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from scripts.chaos_runs import Process, Runs, Wrong, contents, flipped_bit, is_named, verdict_of

PROMPTS = 20
STRANGERS = ["Two roads diverged in a yellow wood", '{"prompt": "ring", "text": "block"}\n', "ring\n\nblock\n", " "]
"""Contents of files that ringformer did not write."""


def answers(runs: Runs, folder: Path, count: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Kill a command that answers prompts, start it with other settings, and let it go on.

    Also name somebody else's file for the answers.
    """
    prompts = folder / "prompts.jsonl"
    with prompts.open("w") as file:
        for i in range(PROMPTS):
            file.write(json.dumps({"prompt": f"ring block key {i}"}) + "\n")
    settings = {"run": folder / "undisturbed", "prompts": prompts, "max_new_tokens": 24}
    others = {
        "--max_new_tokens=23": settings | {"max_new_tokens": 23},
        "another model": settings | {"run": _earlier_model(folder)},
        "--temperature=0.5": settings | {"temperature": 0.5},
    }
    whole = folder / "answers" / "answers.jsonl"
    whole.parent.mkdir()
    runs.expect(runs.run(*_generate(settings, whole)), 0)
    names = list(others)
    for i in range(count):
        out = folder / f"answers-{i}" / "answers.jsonl"
        out.parent.mkdir()
        words = _generate(settings, out)
        process = runs.launch(*words)
        _wait_for_answers(runs, out, rng.randrange(1, PROMPTS), process)
        time.sleep(rng.uniform(0, 0.01))
        process.kill()
        runs.wait(process)
        when = f"after {_lines(out)} of {PROMPTS} answers"
        name = names[i % len(names)]
        other_words = _generate(others[name], out)
        yield f"SIGKILL {when}, then {name}: refused", verdict_of(partial(refuses, runs, other_words, out))
        yield f"SIGKILL {when}, then the same command", verdict_of(partial(completes, runs, words, out, whole))
        stranger = folder / f"stranger-{i}" / "answers.jsonl"
        stranger.parent.mkdir()
        text = STRANGERS[i % len(STRANGERS)]
        stranger.write_text(text)
        verdict = verdict_of(partial(refuses, runs, _generate(settings, stranger), stranger))
        yield f"answers to somebody else's {text!r}: refused", verdict


def refuses(runs: Runs, words: list[str], out: Path) -> None:
    """Start a command that must end with one line about `out`, and change no byte of it or of a file beside it."""
    before = contents(out.parent)
    code, message = runs.run(*words)
    if code != 2 or message.count("\n") != 1 or not is_named(out, message):
        raise Wrong(f"exit code {code}, and not one line about {out}: {message[-300:]}")
    if contents(out.parent) != before:
        raise Wrong(f"{out} or a file beside it has changed")


def completes(runs: Runs, words: list[str], out: Path, whole: Path) -> None:
    """Start a command that must complete `out` and the files beside it as an uninterrupted command did."""
    runs.expect(runs.run(*words), 0)
    _compare(out.parent, whole.parent)


def conversions(runs: Runs, folder: Path, count: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Kill exports to a Hugging Face model, and imports of one, while they write."""
    exported = folder / "to-hf"
    imported = folder / "from-hf"
    for source, whole in ((folder / "undisturbed", exported), (exported, imported)):
        direction = whole.name
        process = runs.launch("convert", direction, str(source), str(whole))
        _wait_for_building(runs, whole, process)
        began = time.monotonic()
        runs.wait_for(process, whole.exists, f"{whole} was there")
        seconds = time.monotonic() - began
        runs.expect(runs.wait(process), 0)
        for i in range(count):
            out = folder / f"{direction}-{i}"
            words = ["convert", direction, str(source), str(out)]
            process = runs.launch(*words)
            _wait_for_building(runs, out, process)
            time.sleep(rng.uniform(0, seconds))
            process.kill()
            runs.wait(process)
            when = "just after" if out.exists() else "while"

            verdict = verdict_of(partial(converts, runs, words, out, whole))
            yield f"SIGKILL {when} convert {direction} wrote {out.name}", verdict


def converts(runs: Runs, words: list[str], out: Path, whole: Path) -> None:
    """Start a conversion after one that was killed, which left a complete folder or none."""
    if out.exists():
        _compare(out, whole)
        shutil.rmtree(out)
    runs.expect(runs.run(*words), 0)
    _compare(out, whole)
    for leftover in out.parent.glob(f"{out.name}.building-*"):
        raise Wrong(f"{leftover} is left")


def inspections(runs: Runs, folder: Path, count: int, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Flip bits of held-out documents, which `ringformer data inspect` must name."""
    store = folder / "store"
    files = list((store / "eval").iterdir())
    for _ in range(count):
        with flipped_bit(files, rng) as (file, bit):
            verdict = verdict_of(partial(names_damage, runs, store, file))
        yield f"bit {bit} of {file.relative_to(folder)} flipped: data inspect", verdict


def names_damage(runs: Runs, store: Path, file: Path) -> None:
    """Inspect a store, which must be refused with the name of the damaged file."""
    code, message = runs.run("data", "inspect", str(store))
    if code == 0 or not is_named(file, message):
        raise Wrong(f"exit code {code}, and no word of {file}: {message[-300:]}")


def _generate(settings: dict[str, Any], out: Path) -> list[str]:
    """Return the words of a command that answers prompts."""
    words = ["generate", f"--out={out}"]
    for name, value in settings.items():
        words.append(f"--{name}={value}")
    return words


def _earlier_model(folder: Path) -> Path:
    """Copy the uninterrupted run without its last checkpoint: a model of the same shapes with other weights."""
    earlier = folder / "earlier"
    run = folder / "undisturbed"
    shutil.copytree(run, earlier)
    newest = max((earlier / "checkpoints").iterdir(), key=lambda path: int(path.name))
    shutil.rmtree(newest)
    return earlier


def _lines(file: Path) -> int:
    """Return the number of whole lines of a file, 0 if there is none."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def _wait_for_answers(runs: Runs, out: Path, count: int, process: Process) -> None:
    """Wait until a command has written so many answers."""
    runs.wait_for(process, lambda: _lines(out) >= count, f"{count} answers were written")


def _wait_for_building(runs: Runs, out: Path, process: Process) -> None:
    """Wait until a command builds `out`."""

    def is_built() -> bool:
        return out.exists() or any(out.parent.glob(f"{out.name}.building-*"))

    runs.wait_for(process, is_built, f"{out} was written")


def _compare(out: Path, whole: Path) -> None:
    if contents(out) != contents(whole):
        raise Wrong(f"{out} is not what an uninterrupted command writes")
