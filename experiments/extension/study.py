"""Run the extension study: `experiments/extend_released.sh`.

Every part is one command of ringformer. A part that ended is not run again: its record in OUT/parts names its command,
its seconds and its CPU-seconds. The results are read from what the commands wrote (`results.py`).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from experiments.extension import chats, continuations, results
from experiments.extension.figure import draw_extension
from experiments.extension.pack import unpack
from experiments.extension.plans import PLANS, RELEASED, RINGS, THETA, Flags, Losses, Plan, Task, loss_folder
from ringformer.cli.parser import output_argument
from ringformer.files.atomic import write_whole
from ringformer.plotting import check_matplotlib

ROOT = Path(__file__).parents[2]
CONFIGS = Path("experiments/extension")
"""Folder of the configs, from `ROOT`, where every part runs."""
DOCUMENTS: Flags = {"source": "installed", "join": "folder", "held_out": 0.1}
"""Documents to train on and to measure: the folders of Python's library and of the installed packages."""
CPU_CORES = "CPU cores"
"""Unit of a machine without an accelerator."""
SHARE_OF_MEMORY = 0.9
"""Share of an accelerator's memory that the evaluations of one moment may take together."""


@dataclass(frozen=True)
class Part:
    """A command of ringformer, by name."""

    name: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Parts that do not depend on each other."""

    parts: tuple[Part, ...]
    at_once: int
    """Number of parts that run at the same time."""


def flags(values: Flags, prefix: str = "") -> list[str]:
    """Return options as words of a command."""
    return [f"--{prefix}{name}={value}" for name, value in values.items()]


class Study:
    """The study of one plan, in a folder.

    Args:
      out: folder of stores, models, runs and evaluations.
      plan: what to train and evaluate.
      inputs: folder that `pack.py` wrote, for a machine without a network; None: the documents are this machine's.
      released: folder of the released model, as transformers saves it.
    """

    def __init__(self, out: Path, plan: Plan, inputs: Path | None, released: Path):
        self.out, self.plan, self.released = out.absolute(), plan, released
        self.inputs = None if inputs is None else inputs.absolute()
        (out / "parts").mkdir(parents=True, exist_ok=True)
        self.questions = self.out / "questions.jsonl"
        self.short_task = self.out / "short_task"

    def model(self, name: str) -> Path:
        """Return the folder of a model: a converted one, a run, or the last stage of a run."""
        if name in (RELEASED, THETA):
            return self.out / "models" / name
        run = self.out / "runs" / name
        stages = sorted(run.glob("stage-*"))
        return stages[-1] if stages else run

    def store(self, held_out: bool) -> Path:
        """Return the folder of the documents to train on, or to measure."""
        if self.inputs is None:
            return self.out / "documents"
        return self.out / ("held_out" if held_out else "train")

    def conversions(self) -> Iterator[Part]:
        """Yield the parts that make the models that nobody trains."""
        convert = "convert", "from-hf", str(self.released)
        yield Part("convert-released", (*convert, str(self.model(RELEASED))))
        theta = f"--rope_theta={self.plan.rope_theta}"
        yield Part("convert-theta", (*convert, str(self.model(THETA)), theta))

    def preparations(self) -> Iterator[Part]:
        """Yield the parts that make the stores."""
        tokenizer = f"--tokenizer={self.released}"
        if self.inputs is None:
            store = f"--store={self.store(True)}", tokenizer
            yield Part("documents", ("data", "prepare", *store, *flags(DOCUMENTS), "--skip_malformed"))
            return
        for name in ("train", "held_out"):
            rows = f"--source=parquet:{self.inputs}/{name}.parquet", "--format=tokens", "--held_out=0"
            yield Part(f"documents-{name}", ("data", "prepare", f"--store={self.out / name}", tokenizer, *rows))

    def trainings(self) -> Iterator[Part]:
        """Yield the runs. They begin with the model of a larger theta."""
        for name, training in self.plan.trainings.items():
            keys: Flags = {
                "init_from": self.model(THETA),
                "run_dir": self.out / "runs" / name,
                "data.store": self.store(False),
                "data.tokenizer": self.released,
            }
            if self.inputs is None:
                keys |= {f"data.{key}": value for key, value in DOCUMENTS.items()} | {"data.skip_malformed": True}
            else:
                keys |= {"data.source": f"parquet:{self.inputs}/train.parquet", "data.format": "tokens"}
                keys |= {"data.held_out": 0}
            config = f"--config={CONFIGS / training.config}"
            yield Part(f"train-{name}", ("train", config, *flags(keys | training.keys, "config.")))

    def losses(self, losses: Losses) -> Iterator[Part]:
        """Yield the measurements of some held-out losses."""
        folder = loss_folder(self.plan, losses)
        for name in self.plan.models:
            of_store = f"--store={self.store(True)}", f"--documents={losses.documents}"
            length = f"--lengths={losses.context}", f"--last={losses.context // 2}"
            words = "eval", "perplexity", *self._of_model(name, folder), *of_store, *length
            yield Part(f"{folder}-{name}", words)

    def task(self, task: Task) -> Iterator[Part]:
        """Yield a task with answers."""
        for name in self.plan.task_models:
            lengths = ",".join(str(length) for length in task.lengths)
            cases = f"--lengths={lengths}", f"--num_cases={task.cases}"
            of_ruler = (f"--tasks={task.name}",) if task.evaluation == "ruler" else ()
            words = "eval", task.evaluation, *self._of_model(name, task.name), *of_ruler, *cases
            yield Part(f"{task.name}-{name}", words)

    def short_tasks(self) -> Iterator[Part]:
        """Yield the short task of every model, if the plan has it."""
        if not self.plan.short_questions:
            return
        of_task = f"--tasks={continuations.NAME}", f"--include_path={self.short_task}"
        task = *of_task, f"--lengths={continuations.LENGTH}"
        for name in self.plan.models:
            words = "eval", "harness", *self._of_model(name, continuations.NAME, self._whole_prompts()), *task
            yield Part(f"{continuations.NAME}-{name}", words)

    def ring_steps(self) -> Iterator[Part]:
        """Yield the same train step on one device and on a ring of eight, if the plan has it."""
        if self.plan.ring_step is None:
            return
        for ring in RINGS:
            keys: Flags = {
                "init_from": self.model(THETA),
                "run_dir": self.out / "runs" / f"ring-{ring}",
                "data.store": self.store(True),
                "data.tokenizer": self.released,
                "seq_len": self.plan.ring_step,
                "data.min_length": self.plan.ring_step,
                "mesh_dim": f"1,1,1,{ring}",
                "cpu_devices": ring,
            }
            config = f"--config={CONFIGS / 'ring_config.py'}"
            yield Part(f"ring-step-{ring}", ("train", config, *flags(keys, "config.")))

    def chats(self) -> Iterator[Part]:
        """Yield the chats."""
        for name in self.plan.models:
            answers = "--chat", f"--prompts={self.questions}", f"--out={self.out / 'answers' / f'{name}.jsonl'}"
            length = f"--max_new_tokens={chats.NEW_TOKENS}", f"--batch_size={len(chats.QUESTIONS)}"
            run = f"--run={self.model(name)}"
            yield Part(f"chats-{name}", ("generate", run, *answers, *length, *flags(self._whole_prompts())))

    def _of_model(self, name: str, evaluation: str, machine: Flags | None = None) -> list[str]:
        out = self.out / "evals" / name / evaluation
        of_machine = flags(self.plan.machine if machine is None else machine)
        return [f"--run={self.model(name)}", f"--out={out}", "--allow_longer", *of_machine]

    def _whole_prompts(self) -> Flags:
        """Return the machine's flags for short prompts, which are read in one piece."""
        return {key: value for key, value in self.plan.machine.items() if key != "prefill_chunk"}

    def groups(self) -> Iterator[Group]:
        """Yield all parts, in the order in which they depend on each other; what takes hours comes last."""
        at_once = self.plan.at_once
        first_losses, *longer_losses = self.plan.losses
        yield Group(tuple(self.conversions()), at_once)
        yield Group(tuple(self.preparations()), at_once)
        yield Group(tuple(self.trainings()), self.plan.runs_at_once)
        yield Group(tuple(self.losses(first_losses)), at_once)
        yield Group(tuple(self.short_tasks()), at_once)
        yield Group(tuple(self.chats()), at_once)
        yield Group(tuple(self.ring_steps()), 1)
        for losses in longer_losses:
            yield Group(tuple(self.losses(losses)), at_once)
        for task in self.plan.tasks:
            yield Group(tuple(self.task(task)), at_once)

    def pending(self) -> list[str]:
        """Return the names of the parts that have not ended."""
        names = []
        for group in self.groups():
            names += [part.name for part in group.parts if not self._ended(part)]
        return names

    def write_inputs(self) -> None:
        """Write what parts read and no part writes: the questions of the chats and of the short task."""
        chats.write_prompts(self.questions)
        (self.out / "answers").mkdir(exist_ok=True)
        if self.plan.short_questions:
            continuations.write_task(self.short_task, self.plan.short_questions)

    def run(self, group: Group) -> None:
        """Run the parts of a group that have not ended. Raises CalledProcessError after one that fails."""
        waiting = [part for part in group.parts if not self._ended(part)]
        with ThreadPoolExecutor(group.at_once) as threads:
            running = [threads.submit(self._run, part, group.at_once) for part in waiting]
            for part in running:
                part.result()

    def _ended(self, part: Part) -> bool:
        """Return whether a part ended. Raises ValueError if it ended with another command."""
        record = results.record_of_part(self.out, part.name)
        if not record.exists():
            return False
        words = json.loads(record.read_text())["command"]
        if words != list(part.words):
            raise ValueError(f"{record} is of another command: {' '.join(words)}. Choose another folder")
        return True

    def _run(self, part: Part, at_once: int) -> None:
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}
        if at_once > 1:
            environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{SHARE_OF_MEMORY / at_once:.2f}"
        print(f"\n== {part.name}\n   ringformer {' '.join(part.words)}", flush=True)
        began = time.monotonic()
        words = [sys.executable, "-m", "ringformer", *part.words]
        record = {
            "command": part.words,
            "cpu_seconds": round(_run_and_count(words, environment), 1),
            "seconds": round(time.monotonic() - began, 1),
        }
        write_whole(results.record_of_part(self.out, part.name), (json.dumps(record, indent=1) + "\n").encode())
        print(f"== {part.name} took {record['seconds']:.0f} s", flush=True)


