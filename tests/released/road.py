"""Walk docs/how-to/my-documents-to-512k.md with a released model, SmolLM2-135M-Instruct, and short contexts.

    python -m tests.released.road FOLDER [WORK]

FOLDER is the model as transformers saved it (`python -m tests.released.folders smol`). Everything is written to WORK,
by default a temporary folder. The program runs the commands of the page one after the other, prints each with its
seconds and the lines of its output that matter, and stops at the first one that fails, that prints what it must not, or
whose result is wrong. It takes minutes on two cores, and 6 GB of disk.
"""

import ast
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FORBIDDEN = r"Traceback|\bwarning\b|\bnan\b|\binf\b"
"""No command of the road may print this."""
FILES = 200
CHARACTERS = 3000
"""Characters of a document: more tokens than the longest context."""
LATIN = "Die Schlüssel gehen von Gerät zu Gerät, während die Abfragen bleiben; das genügt für große Kontexte. "
PROMPTS = (
    "The main point of these documents is",
    "A ring of devices passes keys and values",
    "def train(config):",
)
QUESTION = "What is a ring of devices?"
NEW_TOKENS = 20


class Stopped(Exception):
    """The road does not go on. The message has the command and its output."""


class Done(NamedTuple):
    """A command that ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class Road:
    """Runs commands as a user does, in one folder, and prints what each did."""

    def __init__(self, work: Path):
        self.work = work
        self.environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TQDM_DISABLE": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def run(self, *command: str, shows: tuple[str, ...] = (), code: int = 0, interrupt: Path | None = None) -> Done:
        """Run `ringformer` with these words, and print the lines of its output that match `shows`.

        Args:
          shows: regular expressions; each must match a line.
          code: the exit code that is right.
          interrupt: send Ctrl-C as soon as this path exists.

        Raises:
          Stopped: another exit code, a forbidden output, or a line that is absent.
        """
        began = time.monotonic()
        print(f"$ {shown(command)}", flush=True)
        done = self._ended(command, interrupt)
        seconds = time.monotonic() - began
        if done.code != code:
            raise Stopped(f"exit code {done.code}, must be {code}: {shown(command)}\n{done.output}")
        if forbidden := re.search(FORBIDDEN, done.output, re.IGNORECASE):
            raise Stopped(f"it prints {forbidden[0]!r}: {shown(command)}\n{done.output}")
        for line in self._lines(shown(command), done.output, shows):
            print(line)
        print(f"({seconds:.0f} s)\n", flush=True)
        return done

    def _ended(self, command: tuple[str, ...], interrupt: Path | None) -> Done:
        words = [sys.executable, "-m", "ringformer", *command]
        with_default = ["env", "--default-signal=INT", *words]  # a shell ignores SIGINT in background jobs
        files = self.work / "stdout", self.work / "stderr"
        with files[0].open("w") as stdout, files[1].open("w") as stderr:
            process = subprocess.Popen(
                with_default,
                cwd=self.work,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )
            if interrupt is not None:
                while process.poll() is None and not (self.work / interrupt).exists():
                    time.sleep(0.05)
                process.send_signal(signal.SIGINT)
            code = process.wait()
        return Done(code, *(path.read_text() for path in files))

    @staticmethod
    def _lines(command: str, output: str, patterns: tuple[str, ...]) -> Iterator[str]:
        for pattern in patterns:
            matching = [line for line in output.splitlines() if re.search(pattern, line)]
            if not matching:
                raise Stopped(f"no line matches {pattern!r}: {command}\n{output}")
            yield from matching


def shown(command: tuple[str, ...]) -> str:
    """Return the command as a person writes it."""
    return " ".join(["ringformer", *(repr(word) if " " in word else word for word in command)])


def check(is_right: bool, message: str) -> None:
    if not is_right:
        raise Stopped(message)


def write_documents(folder: Path) -> None:
    """Write `FILES` files: Markdown, HTML, Python and text, of them one in Latin-1, one blank and one binary."""
    code = sorted((ROOT / "ringformer").rglob("*.py"))
    pieces = in_pieces([path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))])
    for number in range(50):
        write(folder / "notes" / f"{number:03}.md", next(pieces))
    for number in range(40):
        paragraphs = "".join(f"<p>{escape(text)}</p>\n" for text in next(pieces).split("\n\n"))
        page = f"<html><head><style>p {{ color: red }}</style></head><body>\n{paragraphs}</body></html>\n"
        write(folder / "site" / f"{number:03}.html", page)
    pieces = in_pieces([path.read_text() for path in code])
    for number in range(87):
        write(folder / "code" / f"{number:03}.py", next(pieces))
    pieces = in_pieces(["\n\n".join(text for path in code for text in docstrings(path))])
    for number in range(20):
        write(folder / "texts" / f"{number:03}.txt", next(pieces))
    write(folder / "texts" / "latin.txt", LATIN * 40, "latin-1")
    write(folder / "texts" / "blank.txt", "")
    (folder / "texts" / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 16)


def write(path: Path, text: str, encoding: str = "utf-8") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding)


def in_pieces(texts: Iterable[str]) -> Iterator[str]:
    """Yield pieces of `CHARACTERS`, without the rest of each text."""
    for text in texts:
        for start in range(0, len(text) - CHARACTERS + 1, CHARACTERS):
            yield text[start : start + CHARACTERS]


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a Python file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


class Texts(NamedTuple):
    """Greedy texts of one model in float32."""

    continued: list[str]
    """A continuation of each of `PROMPTS`."""
    answer: str
    """The answer to `QUESTION` behind the chat template."""


def theirs(model, tokenizer) -> Texts:
    """Generate with a model of transformers or PEFT."""

    def continuation(encoded) -> str:
        ids = model.generate(**encoded, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
        return tokenizer.decode(ids[encoded["input_ids"].shape[1] :], skip_special_tokens=True)

    turns = [{"role": "user", "content": QUESTION}]
    chat = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    continued = [continuation(tokenizer(prompt, return_tensors="pt")) for prompt in PROMPTS]
    return Texts(continued, continuation(chat))


def ours(road: Road, run: str) -> Texts:
    """Generate with a run of ringformer."""
    answers = road.work / f"{run.replace('/', '-')}.jsonl"
    length = f"--max_new_tokens={NEW_TOKENS}"
    road.run("generate", f"--run={run}", "--prompts=prompts.jsonl", f"--out={answers.name}", length)
    continued = [json.loads(line)["text"] for line in answers.read_text().splitlines()]
    for prompt, text in zip(PROMPTS, continued, strict=True):
        print(f"{prompt!r} -> {text!r}")
    chat = road.run("generate", f"--run={run}", "--chat", f"--prompt={QUESTION}", length, shows=())
    answer = chat.stdout.removesuffix("\n")
    print(f"{QUESTION!r} -> {answer!r}")
    return Texts(continued, answer)


def compare(name: str, here: Texts, there: Texts, of_base: Texts) -> None:
    """Raise Stopped unless two models write the same texts, which are not those of the base."""
    check(there == here, f"{name} writes other texts than the run:\n{there}\n{here}")
    check(of_base != here, f"{name}: the base writes the same texts, so they show nothing: {of_base}")
    changed = sum(one != other for one, other in zip(flat(here), flat(of_base), strict=True))
    print(f"{name}: {len(flat(here))} texts equal those of the run; {changed} are not those of the base\n", flush=True)


def flat(texts: Texts) -> list[str]:
    return [*texts.continued, texts.answer]


def loaded(folder: Path):
    """The model and tokenizer of a folder, as the page loads them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def loaded_by_its_card(folder: Path):
    """The model that the code in an export's README.md loads, in float32. It runs in that folder."""
    code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    print(code.replace(f"{folder.parents[1]}/", "").rstrip())
    before = Path.cwd()
    names: dict = {}
    os.chdir(folder)
    try:
        exec(code.replace("dtype='auto'", "dtype='float32'"), names)
    finally:
        os.chdir(before)
    return names["model"].eval()


