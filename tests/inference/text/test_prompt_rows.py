"""Files of prompts: every row is answered as alone, a shared text is read once, a killed run goes on where it was."""

import fcntl
import json
import os

import pytest

from ringformer.checkpoints import saved_model
from ringformer.cli import main
from ringformer.cli.parser import Parser
from ringformer.files.resumed_lines import ResumedLines
from ringformer.inference.commands import SAME_ANSWERS, add_generate
from ringformer.inference.session import Session
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


def kill_at(context, row):
    """Have the command die while it writes this row of what is left."""
    append = ResumedLines.append
    written = []

    def killed(self, line):
        written.append(line)
        if len(written) == row + 1:
            with self.path.open("a") as file:
                file.write(line[:20])
            raise KeyboardInterrupt
        append(self, line)

    context.setattr(ResumedLines, "append", killed)


@pytest.mark.slow
def test_a_killed_run_goes_on(run, alone, tmp_path, monkeypatch):
    """After any row, and in the middle of one."""
    file = write(tmp_path / "in.jsonl", *({"prompt": prompt} for prompt in PROMPTS[:4]))
    out = tmp_path / "out.jsonl"
    words = ["generate", f"--run={run}", f"--prompts={file}", f"--out={out}", *WORDS]
    with monkeypatch.context() as context:
        kill_at(context, 2)
        assert main(words) == 130
    assert out.read_text().count("\n") == 2 and not out.read_text().endswith("\n")
    for _ in range(2):  # and again: nothing is left to do
        assert main(words) == 0
        assert read(out) == [{"prompt": prompt, "text": alone[prompt]} for prompt in PROMPTS[:4]]


def test_rows_that_cannot_be_answered_are_one_line_each(run, alone, tmp_path, capsys):
    rows = ['{"prompt": ', {"question": "no prompt"}, {"prompt": 7}, [1], {"prompt": ""}, {"prompt": "a" * 3000}]
    file = write(tmp_path / "in.jsonl", *rows, {"prompt": "short", "errors": "the user's"})
    out = tmp_path / "out.jsonl"
    words = ["generate", f"--run={run}", f"--prompts={file}", f"--out={out}", "--max_length=2048", *WORDS]
    for _ in range(2):  # and again: the rows have no answers
        assert main(words) == 1
    found = read(out)
    assert [("text" in row, "error" in row) for row in found[2:6]] == [(False, True)] * 4
    assert found[-1] == {"prompt": "short", "errors": "the user's", "text": alone["short"]}
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


POEM = "Two roads diverged in a yellow wood,\nAnd sorry I could not travel both"


def generate(run, file, out, *words):
    return main(["generate", f"--run={run}", f"--prompts={file}", f"--out={out}", *WORDS, *words])


@pytest.mark.parametrize(
    "content", [POEM, POEM + "\n", json.dumps({"prompt": "a", "text": "b"}) + "\n"], ids=["poem", "lines", "rows"]
)
def test_a_file_of_somebody_else_is_kept(run, tmp_path, capsys, content):
    """Whatever it holds; its last line, which has no end, too."""
    file = write(tmp_path / "in.jsonl", {"prompt": "a"})
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    assert generate(run, file, out) == 2
    record = "there is no out.jsonl.made_by.json"
    assert f"{out} was not written by ringformer generate, {record}: choose another --out" in capsys.readouterr().err
    assert out.read_text() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_a_pipe_is_refused(run, tmp_path, capsys):
    """Nothing could be read from it to go on; opening one may wait for ever."""
    file = write(tmp_path / "in.jsonl", {"prompt": "a"})
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path / "pipe", "/dev/null"):
        assert generate(run, file, out) == 2
        assert f"{out} is no regular file" in capsys.readouterr().err


