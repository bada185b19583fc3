"""Files of prompts: every row is answered as alone, a shared text is read once, a killed run goes on where it was."""

import json

import pytest

from ringformer.cli import main
from ringformer.inference.session import Session
from ringformer.inference.text import prompt_rows
from ringformer.inference.text.run_text import RunText
from ringformer.inference.text.text_generator import TextGenerator, shared_tokens
from tests.inference.runs import model_folder

DOCUMENT = " ".join(f"Line {i}: the ring carries keys of rank {i * 7 % 11}." for i in range(20)) + " "
QUESTIONS = ["What", "Which rank is it?", "And then", "the", "x" * 40, "keys of", "Line 3", "ring"]
WORDS = ["--max_new_tokens=6", "--allow_longer", "--compute_dtype=float32"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("run") / "ours")


@pytest.fixture(scope="module")
def alone(run):
    """Answers to each prompt alone."""
    model = TextGenerator.load(run, max_length=2048, compute_dtype="float32")
    return {prompt: model.complete([prompt], max_new_tokens=6)[0] for prompt in (*PROMPTS, "short", "other text")}


PROMPTS = [DOCUMENT + question for question in QUESTIONS]


def write(path, *rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def appended(monkeypatch):
    """Tokens that sessions read, a list for each call."""
    calls, append = [], Session._append

    def noted(self, rows, scored=False):
        calls.append([len(row) for row in rows])
        return append(self, rows, scored)

    monkeypatch.setattr(Session, "_append", noted)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("mesh_dim", [pytest.param("1,1,1,1", marks=pytest.mark.slow), "1,1,1,4"])
def test_the_document_is_read_once(run, alone, tmp_path, appended, mesh_dim):
    rows = [{"prompt": prompt, "id": i} for i, prompt in enumerate(PROMPTS)]
    file = write(tmp_path / "in.jsonl", *rows, {"prompt": "short"}, {"prompt": "other text"})
    words = [f"--run={run}", f"--prompts={file}", f"--out={tmp_path / 'out.jsonl'}", "--batch_size=3", *WORDS]
    assert main(["generate", *words, f"--mesh_dim={mesh_dim}"]) == 0
    expected = [row | {"text": alone[row["prompt"]]} for row in [*rows, {"prompt": "short"}, {"prompt": "other text"}]]
    assert read(tmp_path / "out.jsonl") == expected
    long = [call for call in appended if max(call) > 100]
    encoded = [RunText(run).encode(prompt) for prompt in PROMPTS]
    assert long == [[shared_tokens(encoded)]], "once, in a row of its own"


@pytest.mark.slow
def test_a_killed_run_goes_on(run, alone, tmp_path, monkeypatch):
    """After any row, and in the middle of one."""
    file = write(tmp_path / "in.jsonl", *({"prompt": prompt} for prompt in PROMPTS[:4]))
    out = tmp_path / "out.jsonl"
    words = ["generate", f"--run={run}", f"--prompts={file}", f"--out={out}", *WORDS]
    append, count = prompt_rows.append_line, iter(range(9))

    def killed(path, line):
        if next(count) == 2:
            with path.open("a") as file:
                file.write(line[:20])
            raise KeyboardInterrupt
        append(path, line)

    monkeypatch.setattr(prompt_rows, "append_line", killed)
    assert main(words) == 130
    assert out.read_text().count("\n") == 2 and not out.read_text().endswith("\n")
    monkeypatch.setattr(prompt_rows, "append_line", append)
    for _ in range(2):  # and again: nothing is left to do
        assert main(words) == 0
        assert read(out) == [{"prompt": prompt, "text": alone[prompt]} for prompt in PROMPTS[:4]]


def test_rows_that_cannot_be_answered_are_one_line_each(run, alone, tmp_path, capsys):
    rows = ['{"prompt": ', {"text": "no prompt"}, {"prompt": 7}, [1], {"prompt": ""}, {"prompt": "a" * 3000}]
    file = write(tmp_path / "in.jsonl", *rows, {"prompt": "short", "error": "the user's"})
    out = tmp_path / "out.jsonl"
    words = ["generate", f"--run={run}", f"--prompts={file}", f"--out={out}", "--max_length=2048", *WORDS]
    for _ in range(2):
        assert main(words) == (1 if _ == 0 else 0)
    found = read(out)
    assert [("text" in row, "error" in row) for row in found[2:6]] == [(False, True)] * 4
    assert found[-1] == {"prompt": "short", "error": "the user's", "text": alone["short"]}
    reasons = ["not a line of JSON", *["not an object with a text 'prompt'"] * 3, "empty"]
    assert all(reason in row["error"] for row, reason in zip(found, reasons, strict=False))
    assert " tokens and 6 new ones exceed the limit of 2,048" in found[5]["error"]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"{file}:")]
    assert [line.removeprefix(f"{file}:").split(":")[0] for line in lines] == list("123456")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompts=x.jsonl"], "belong together"),
        (["--out=x.jsonl", "--prompt=a"], "belong together"),
        (["--prompts=x.jsonl", "--out=none/x.jsonl"], "there is no folder none; create it"),
        (["--prompt=a", "--batch_size=2"], "belong together"),
        (["--prompts=none.jsonl", "--out=o.jsonl"], "there is no file of prompts none.jsonl"),
        (["--prompts=none.jsonl", "--out=o.jsonl", "--batch_size=0"], "--batch_size=0 must be at least 1"),
        (
            ["--prompts=none.jsonl", "--out=o.jsonl", "--chat", "--system=s"],
            "none of --distributed, --system, --session and --save_session",
        ),
    ],
)
def test_options_that_cannot_be(run, capsys, words, message):
    assert main(["generate", f"--run={run}", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_answers_of_other_prompts_are_kept(run, tmp_path, capsys):
    file, out = (
        write(tmp_path / "in.jsonl", {"prompt": "a"}),
        write(tmp_path / "out.jsonl", {"prompt": "b", "text": "c"}),
    )
    assert main(["generate", f"--run={run}", f"--prompts={file}", f"--out={out}", *WORDS]) == 2
    assert f"{out}:1 does not answer {file}:1: choose another --out" in capsys.readouterr().err
    assert read(out) == [{"prompt": "b", "text": "c"}]


def test_shared_tokens():
    assert shared_tokens([[1, 2, 3], [1, 2, 4, 5], [1, 2]]) == 1, "a token is left for every row"
    assert shared_tokens([[1, 2, 3], [1, 2, 3]]) == 2 and shared_tokens([[1], [2]]) == 0
