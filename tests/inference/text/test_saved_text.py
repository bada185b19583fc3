"""`generate --save_session` and `--session`: a document is read once, and later commands say what they would say to all
of it."""

import io
import re
import shutil
import sys

import numpy as np
import pytest
import torch
import transformers

from ringformer.checkpoints.array_folder import WRITTEN_LAST
from ringformer.cli import main
from ringformer.convert.import_hf import from_hf
from ringformer.inference.generator import Generator
from ringformer.inference.session_files import read_session
from ringformer.inference.text.chat import Chat
from ringformer.inference.text.text_generator import TextGenerator
from tests.damage import files, flip
from tests.inference.runs import model_folder
from tests.inference.test_commands import type_in

DOCUMENT = " ".join(f"Line {i}: the ring carries keys of rank {i * 7 % 11}." for i in range(20)) + " "
QUESTIONS = ["Which rank is it?", "And\nthen"]
WORDS = ["--max_new_tokens=6", "--compute_dtype=float32", "--template=llama3", "--max_length=1024"]
MESHES = {"one device": [], "ring, int8": ["--mesh_dim=1,1,2,4", "--cache_dtype=int8", "--prefill_chunk=64"]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("run") / "ours")


@pytest.fixture(scope="module")
def document(run):
    path = run.with_name("document.txt")
    path.write_text(DOCUMENT)
    return path


@pytest.fixture(scope="module")
def saved(run, document):
    """A session of the document, on one device."""
    folder = run.with_name("saved")
    words = [f"--run={run}", f"--prompt_file={document}", f"--save_session={folder}", *WORDS]
    assert main(["generate", *words]) == 0
    return folder


def read_tokens(err):
    """Numbers of tokens that were read for each answer."""
    return [int(number.replace(",", "")) for number in re.findall(r"prompt of ([\d,]+) tokens", err)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "chat"),
    [
        ("ring, int8", []),
        ("one device", ["--chat", "--system=Be a ring."]),
        pytest.param("one device", [], marks=pytest.mark.slow),
        pytest.param("ring, int8", ["--chat"], marks=pytest.mark.slow),
    ],
)
def test_a_document_is_read_once(run, document, tmp_path, capsys, mesh, chat):
    """Answers are as to the document with the question behind it, and so is that to a question behind a question.
    Lengths and dtypes are those of the session."""
    options = [f"--run={run}", *chat, *MESHES[mesh]]
    capsys.readouterr()
    command = ["generate", *options, *WORDS]
    assert main([*command, f"--prompt_file={document}", f"--save_session={tmp_path / 's'}"]) == 0
    err = capsys.readouterr().err
    assert f"saved a session of {read_tokens(err)[0]} tokens in {tmp_path / 's'}\n" in err
    left_open = "--compute_dtype", "--max_length", "--prefill_chunk"
    short = [word for word in command if not word.startswith(left_open)]
    text, folder = DOCUMENT, tmp_path / "s"
    for number, question in enumerate(QUESTIONS):
        new = tmp_path / f"s{number}"
        text += question
        assert main([*command, f"--prompt={text}"]) == 0
        expected, err = capsys.readouterr()
        (whole,) = read_tokens(err)
        assert main([*short, f"--session={folder}", f"--prompt={question}", f"--save_session={new}"]) == 0
        out, err = capsys.readouterr()
        assert out == expected
        assert read_tokens(err)[0] < 40 < whole - 300
        assert read_session(new)["about"]["text"] == text
        folder = new


@pytest.mark.slow
@pytest.mark.parametrize("chat", [[], ["--chat"]], ids=["text", "chat"])
def test_questions_at_a_terminal(run, document, saved, tmp_path, monkeypatch, capsys, chat):
    """Prompts each follow the document. In a chat, the first question follows it, and the others the answers."""
    folder = saved
    if chat:
        words = [f"--run={run}", *chat, *WORDS, f"--prompt_file={document}", f"--save_session={tmp_path / 's'}"]
        assert main(["generate", *words]) == 0
        folder = tmp_path / "s"
    capsys.readouterr()
    type_in(monkeypatch, QUESTIONS[0], QUESTIONS[1])
    assert main(["generate", f"--run={run}", *chat, *WORDS, f"--session={folder}"]) == 0
    out, err = capsys.readouterr()
    model = TextGenerator.load(run, max_length=1024, compute_dtype="float32", template="llama3")
    if chat:
        alone = Chat(model)
        expected = ["".join(alone.ask(q, max_new_tokens=6)) for q in (DOCUMENT + QUESTIONS[0], QUESTIONS[1])]
    else:
        expected = model.complete([DOCUMENT + QUESTIONS[0]], max_new_tokens=6)
        expected += model.complete([DOCUMENT + QUESTIONS[1]], max_new_tokens=6)
    assert out.encode(errors="replace") == "".join(f"{text}\n" for text in [*expected, ""]).encode(errors="replace")
    assert max(read_tokens(err)) < 60 and len(read_tokens(err)) == 2