def prepare(road: Road) -> None:
    write_documents(road.work / "documents")
    command = (
        *("data", "prepare", "--store=stores/documents", "--source=text:documents", "--clean=html"),
        *("--tokenizer=models/smol/tokenizer.json", "--held_out=0.05", "--skip_empty"),
    )
    refused = road.run(*command, code=2, shows=("latin.txt: byte",))
    check("für große Kontexte" in refused.stderr or "Schlüssel" in refused.stderr, f"another text: {refused.stderr}")
    (advice,) = re.findall(r"in this order: (--encoding=\S+)", refused.stderr)
    road.run(*command, advice, shows=(r"/(train|eval): \d+ documents", "skipped", "binary:"))
    report = (road.work / "stores" / "documents" / "report.json").read_text()
    check("picture.png" in report, f"the report does not name the binary file: {report}")
    road.run(
        "data",
        "inspect",
        "stores/documents",
        "--samples=2",
        "--ring_size=4",
        "--seq_len=512",
        shows=("on a ring of", "layout, ", "zigzag"),
    )


def train_in_full(road: Road) -> None:
    """Train, interrupt the second stage, and resume it."""
    command = "train", "--config=configs/road_config.py"
    second = Path("runs/ours/stage-2-512")
    road.run(*command, code=130, interrupt=second / "checkpoints" / "1", shows=("stopped by Ctrl-C",))
    state = stages(road)[1]["state"]
    print(f"stages.json: stage 2 is {state}\n")
    check(state in ("at step 1", "at step 2"), f"stages.json does not say how far it came: {state}")
    began = state.split()[-1]
    resumed = road.run(*command, shows=(f"from step {began} to 3", r"^step \d/3 ", "finished"))
    check("stage-1-256" not in resumed.stdout, f"stage 1 ran again: {resumed.output}")
    rows = [json.loads(line) for line in (road.work / second / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    evaluated = [row["step"] for row in rows if "eval_loss" in row]
    check(steps == [1, 2, 3] and evaluated == [0, 3], f"the losses do not continue: {steps}, {evaluated}")
    for stage in stages(road):
        falls = stage["eval_loss_last"] < stage["eval_loss_first"]
        check(falls and stage["state"] == "finished", f"the held-out loss of a stage does not fall: {stage}")


def stages(road: Road) -> list[dict]:
    return json.loads((road.work / "runs" / "ours" / "stages.json").read_text())


def train_adapters(road: Road) -> None:
    road.run("train", "--config=configs/road_lora_config.py", shows=("adapters of rank", r"eval_loss", r"^step \d/2 "))
    rows = [json.loads(line) for line in (road.work / "runs/ours-lora/metrics.jsonl").read_text().splitlines()]
    losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
    check(losses[-1] < losses[0], f"the held-out loss does not fall: {losses}")


def evaluate(road: Road, run: str) -> None:
    road.run(
        *("eval", "perplexity", f"--run={run}", "--store=stores/documents", "--lengths=128,256,512"),
        *("--documents=4", "--mesh_dim=1,1,1,2", "--cpu_devices=2", "--out=runs/ours/perplexity"),
        shows=("the same last", r"^ +(128|256|512) +4 +256 "),
    )
    road.run(
        *("eval", "needle", f"--run={run}", "--lengths=256,512", "--depths=10,90", "--num_cases=1"),
        *("--mesh_dim=1,1,1,2", "--cpu_devices=2", "--out=runs/ours/needle"),
        shows=("needle in", "^ +(depth|[0-9]+%|mean) "),
    )


def walk(released: Path, work: Path) -> None:
    """Run the page's commands with the model in `released`, in the folder `work`. Raises Stopped at the first fault."""
    road = Road(work)
    for name in ("models", "configs", "export"):
        (work / name).mkdir()
    for name in ("road_config.py", "road_lora_config.py"):
        shutil.copy(Path(__file__).with_name(name), work / "configs" / name)
    (work / "SmolLM2-135M-Instruct").symlink_to(released.resolve())
    (work / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    road.run("convert", "from-hf", "SmolLM2-135M-Instruct", "models/smol", shows=("parameters",))
    road.run("convert", "verify", "SmolLM2-135M-Instruct", "models/smol", "--length=64", shows=("same top", "verdict"))
    prepare(road)
    road.run(
        "estimate", "--config=configs/road_config.py", "--target=8xH100", shows=(r"^stage +context", r"^stage [12]  ")
    )
    train_in_full(road)
    train_adapters(road)
    full, adapters = "runs/ours/stage-2-512", "runs/ours-lora"
    evaluate(road, full)
    by_run, by_adapters = ours(road, full), ours(road, adapters)

    road.run("convert", "to-hf", full, "export/ours", "--dtype=float32", shows=("parameters",))
    road.run("convert", "verify", "export/ours", full, "--length=64", shows=("verdict",))
    road.run("convert", "to-peft", adapters, "export/ours-lora", shows=("^",))
    of_base = theirs(*loaded(released))
    model, tokenizer = loaded(work / "export" / "ours")
    compare("export/ours in transformers", by_run, theirs(model, tokenizer), of_base)
    model = loaded_by_its_card(work / "export" / "ours-lora")
    with_adapters = theirs(model, tokenizer)
    with model.disable_adapter():
        of_base = theirs(model, tokenizer)
    compare("export/ours-lora in PEFT", by_adapters, with_adapters, of_base)


def main(arguments: list[str]) -> int:
    if not 1 <= len(arguments) <= 2:
        print(__doc__)
        return 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(arguments[1] if len(arguments) == 2 else temporary)
        work.mkdir(exist_ok=True)
        try:
            walk(Path(arguments[0]), work)
        except Stopped as error:
            print(error, file=sys.stderr)
            return 1
    usage = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    cpu = sum(x.ru_utime + x.ru_stime for x in usage)
    print(f"the road is open: {time.monotonic() - began:.0f} s, {cpu:.0f} of CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