def _run_and_count(words: Sequence[str], environment: Mapping[str, str]) -> float:
    """Run a command and return its CPU-seconds. Raises CalledProcessError if it fails."""
    process = subprocess.Popen(words, env=environment, cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    return usage.ru_utime + usage.ru_stime


def run(study: Study, machine: str, form: str, results_file: Path, figure: Path) -> results.Results:
    """Run the study and return its results. They are written after each group of parts, so that a study that is stopped
    has the results of the parts that ended."""
    study.write_inputs()
    found: results.Results = {}
    for group in study.groups():
        study.run(group)
        found = results.collect(study.out, study.plan, machine, study.pending())
        if found["losses"] and results.write_results(results_file, form, found):
            draw_extension(found, path=figure)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="extend_released.sh", description=__doc__)
    parser.add_argument("--plan", choices=PLANS, default="whole")
    parser.add_argument("--accelerator", action="store_true", help="run the plan's evaluations and training on one GPU")
    parser.add_argument("--inputs", type=Path, help="folder of pack.py, for a machine without a network")
    parser.add_argument("--released", type=Path, help="a model of transformers; default: SmolLM2-135M-Instruct")
    parser.add_argument("--results", type=output_argument, required=True)
    parser.add_argument("--figure", type=output_argument, required=True)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(arguments)
    plan = PLANS[args.plan]
    on = machine()
    if args.accelerator and args.plan not in ("core", "whole"):
        parser.exit(2, f"{parser.prog}: --accelerator takes the core or the whole form, not {args.plan}\n")
    if (args.accelerator or args.plan == results.GPU_FORM) and on.endswith(CPU_CORES):
        parser.exit(
            2,
            f"{parser.prog}: JAX sees no GPU here, only {on}: use --core without --accelerator, or "
            "pip install -e '.[cuda]'\n",
        )
    if args.accelerator:
        plan = plan.on_an_accelerator()
    try:
        check_matplotlib()
        if args.released is None:
            if args.inputs is not None:
                unpack(args.inputs)
            from tests.released.folders import smol

            args.released = smol()
        study = Study(args.out, plan, args.inputs, args.released)
        found = run(study, on, args.plan, args.results, args.figure)
    except (ValueError, FileNotFoundError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except subprocess.CalledProcessError as error:
        parser.exit(1, f"{parser.prog}: a part failed with exit code {error.returncode}; its output is above\n")
    print(f"\n{results.text(found)}\n{args.results}, {args.figure}")
    return 0


def machine() -> str:
    """Return the cores of this machine, or the name of its accelerator."""
    script = "import jax; device = jax.devices()[0]; print(device.platform, device.device_kind)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    platform, kind = done.stdout.strip().split(maxsplit=1)
    return f"{os.cpu_count()} {CPU_CORES}" if platform == "cpu" else kind


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