def test_answers_of_other_prompts_are_kept(run, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert generate(run, write(tmp_path / "other.jsonl", {"prompt": "b"}), out) == 0
    before = out.read_bytes()
    file = write(tmp_path / "in.jsonl", {"prompt": "a"})
    assert generate(run, file, out) == 2
    assert f"{out}:1 does not answer {file}:1: choose another --out" in capsys.readouterr().err
    assert out.read_bytes() == before


COUNTED = {
    "max_new_tokens": "--max_new_tokens=7",
    "max_length": "--max_length=500",
    "temperature": "--temperature=0.5",
    "seed": "--seed=7",
    "stop": "--stop=the",
    "cache_dtype": "--cache_dtype=int8",
    "compute_dtype": "--compute_dtype=bfloat16",
    "rope_theta": "--rope_theta=20000",
}
"""An option that decides answers, and another value."""
WITH_COUNTED = {"top_k", "top_p", "rope_scaling"}
"""Options that also count, but are valid only beside others."""
NOT_WITH_PROMPTS = {"prompt", "prompt_file", "system", "session", "save_session"}
OF_PROCESSES = {"distributed", "coordinator_address", "num_processes", "process_id"}
"""Options that `--prompts` refuses."""


def test_every_option_is_known_to_count_or_not():
    """A new option must be listed: it decides answers, or it does not."""
    parser = Parser()
    add_generate(parser)
    options = {action.dest for action in parser._actions if action.dest != "help"}
    options = {name.partition(".")[0] for name in options}
    listed = [set(COUNTED), WITH_COUNTED, set(SAME_ANSWERS), {"chat"}, NOT_WITH_PROMPTS, OF_PROCESSES]
    assert options == set().union(*listed)
    assert len(options) == sum(map(len, listed)), "an option is listed twice"


@pytest.fixture(scope="module")
def answered(run, tmp_path_factory):
    """A file of prompts and one of answers."""
    folder = tmp_path_factory.mktemp("answered")
    file = write(folder / "in.jsonl", *({"prompt": prompt} for prompt in PROMPTS[:3]))
    assert generate(run, file, folder / "out.jsonl") == 0
    return file, folder / "out.jsonl"


@pytest.mark.parametrize("name", COUNTED)
def test_answers_with_other_settings_are_kept(run, answered, capsys, name):
    """Nothing is computed: the file's answers stay, and none is added."""
    file, out = answered
    before = out.read_bytes()
    assert generate(run, file, out, COUNTED[name]) == 2
    error = capsys.readouterr().err
    assert f"{out} was written with other settings: " in error and error.count("\n") == 1
    assert f"{name} is " in error
    assert out.read_bytes() == before


def test_answers_of_another_model_are_kept(answered, tmp_path, capsys):
    file, out = answered
    before = out.read_bytes()
    assert generate(model_folder(tmp_path / "other", seed=1), file, out) == 2
    assert "checkpoint is '" in capsys.readouterr().err
    assert out.read_bytes() == before


def test_a_checkpoint_that_is_written_meanwhile_answers_nothing(run, tmp_path, monkeypatch, capsys):
    """The weights that were read may be others than those that the record names."""
    file = write(tmp_path / "in.jsonl", {"prompt": "a"})
    hashes = iter(["before", "after"])
    monkeypatch.setattr(saved_model, "weights_hash", lambda _: next(hashes))
    assert generate(run, file, tmp_path / "out.jsonl") == 2
    assert f"{run} wrote a checkpoint while it was being read: start again" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--batch_size=2"],
        ["--prefill_chunk=64"],
        ["--mesh_dim=1,1,1,4"],
        ["--mesh_dim=1,2,2,1"],
        ["--kernel=xla", "--no_kernel_check"],
        ["--q_chunk=32", "--k_chunk=64"],
    ],
    ids=" ".join,
)
def test_how_answers_are_computed_does_not_count(run, answered, tmp_path, words):
    """The same answers, in a file of its own; and the file that has them accepts the command."""
    file, out = answered
    assert generate(run, file, tmp_path / "out.jsonl", *words) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == out.read_bytes()
    assert generate(run, file, out, *words) == 0


def test_two_commands_do_not_write_one_file(run, answered, capsys):
    file, out = answered
    before = out.read_bytes()
    with out.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert generate(run, file, out) == 2
    assert f"another process writes {out}: wait for it, or choose another --out" in capsys.readouterr().err
    assert out.read_bytes() == before
    assert generate(run, file, out) == 0


@pytest.mark.parametrize("field", ["text", "error"])
def test_a_row_keeps_its_own_fields(run, tmp_path, capsys, field):
    file = write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b", field: "the user's"})
    assert generate(run, file, tmp_path / "out.jsonl") == 2
    assert f"{file}:2 has a {field!r} already, which its answer would replace" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_prompts_are_not_their_own_answers(run, tmp_path, capsys):
    file = write(tmp_path / "in.jsonl", {"prompt": "a"})
    (tmp_path / "link.jsonl").symlink_to(file)
    for out in (file, tmp_path / "link.jsonl"):
        assert generate(run, file, out) == 2
        assert f"--out={out} is the file of the prompts: choose another --out" in capsys.readouterr().err
    assert read(file) == [{"prompt": "a"}]


@pytest.mark.parametrize("batch_size", [1, 2])
def test_draws_do_not_depend_on_batches_and_stops(run, tmp_path, monkeypatch, batch_size):
    """Each row has draws of its own, so that a prompt given again is answered anew; a killed command goes on with those
    that an uninterrupted one has."""
    rows = [{"prompt": "short"}, {"prompt": ""}, *[{"prompt": "short", "again": i} for i in range(4)]]
    file = write(tmp_path / "in.jsonl", *rows)
    sampled = "--temperature=5", "--seed=3"
    assert generate(run, file, tmp_path / "whole.jsonl", *sampled, "--batch_size=3") == 1
    whole = read(tmp_path / "whole.jsonl")
    texts = [row["text"] for row in whole if "text" in row]
    assert len(texts) == 5 and len(set(texts)) > 3
    with monkeypatch.context() as context:
        kill_at(context, 4)
        assert generate(run, file, tmp_path / "out.jsonl", *sampled, f"--batch_size={batch_size}") == 130
    assert generate(run, file, tmp_path / "out.jsonl", *sampled, f"--batch_size={batch_size}") == 1
    assert read(tmp_path / "out.jsonl") == whole


def test_shared_tokens():
    assert shared_tokens([[1, 2, 3], [1, 2, 4, 5], [1, 2]]) == 1, "a token is left for every row"
    assert shared_tokens([[1, 2, 3], [1, 2, 3]]) == 2 and shared_tokens([[1], [2]]) == 0
