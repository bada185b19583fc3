"""Every option that a message of the data room advises: an input provokes the message, the advice is taken as it is
written, and the outcome is the promised one."""

import ast
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import datasets
import pytest

import ringformer.data
from ringformer.cli import main
from ringformer.data import Loader, TokenStore, load_tokenizer, open_or_build
from ringformer.data.packing.options import PackingOptions
from ringformer.runs.config_file import load_config, parse
from tests.data.chat_samples import LLAMA3_JINJA, llama3, sentencepiece

ROOT = Path(ringformer.data.__file__).parent
FLAG = re.compile(r"--[a-z_]+(?:\.[a-z_]+)*")
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def lines(*records) -> bytes:
    return "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records).encode()


def rows(path: Path, *records) -> None:
    datasets.Dataset.from_list(list(records)).to_parquet(path)


THOUGHTS = [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nSo."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Yes."},
]
HEADS = "{%% for m in messages %%}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n%s<|eot_id|>{%% endfor %%}"
HEAD = "{%% if add_generation_prompt %%}<|start_header_id|>assistant<|end_header_id|>\n\n%s{%% endif %%}"
FORGETS = HEADS % "{{ m.content if loop.last else m.content.split('</think>')[-1].lstrip() }}" + HEAD % ""
OPENS = HEADS % "{{ m.content }}" + HEAD % "{% if thinks is not defined or thinks %}<think>\n{% endif %}"


class Case(NamedTuple):
    """An error, and the advice in it that is taken."""

    place: str
    """File of the message."""
    flags: tuple[str, ...]
    """Options that the message names."""
    command: str
    """Command that fails, after `ringformer data`; {folder} is a folder with the files."""
    files: dict[str, bytes | Callable[[Path], object]]
    """Contents of files, or functions that write them."""
    error: str
    """Expression that the error matches."""
    taken: str
    """Expression for the advice in the error, which is added to the command; or the option as a person writes it."""
    promise: str
    """Expression that the output of the new command matches."""
    instead: str = ""
    """Option of the command that the advice takes the place of."""