MISTAKES = [
    (["--mesh_dim=1,1,1,2"], "was saved with mesh_dim=1,1,1,1 (here 1,1,1,2): load the model as it was then"),
    (["--cache_dtype=int8"], "cache_dtype=compute (here int8)"),
    (["--compute_dtype=bfloat16"], "compute_dtype=float32 (here bfloat16)"),
    (["--max_length=512"], "max_length=1024 (here 512)"),
    (["--prefill_chunk=64"], "prefill_chunk=None (here 64)"),
    (["--chat"], "pass the same --chat, --system, --template and --tokenizer as when it was saved"),
    (
        ["--tokenizer=bytes", "--allow=data.tokenizer"],
        "pass the same --chat, --system, --template and --tokenizer as when it was saved",
    ),
    (["--max_new_tokens=2000"], "and 2,000 new ones exceed the limit of 1,024 tokens"),
    (["--save_session=SAVED"], "--save_session=SAVED exists: choose another folder, or delete it"),
    (["--session=RUN"], "RUN holds no session: name a folder that a session was saved to"),
    (["--session=none"], "there is no session in none"),
    (["--run=OTHER"], "was saved with checkpoint="),
]


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model of the same architecture and tokenizer, whose weights are others."""
    folder = tmp_path_factory.mktemp("other")
    model_folder(folder / "first")
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder / "hf")
    with torch.no_grad():
        theirs.model.norm.weight.mul_(1.5)
    theirs.save_pretrained(folder / "hf")
    from_hf(folder / "hf", folder / "ours")
    return folder / "ours"


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_no_weights_are_read(run, saved, other, words, message, monkeypatch, capsys):
    monkeypatch.setattr(Generator, "load", lambda *_, **__: pytest.fail("loaded"))
    names = {"SAVED": str(saved), "RUN": str(run), "OTHER": str(other)}
    for name, path in names.items():
        words, message = [word.replace(name, path) for word in words], message.replace(name, path)
    command = ["generate", f"--run={run}", "--prompt=a", "--template=llama3", "--max_new_tokens=6"]
    assert main([*command, f"--session={saved}", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and err.startswith("ringformer generate: ") and message in err


@pytest.mark.slow
def test_damage_and_other_uses_are_one_line(run, saved, tmp_path, monkeypatch, capsys):
    capsys.readouterr()
    rng, command = np.random.default_rng(0), ["generate", f"--run={run}", *WORDS]
    for file in files(saved):
        if file.name in WRITTEN_LAST:
            continue
        copy = shutil.copytree(saved, tmp_path / "copy")
        flip(copy / file.relative_to(saved), rng)
        assert main([*command, f"--session={copy}", "--prompt=a"]) == 1
        *loading, line = capsys.readouterr().err.splitlines()
        assert all(before.startswith("loading ") for before in loading)
        assert f"the session in {copy} is damaged (" in line and "read its text again" in line
        shutil.rmtree(copy)
    type_in(monkeypatch, "a")
    for words, message in (
        ([f"--save_session={tmp_path / 'new'}"], "--save_session saves the cache of one prompt"),
        (
            [f"--session={saved}", "--prompts=a", "--out=b"],
            "--prompts takes none of --distributed, --system, --session",
        ),
    ):
        assert main([*command, *words]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and message in err
    session = Generator.load(run, max_length=1024, compute_dtype="float32").session(1)
    session.append([[1, 2, 3]])
    session.save(tmp_path / "tokens")
    monkeypatch.setattr(sys, "stdin", io.StringIO("a"))
    assert main([*command, f"--session={tmp_path / 'tokens'}", "--prompt=a"]) == 2
    assert "has tokens without their text: restore it with Generator.restore_session" in capsys.readouterr().err