PREPARE = "prepare --store={folder}/store --held_out=0 "
OWN_TEMPLATE = "--source=jsonl:{folder}/a.jsonl --format=messages --template=tokenizer --tokenizer={folder}/t"
SKIPPED = "1 records skipped: "
SKIPS = r"--skip_malformed"
TEXT = r"train: 1 documents, "
CASES = {
    "empty document": Case(
        "sources/documents.py",
        ("--skip_empty", "--config.data.skip_empty"),
        PREPARE + "--source=jsonl:{folder}/a.jsonl",
        {"a.jsonl": lines({"text": ""}, {"text": "a"})},
        r"a\.jsonl:1 is an empty document",
        r"--skip_empty",
        TEXT + r".*1 empty documents skipped",
    ),
    "weights of files": Case(
        "sources/documents.py",
        ("--weight_field",),
        PREPARE + "--source=text:{folder}/a.txt --weight_field=w",
        {"a.txt": b"a"},
        "leave out --weight_field",
        "",
        TEXT,
        instead="--weight_field=w",
    ),
    "a token that the tokenizer lacks": Case(
        "stores/beginning.py",
        ("--begin",),
        PREPARE + "--source=text:{folder}/a.txt --begin=true",
        {"a.txt": b"a"},
        "tokenizer bytes has no BOS token: leave out --begin",
        "",
        TEXT,
        instead="--begin=true",
    ),
    "malformed line": Case(
        "sources/malformed.py",
        ("--skip_malformed", "--config.data.skip_malformed"),
        PREPARE + "--source=jsonl:{folder}/a.jsonl",
        {"a.jsonl": lines("{", {"text": "a"})},
        r"a\.jsonl:1 is not a line of JSON",
        SKIPS,
        f"{TEXT}.*{SKIPPED}not JSON",
    ),
    "weight of another type": Case(
        "sources/malformed.py",
        ("--skip_malformed", "--config.data.skip_malformed"),
        PREPARE + "--source=jsonl:{folder}/a.jsonl --weight_field=w",
        {"a.jsonl": lines({"text": "a", "w": "heavy"}, {"text": "a", "w": 1})},
        "the weight 'w' is 'heavy'",
        SKIPS,
        f"{TEXT}.*{SKIPPED}a wrong weight",
    ),
    "malformed conversation": Case(
        "sources/malformed.py",
        ("--skip_malformed", "--config.data.skip_malformed"),
        PREPARE + "--source=jsonl:{folder}/a.jsonl --format=messages",
        {"a.jsonl": lines({"messages": [{"role": "user", "content": 3}]}, CHAT)},
        "the 'content' of turn 0 is int, not text",
        SKIPS,
        f"{TEXT}.*{SKIPPED}a content that is not text",
    ),
    "malformed row of tokens": Case(
        "sources/malformed.py",
        ("--skip_malformed", "--config.data.skip_malformed"),
        PREPARE + "--source=parquet:{folder}/a.parquet --format=tokens",
        {
            "a.parquet": lambda path: rows(
                path, {"input_ids": [1, 2], "labels": [2, 1]}, {"input_ids": [1], "labels": [1]}
            )
        },
        "labels of .* are neither",
        SKIPS,
        f"{TEXT}.*{SKIPPED}labels that are not the tokens",
    ),
    "conversation that no template renders": Case(
        "sources/malformed.py",
        ("--skip_malformed", "--config.data.skip_malformed"),
        PREPARE + "--source=jsonl:{folder}/a.jsonl --format=messages --template=tokenizer --tokenizer={folder}/l3",
        {
            "a.jsonl": lines({"messages": [{"role": "user", "content": "bad"}, CHAT["messages"][1]]}, CHAT),
            "l3": lambda path: llama3(
                path, "{{ raise_exception('no') if messages[0].content == 'bad' }}" + LLAMA3_JINJA
            ),
        },
        r"a\.jsonl:1: ",
        SKIPS,
        f"{TEXT}.*{SKIPPED}refused by the chat template",
    ),
    "encoding": Case(
        "sources/text_files.py",
        ("--encoding", "--config.data.encoding"),
        PREPARE + "--source=text:{folder}",
        {"a.txt": "é".encode("latin-1"), "b.txt": "é".encode("utf-16"), "c.txt": "é".encode()},
        "2 of the 3 files still to be read cannot be decoded",
        r"--encoding=\S+",
        r"train: 3 documents, 9 tokens",
    ),
    "undecodable file": Case(
        "sources/malformed.py",
        ("--skip_malformed", "--config.data.skip_malformed"),
        PREPARE + "--source=text:{folder}",
        {"a.txt": b"\xe9", "b.txt": b"a"},
        "a.txt: byte 0xe9 at 0 is not utf-8",
        SKIPS,
        TEXT + r".*1 files skipped: not utf-8.*not utf-8: \S+/a\.txt",
    ),
    "large document": Case(
        "sources/text_files.py",
        ("--max_document_bytes", "--config.data.max_document_bytes"),
        PREPARE + "--source=jsonl:{folder}/a.jsonl --max_document_bytes=3",
        {"a.jsonl": lines({"text": "four"})},
        "more than max_document_bytes=3 bytes of text: split it, or raise --max_document_bytes",
        "--max_document_bytes=4",
        TEXT,
        instead="--max_document_bytes=3",
    ),
    "chats as documents": Case(
        "stores/format_hints.py",
        ("--format",),
        PREPARE + "--source=jsonl:{folder}/a.jsonl",
        {"a.jsonl": lines(CHAT)},
        "no field 'text'; it has: messages",
        r"--format=\w+",
        TEXT + ".* of them masked",
    ),
    "text in another field": Case(
        "stores/format_hints.py",
        ("--field",),
        PREPARE + "--source=jsonl:{folder}/a.jsonl",
        {"a.jsonl": lines({"body": "a"})},
        "no field 'text'; it has: body",
        r"--field=\w+",
        TEXT,
    ),
    "an empty part": Case(
        "stores/prepare.py",
        ("--held_out", "--config.data.held_out"),
        "prepare --store={folder}/store --source=jsonl:{folder}/a.jsonl",
        {"a.jsonl": lines({"text": "a"})},
        "store would be empty: of 1 documents, held_out=0.05 .*choose another --held_out",
        "--held_out=0",
        TEXT,
    ),
    "row without tokens": Case(
        "stores/token_rows.py",
        ("--skip_empty", "--config.data.skip_empty"),
        PREPARE + "--source=parquet:{folder}/a.parquet --format=tokens",
        {"a.parquet": lambda path: rows(path, {"input_ids": []}, {"input_ids": [1]})},
        ":0 has no token",
        r"--skip_empty",
        TEXT + ".*1 empty documents skipped",
    ),
    "tokens of another tokenizer": Case(
        "stores/token_rows.py",
        ("--tokenizer", "--config.data.tokenizer"),
        PREPARE + "--source=parquet:{folder}/a.parquet --format=tokens",
        {
            "a.parquet": lambda path: rows(path, {"input_ids": [300]}),
            "tokenizer.model": lambda path: sentencepiece(path.parent),
        },
        "a token beyond the 257 of tokenizer bytes: name the one that made it with --tokenizer",
        "--tokenizer={folder}/tokenizer.model",
        TEXT,
    ),
    "a template with a date": Case(
        "chats/sandboxed_template.py",
        ("--chat_date",),
        PREPARE + "--source=jsonl:{folder}/a.jsonl --format=messages --template=tokenizer --tokenizer={folder}/l3",
        {"a.jsonl": lines(CHAT), "l3": lambda path: llama3(path, "{{ strftime_now('%d %b %Y') }}" + LLAMA3_JINJA)},
        r"asks for the date \(strftime_now\)",
        r"--chat_date=[-\d]+",
        TEXT,
    ),
    "answers that are rewritten": Case(
        "stores/chat_encoding.py",
        ("--rewritten",),
        PREPARE + OWN_TEMPLATE + " --rewritten=refuse",
        {"a.jsonl": lines({"messages": THOUGHTS}), "t": lambda path: llama3(path, FORGETS)},
        "the chat template writes answer 0 in another way once later turns follow",
        "--rewritten=last",
        "answers dropped: later turns rewrite them",
        instead="--rewritten=refuse",
    ),
    "a prompt for answers with thoughts": Case(
        "chats/trained_answers.py",
        ("--template_option",),
        PREPARE + OWN_TEMPLATE,
        {"a.jsonl": lines({"messages": THOUGHTS[2:4]}), "t": lambda path: llama3(path, OPENS)},
        "ends the prompt of answer 0 with .* or choose another template or --template_option",
        "--template_option=thinks=false",
        "train: 1 documents",
    ),
    "rules of conversations": Case(
        "commands.py",
        ("--clean",),
        PREPARE + "--source=jsonl:{folder}/a.jsonl --clean=html,unprintable,duplicate",
        {"a.jsonl": lines({"text": "<p>a</p>"})},
        "only the rule html cleans documents: leave out the others",
        "--clean=html",
        TEXT.replace("1 documents, ", "1 documents, 2 tokens"),
        instead="--clean=html,unprintable,duplicate",
    ),
    "an object for each line": Case(
        "sources/records.py",
        (),
        PREPARE + "--source=json:{folder}/a.jsonl",
        {"a.jsonl": lines({"text": "a"})},
        "is not a JSON array of objects; for one object per line use jsonl:",
        r"jsonl:\S+\.jsonl",
        TEXT,
        instead="--source=json:{folder}/a.jsonl",
    ),
}
"""Errors of `ringformer data prepare`."""


def prepared(folder: Path, files: dict) -> None:
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            content(folder / name)


def run(command: str, capsys) -> tuple[int, str]:
    """Return the exit code of `ringformer data COMMAND`, and what it prints, as one line."""
    code = main(["data", *shlex.split(command)])
    captured = capsys.readouterr()
    return code, " ".join((captured.out if code == 0 else captured.err).split())


@pytest.mark.parametrize("name", CASES)
def test_an_option_that_an_error_advises_does_what_it_promises(tmp_path, name, capsys):
    case = CASES[name]
    (tmp_path / "data").mkdir()
    prepared(tmp_path / "data", case.files)
    command, taken, instead = (
        text.replace("{folder}/store", f"{tmp_path}/store").replace("{folder}", f"{tmp_path}/data")
        for text in (case.command, case.taken, case.instead)
    )
    code, error = run(command, capsys)
    assert code == 2 and re.search(case.error, error), error
    assert set(FLAG.findall(error)) >= set(case.flags), error
    advice = re.search(taken, error)
    option = advice[0].rstrip(",") if advice else taken
    if option.startswith("jsonl:"):
        option = f"--source={option}"
    code, out = run(f"{command.replace(instead, '') if instead else command} {option}", capsys)
    assert code == 0 and re.search(case.promise, out), out


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if any("config" in flag for flag in case.flags)])
def test_an_option_of_a_run_that_an_error_advises_does_too(tmp_path, name, capsys):
    """The run builds the store, so its keys make the same one as the options of the command."""
    case = CASES[name]
    (tmp_path / "data").mkdir()
    prepared(tmp_path / "data", case.files)
    command = case.command.replace("{folder}/store", f"{tmp_path}/store").replace("{folder}", f"{tmp_path}/data")
    _, error = run(command, capsys)
    (key,) = [flag for flag in case.flags if flag.startswith("--config")]
    written = re.search(rf"{re.escape(key)}(=[^\s),]+(?:,[^\s),]+)*)?", error)
    value = written[1] or case.taken[case.taken.index("=") :].replace("{folder}", f"{tmp_path}/data")
    keys = [f"--config.data.{option.removeprefix('--')}" for option in shlex.split(command)[1:]]
    (tmp_path / "config.py").write_text(
        "from ringformer.runs.config import base_config\n\n\ndef get_config():\n    return base_config('tiny')\n"
    )
    spec = f"{key}{value}"
    data = parse(load_config(tmp_path / "config.py", [*keys, spec]), inherit=False).data
    assert open_or_build(tmp_path / "store", data, load_tokenizer(data.tokenizer))[0].meta["documents"]


def test_the_tokenizer_that_inspect_asks_for(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(lines({"text": "a"}))
    model = sentencepiece(tmp_path)
    command = f"prepare --store={tmp_path}/s --held_out=0 --source=jsonl:{tmp_path}/a.jsonl --tokenizer={model}"
    assert run(command, capsys)[0] == 0
    code, error = run(f"inspect {tmp_path}/s --tokenizer=bytes", capsys)
    assert code == 2 and "set --tokenizer to the right one" in error
    assert run(f"inspect {tmp_path}/s --tokenizer={model}", capsys)[0] == 0


def test_options_that_inspect_takes_together(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(lines({"text": "a" * 100}))
    assert run(f"prepare --store={tmp_path}/s --held_out=0 --source=jsonl:{tmp_path}/a.jsonl", capsys)[0] == 0
    for wrong, error, right in (
        ("--samples=0", "--samples=0 must be at least 1", "--samples=1"),
        ("--ring_size=2", "--ring_size=2 and --seq_len=None: give both", "--ring_size=2 --seq_len=64"),
        (
            "--min_length=3",
            "--min_length=3, --max_length=0 need --ring_size and --seq_len",
            "--min_length=3 --ring_size=2 --seq_len=64",
        ),
    ):
        code, message = run(f"inspect {tmp_path}/s {wrong}", capsys)
        assert code == 2 and error in message
        assert run(f"inspect {tmp_path}/s {right}", capsys)[0] == 0


def test_a_tokenizer_is_trained_on_what_can_be_read(tmp_path, capsys):
    text = "The ring carries keys and values, naïve. " * 50
    (tmp_path / "a.jsonl").write_bytes(lines("", {"text": text}, "{", {"text": text}))
    (tmp_path / "a.txt").write_bytes(text.encode("latin-1"))
    (tmp_path / "b.txt").write_text(text)
    (tmp_path / "c.txt").write_bytes(b"a\0")
    words = f"--vocab_size=290 --out={tmp_path}/own.model"
    for source, option, printed in (
        (f"jsonl:{tmp_path}/a.jsonl", "--skip_malformed", "1 blank lines skipped 1 records skipped: not JSON"),
        (f"text:{tmp_path}/*.txt", r"--encoding=\S+", "1 files skipped: binary wrote"),
        (f"text:{tmp_path}/*.txt", "--skip_malformed", "1 files skipped: not utf-8 wrote"),
    ):
        code, error = run(f"tokenizer --source={source} {words}", capsys)
        assert code == 2
        code, out = run(f"tokenizer --source={source} {words} {re.search(option, error)[0]}", capsys)
        assert code == 0 and printed in out, out


def test_the_command_that_counts_other_layouts(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_bytes(lines(*({"text": "a" * (20 + i % 9)} for i in range(200))))
    assert run(f"prepare --store={tmp_path}/s --held_out=0 --source=jsonl:{tmp_path}/a.jsonl", capsys)[0] == 0
    packing = PackingOptions(packing="whole", min_length=22, max_length=27)
    loader = Loader(
        TokenStore(tmp_path / "s" / "train"),
        batch_size=2,
        seq_len=256,
        seed=0,
        layout="zigzag",
        ring_size=4,
        packing=packing,
    )
    line = loader.describe_balance(4)
    command = re.search("`ringformer data (.*)`", line)[1]
    assert all(flag in command for flag in ("--ring_size=4", "--seq_len=256", "--min_length=22", "--max_length=27"))
    code, out = run(command, capsys)
    assert code == 0 and "buckets" in out


def test_another_place_for_a_tokenizer_is_written_to(tmp_path, capsys):
    """A place that keeps no files is refused with its option; another --out works."""
    lines = [f"{number} keys and values travel around the ring" for number in range(200)]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    command = f"tokenizer --source=text:{tmp_path}/lines.txt --vocab_size=300 --out="
    assert main(["data", *shlex.split(f"{command}/proc/x.model")]) == 2
    assert "--out=/proc/x.model: /proc keeps no files; choose another place" in capsys.readouterr().err
    code, out = run(f"{command}{tmp_path}/x.model", capsys)
    assert code == 0 and (tmp_path / "x.model").is_file(), out


ELSEWHERE = {
    ("commands.py", "--max_document_bytes"),
    ("commands.py", "--out"),
    ("stores/inspect_store.py", "--tokenizer"),
    *(("commands.py", flag) for flag in ("--samples", "--ring_size", "--seq_len", "--min_length", "--max_length")),
    *(("loader.py", flag) for flag in ("--ring_size", "--seq_len")),
}
"""Options that the tests after the table try."""


def advised(path: Path) -> set[str]:
    """Options in the texts of a file, but for docstrings and the declarations of options."""
    tree = ast.parse(path.read_text())
    declared = {
        id(node)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        for node in ast.walk(call)
    }
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in declared | documents
    )
    return {flag for text in texts for flag in FLAG.findall(text)}


def test_no_option_is_advised_that_is_not_tried():
    found = {(path.relative_to(ROOT).as_posix(), flag) for path in ROOT.rglob("*.py") for flag in advised(path)}
    tried = {(case.place, flag) for case in CASES.values() for flag in case.flags} | ELSEWHERE
    assert found == tried
