"""`ringformer eval`: what a person gets, and what is refused before anything is computed."""

import dataclasses
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ringformer.cli import main
from ringformer.data.sources.documents import Document
from ringformer.data.stores.options import StoreOptions
from ringformer.data.stores.prepare import build_stores, open_or_build
from ringformer.data.stores.token_store import TokenStore
from ringformer.data.tokenizers.byte_level import ByteTokenizer
from ringformer.evals import lines, model_folder
from ringformer.evals.evaluation_setup import Opened, parse_lengths
from ringformer.evals.intervals import bootstrap
from ringformer.inference.generator import Generator
from ringformer.inference.session import Session
from ringformer.inference.text.text_generator import TextGenerator
from tests.convert.models import load, save_model
from tests.data.chat_samples import UNMARKED_JINJA, llama3
from tests.evals.models import Scripted, knows_lines
from tests.evals.test_mrcr import answer_to as mrcr_answer
from tests.inference import runs
from tests.inference.runs import converted_folder
from tests.train.runs import MODEL

CONTEXT = 4096


@pytest.fixture
def run(tmp_path):
    """The folder of a run in bytes that was trained at 4,096 tokens."""
    folder = tmp_path / "run"
    folder.mkdir()
    saved = {
        "model": dataclasses.asdict(MODEL),
        "preset": "tiny",
        "seq_len": CONTEXT,
        "data": {"tokenizer": "bytes"},
    }
    (folder / "config.json").write_text(json.dumps(saved))
    return folder


@pytest.fixture
def answered_by(monkeypatch):
    """Answers instead of the run's weights; returns the lengths that models were loaded for, and the model."""

    def use(answer):
        model, loaded = Scripted(answer), []

        def load_model(_self, max_length):
            loaded.append(max_length)
            return model

        monkeypatch.setattr(Opened, "load", load_model)
        return model, loaded

    return use


def evaluate(name, run, *options):
    return main(["eval", *name.split(), f"--run={run}", *options])


def rows_of(folder):
    return [json.loads(line) for line in (folder / "cases.jsonl").read_text().splitlines()[1:]]


def test_lines_by_context(run, answered_by, capsys):
    model, loaded = answered_by(knows_lines)
    assert evaluate("lines", run, "--lengths=2K,4096", "--num_cases=3", "--batch_size=2") == 0
    out, err = capsys.readouterr()
    assert (
        "LongEval's" in out and [line.split()[-2:] for line in out.splitlines()[2:]] == [["100.0%", "43.9-100.0%"]] * 2
    )
    assert "2,048 tokens: 3 cases, 3 of them new, score 100.0%" in err and loaded == [4096]
    folder = run / "evals" / "lines"
    assert (folder / "table.txt").read_text() == out and (folder / "lines.png").read_bytes().startswith(b"\x89PNG")
    assert len(rows_of(folder)) == 6 and len(model.batches) == 4
    assert evaluate("lines", run, "--lengths=2K,4096", "--num_cases=3") == 0 and len(model.batches) == 4
    assert evaluate("lines", run, "--lengths=1K", "--num_cases=3") == 0 and len(rows_of(folder)) == 9


def test_mrcr_by_context_and_with_messages(run, answered_by, capsys):
    """A reader of the whole conversation; without a template, it is a text to continue."""
    model, _ = answered_by(lambda prompt: " " + mrcr_answer(prompt))
    options = ["--lengths=2K,4K", "--num_cases=2", "--needles=2"]
    assert evaluate("mrcr", run, *options) == 0
    out = capsys.readouterr().out
    assert [line.split()[4] for line in out.splitlines()[2:]] == ["100.0%"] * 2 and "2 needles" in out
    rows = rows_of(run / "evals" / "mrcr")
    assert len(rows) == 4 and all(row["answer"][1:] == row["expected"][0] for row in rows)
    assert (run / "evals" / "mrcr" / "mrcr.png").read_bytes().startswith(b"\x89PNG")
    assert evaluate("mrcr", run, "--lengths=2K", "--needles=4", "--num_cases=2") == 2
    assert "needles is 2, not 4" in capsys.readouterr().err
    assert evaluate("mrcr", run, *options, "--chat", "--template=vicuna", f"--out={run}/chat") == 0
    assert model.chats == {False, True}
    assert [row["score"] for row in rows_of(run / "chat")] == [1.0] * 4
    assert evaluate("mrcr", run, "--needles=9", "--lengths=2K") == 2
    assert evaluate("mrcr", run, "--text=/nowhere.txt", "--lengths=2K") == 2
    assert "--text=/nowhere.txt cannot be read (No such file or directory): name a text file" in capsys.readouterr().err
    assert evaluate("mrcr", run, f"--text={run}/config.json", "--lengths=2K") == 2
    assert "paragraphs of 40 to 120 words" in capsys.readouterr().err


def test_needles_without_a_literal_match(run, answered_by, capsys):
    """A reader who looks for the sentence, not for its words; the control is another evaluation."""
    answered_by(lambda prompt: f" {re.search(r'Actually, (.*?) lives beside', prompt)[1]}.")
    options = ["--lengths=2K", "--depths=0,100", "--num_cases=2"]
    assert evaluate("nolima", run, *options) == 0
    out = capsys.readouterr().out
    assert "needle without a literal match (" in out and out.splitlines()[-1].split() == ["mean", "100.0"]
    assert [row["score"] for row in rows_of(run / "evals" / "nolima")] == [1.0] * 4
    assert (run / "evals" / "nolima" / "nolima.png").read_bytes().startswith(b"\x89PNG")
    assert evaluate("nolima", run, *options, "--direct") == 2
    assert "direct is False, not True" in capsys.readouterr().err
    assert evaluate("nolima", run, *options, "--direct", f"--out={run}/direct") == 0
    assert "asked for in its words" in capsys.readouterr().out
    assert evaluate("nolima", run, "--lengths=2K", "--depths=101") == 2
    assert "--depths: 101 is not a percentage from 0 to 100" in capsys.readouterr().err


def test_longbench_from_its_files(run, answered_by, tmp_path, capsys):
    """With a template for the tasks that have one in the original; a prompt that is too long loses its middle."""
    for name in ("config", "data"):
        (tmp_path / name).mkdir()
    prompts = {"qasper": "Read.\n{context}\nQuestion: {input}\nAnswer:", "lcc": "{context}Next line:\n"}
    (tmp_path / "config" / "dataset2prompt.json").write_text(json.dumps(prompts))
    (tmp_path / "config" / "dataset2maxlen.json").write_text(json.dumps({"qasper": 8, "lcc": 8}))
    for task in prompts:
        rows = [{"context": "passing keys " * size, "input": "what?", "answers": ["keys"]} for size in (10, 400)]
        (tmp_path / "data" / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, _ = answered_by(lambda prompt: " keys" if prompt.endswith("Answer:") else "values")
    options = [f"--data={tmp_path}", "--lengths=2K"]
    assert evaluate("longbench", run, *options) == 0
    out = capsys.readouterr().out.splitlines()
    rows = {(row["task"], row["index"]): row for row in rows_of(run / "evals" / "longbench")}
    assert [rows["qasper", index]["score"] for index in (0, 1)] == [1.0, 1.0]
    assert rows["qasper", 0]["cut"] == 0 < rows["qasper", 1]["cut"] and rows["qasper", 1]["prompt_tokens"] <= 2040
    assert out[-1].split()[:4] == ["mean", "of", "the", "tasks"] and any("qasper" in line for line in out)
    assert evaluate("longbench", run, *options, "--chat", "--template=vicuna", f"--out={run}/chat") == 0
    assert model.chats == {False, True}
    assert evaluate("longbench", run, *options, "--tasks=trec") == 2
    assert "has no trec; it has: lcc, qasper" in capsys.readouterr().err
    assert evaluate("longbench", run, f"--data={run}", "--lengths=2K") == 2
    assert "is no folder of LongBench" in capsys.readouterr().err


def test_helmet_from_its_files(run, answered_by, tmp_path, capsys):
    """The tasks whose files are there; other options are another evaluation."""
    folder = tmp_path / "data" / "json_kv"
    folder.mkdir(parents=True)
    pairs = {f"key {i}": f"value {i}" for i in range(40)}
    row = {"context": json.dumps(pairs), "num_kvs": 40, "demos": [["a", "b"], ["c", "d"]]}
    rows = [row | {"question": name, "answer": value} for name, value in list(pairs.items())[:9]]
    (folder / "test_k105_dep6.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, _ = answered_by(lambda prompt: " value 3" if "\nCorresponding value:" in prompt[-40:] else "none")
    options = [f"--data={tmp_path}", "--lengths=8K", "--allow_longer"]
    assert evaluate("helmet", run, *options) == 0
    out = capsys.readouterr().out.splitlines()
    assert [row["score"] for row in rows_of(run / "evals" / "helmet")].count(1.0) == 1
    assert out[-2].split()[:5] == ["json_kv", "8,192", "9", "0", "11.1"] and out[-1].split()[-1] == "11.1"
    rows = [row | {"question": name, "answer": value} for name, value in list(pairs.items())[:3]]
    (folder / "test_k220_dep6.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert evaluate("helmet", run, f"--data={tmp_path}", "--lengths=8K,16K", "--allow_longer") == 0
    out, err = capsys.readouterr()
    assert "json_kv, 8,192 tokens: 9 cases, 0 of them new" in err and "left out: ruler_niah_mk_2, " in err
    assert [row["length"] for row in rows_of(run / "evals" / "helmet")] == [8192] * 9 + [16384] * 3
    assert evaluate("helmet", run, *options, "--num_cases=4") == 2
    assert "num_cases is 100, not 4" in capsys.readouterr().err
    assert evaluate("helmet", run, *options, "--chat", "--template=vicuna", f"--out={run}/helmet_chat") == 0
    assert model.chats == {False, True}
    assert evaluate("helmet", run, f"--data={tmp_path}", "--lengths=4K") == 2
    assert "HELMET has no files for 4,096 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["--lengths=2K", "--num_lines=20"])
def test_questions_about_documents(size, run, answered_by, capsys):
    """All questions about a document are asked together, and the interval is one over documents."""
    model, _ = answered_by(lambda prompt: knows_lines(prompt, 900))
    options = [size, "--num_cases=4", "--questions=5", "--batch_size=2"]
    assert evaluate("lines", run, *options) == 0
    out, err = capsys.readouterr()
    assert [len(batch) for batch in model.batches] == [5] * 4 and "document 3: 5 cases, 5 of them new" in err
    assert all(len({prompt[: prompt.index("Now the record is")] for prompt in batch}) == 1 for batch in model.batches)
    rows = rows_of(run / "evals" / "lines")
    right = [sum(row["score"] for row in rows if row["index"] == i) for i in range(4)]
    low, high = bootstrap(right, [5] * 4)
    assert 0 < sum(right) < 20 and len(set(right)) > 1
    words = out.splitlines()[2].split()
    assert words[-5:] == ["4", "x", "5", f"{sum(right) / 20:.1%}", f"{100 * low:.1f}-{high:.1%}"]
    assert "intervals are over documents" in out
    (run / "evals" / "lines" / "cases.jsonl").write_text(
        "".join(line + "\n" for line in (run / "evals" / "lines" / "cases.jsonl").read_text().splitlines()[:8])
    )
    assert evaluate("lines", run, *options) == 0 and capsys.readouterr().out == out
    assert [len(batch) for batch in model.batches[4:]] == [3, 5, 5], "a killed evaluation goes on in a document"
    assert evaluate("lines", run, *options, "--questions=4") == 2
    assert "questions is 5, not 4" in capsys.readouterr().err


@pytest.mark.slow
def test_a_document_is_read_once_and_each_question_answered_as_alone(tmp_path, monkeypatch):
    """By a model with weights; one question at a time, and three."""
    folder, appended, append = runs.model_folder(tmp_path / "model", 1024), [], Session._append

    def noted(self, rows, scored=False):
        appended.append([len(row) for row in rows])
        return append(self, rows, scored)

    options = ["--lengths=1K", "--num_cases=1", "--questions=4", "--compute_dtype=float32"]
    with monkeypatch.context() as patch:
        patch.setattr(Session, "_append", noted)
        assert evaluate("lines", folder, *options, "--batch_size=3", f"--out={tmp_path}/o") == 0
    document, first, last = appended
    assert len(document) == 1 and document[0] > 800 and len(first) == len(last) == 3 and max(first + last) < 60
    alone = TextGenerator.load(folder, max_length=1024, compute_dtype="float32")
    cases = lines.cases_of_length(1024, 1, 0, lines.Numbers(), lambda prompt: len(alone.encode(prompt)), 4)
    answers = [alone.complete([case.prompt], max_new_tokens=100)[0] for case in cases]
    assert [row["answer"] for row in rows_of(tmp_path / "o")] == answers and len(set(answers)) > 1


def test_another_range_of_numbers_is_called_so_everywhere(run, answered_by, capsys, tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr("ringformer.evals.evaluate.draw_accuracy", lambda rows, title, path: titles.append(title))
    answered_by(knows_lines)
    options = ["--num_lines=5,9", "--num_cases=2", "--max_value=99"]
    assert evaluate("lines", run, *options, f"--out={tmp_path}/o") == 0
    out = capsys.readouterr().out
    head = json.loads((tmp_path / "o" / "cases.jsonl").read_text().splitlines()[0])
    for said in (out, *titles, head["settings"]["form"]):
        assert "numbers 1 to 99, not LongEval's" in said
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["5", "9"] and titles
    assert max(int(row["expected"][0]) for row in rows_of(tmp_path / "o")) <= 99


def test_official_rows(run, answered_by, capsys, tmp_path):
    prompts = [case.prompt for n in (5, 8) for case in lines.cases_of_lines(n, 2, 7, lines.Numbers())]
    rows = [
        {"random_idx": ["x", 1], "expected_number": i, "num_lines": 5 + 3 * (i > 1), "prompt": prompt}
        for i, prompt in enumerate(prompts)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, loaded = answered_by(lambda prompt: "It is 3, no, <2>")
    assert evaluate("lines", run, f"--cases={tmp_path}/rows.jsonl") == 0
    out = capsys.readouterr().out
    assert sorted(p for batch in model.batches for p in batch) == sorted(prompts) and loaded == [CONTEXT]
    assert [(line.split()[0], line.split()[-2]) for line in out.splitlines()[2:]] == [("5", "0.0%"), ("8", "50.0%")]
    assert "rows of rows.jsonl" in out
    assert evaluate("lines", run, f"--cases={tmp_path}/rows.jsonl", "--num_cases=1", f"--out={tmp_path}/o") == 0
    assert [row["expected"] for row in rows_of(tmp_path / "o")] == [["0"], ["2"]]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("words", ["lines --num_lines=3", "needle --lengths=1K --depths=0", "ruler --lengths=2K"])
def test_prompts_go_through_the_template_with_chat(words, chat, run, answered_by, tmp_path, monkeypatch):
    """Prompts are counted and answered alike, and the file says how."""
    model, _ = answered_by(str)
    encode, counted = model.encode, set()

    def noted(prompt, *, chat=False, prefix=""):
        counted.add(chat)
        return encode(prompt, chat=chat, prefix=prefix)

    monkeypatch.setattr(model, "encode", noted)
    name, *options = words.split()
    options += ["--chat", "--template=vicuna"] if chat else []
    assert evaluate(name, run, "--num_cases=1", *options, f"--out={tmp_path}/o") == 0
    assert model.chats == counted == {chat}
    head = json.loads((tmp_path / "o" / "cases.jsonl").read_text().splitlines()[0])
    assert head["settings"]["chat"] is chat and ("vicuna" in str(head["settings"].get("template"))) == chat


def test_needles_and_what_hides_them(run, answered_by, capsys, tmp_path):
    answered_by(lambda prompt: prompt)
    options = ["--lengths=1K,2K", "--depths=0,100", "--num_cases=1", "--needles=3", "--asked=2"]
    assert evaluate("needle", run, *options) == 0
    out = capsys.readouterr().out
    assert "2 of 3 needles in a haystack (Moby Dick, chapters 1-109)" in out
    assert [line.split() for line in out.splitlines()[2:]] == [
        ["0%", "100.0", "100.0"],
        ["100%", "100.0", "100.0"],
        ["mean", "100.0", "100.0"],
    ]
    assert (run / "evals" / "needle" / "needle.png").is_file()
    (tmp_path / "mine.txt").write_text("One. Two.")
    assert evaluate("needle", run, *options, f"--haystack={tmp_path}/mine.txt") == 2
    assert "haystack is 'Moby Dick, chapters 1-109', not 'mine.txt'" in capsys.readouterr().err


def test_ruler(run, answered_by, capsys):
    answered_by(lambda prompt: prompt.upper())
    assert evaluate("ruler", run, "--lengths=2K,4K", "--num_cases=1", "--tasks=vt,niah_multikey_3") == 0
    out = capsys.readouterr().out
    assert [line.split() for line in out.splitlines()[2:]] == [
        ["niah_multikey_3", "100.0", "100.0"],
        ["vt", "100.0", "100.0"],
        ["mean", "100.0", "100.0"],
    ]


def test_ruler_with_essays_has_their_tasks_and_is_not_mixed_with_others(run, answered_by, capsys, tmp_path):
    (tmp_path / "essays.txt").write_text("It is a text of five words. So it is, and no more! " * 60)
    options = ["--lengths=4K", "--num_cases=1", f"--essays={tmp_path}/essays.txt", "--tasks=niah_multivalue,fwe"]
    model, _ = answered_by(lambda prompt: prompt)
    assert evaluate("ruler", run, *options) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[2:4]] == [
        ["fwe", "100.0"],
        ["niah_multivalue", "100.0"],
    ]
    assert evaluate("ruler", run, *options) == 0 and len(model.batches) == 2, "all were there"
    (tmp_path / "essays.txt").write_text("It is another text of six words. So it is, and no more! " * 60)
    assert evaluate("ruler", run, *options) == 2
    assert "holds cases with other settings: essays is " in capsys.readouterr().err


def test_ruler_s_needles_may_hide_in_the_shipped_text_which_is_then_named(run, answered_by, capsys):
    model, _ = answered_by(lambda prompt: prompt)
    assert evaluate("ruler", run, "--lengths=4K", "--num_cases=1", "--essays=shipped", "--tasks=niah_single_2") == 0
    assert "tasks of RULER (essays: Moby Dick, chapters 1-109, not the original's)" in capsys.readouterr().out
    assert "CHAPTER 1. Loomings. Call me Ishmael. Some years ago" in model.batches[0][0]


def test_with_a_chat_template_the_answer_begins_behind_the_assistant_s_header(tmp_path, answered_by):
    """The question ends in the user's turn; without a template its text goes on with the beginning of the answer."""
    run = converted_folder(tmp_path / "model", llama3(tmp_path / "t"))
    model, _ = answered_by(lambda prompt: "")
    options = ["--num_cases=1", "--tasks=vt", "--allow_longer", "--lengths=4K"]
    prefix = (
        " Answer: According to the chain(s) of variable assignment in the text above, 5 variables are assigned the "
    )
    for chat, between in ((["--chat"], "</chat>"), ([], "")):
        assert evaluate("ruler", run, *options, *chat, f"--out={tmp_path}/o{len(chat)}") == 0
        asked, begun = model.batches[-1][0].rsplit(f" in the text above.{between}{prefix}value ", 1)
        assert begun.endswith(", they are: ") and asked.startswith("<chat>Memorize" if chat else "Memorize")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lines"], "no contexts given: set --lengths, --num_lines or --cases"),
        (
            ["lines", "--lengths=8192"],
            "run was configured for: set --allow_longer to see where it breaks",
        ),
        (["lines", "--lengths=1"], "--lengths: a context of 1 tokens is too short"),
        (["lines", "--lengths=x"], "'x' is not a number of tokens like 4096 or 4K"),
        (["lines", "--num_lines=200"], "prompts are never truncated"),
        (["lines", "--num_lines=3", "--cases=x"], "--num_lines and --cases: give one of them"),
        (["lines", "--cases=none.jsonl"], "none.jsonl cannot be read as rows of LongEval: [Errno 2] No such file"),
        (["lines", "--cases=tests"], "tests cannot be read as rows of LongEval: [Errno 21] Is a directory"),
        (
            ["lines", "--cases=docs/figures/retrieval_lines.png"],
            "retrieval_lines.png cannot be read as rows of LongEval",
        ),
        (["lines", "--num_lines=3", "--out=README.md"], "--out=README.md: the path, or part of it, is a file"),
        (["lines", "--num_lines=3", "--out=README.md/x/y"], "README.md is not a folder; choose another place"),
        (["lines", "--num_lines=3", "--cpu_devices=100000"], "cpu_devices=100,000 must lie between 0 and 1,024"),
        (["lines", "--num_lines=3", "--questions=4"], "--questions=4: a document has only 3 lines to ask for"),
        (["lines", "--num_lines=3", "--questions=0"], "--questions=0 must be at least 1"),
        (["lines", "--cases=x", "--questions=2"], "--questions does not apply to --cases, whose rows have one"),
        (["lines", "--num_lines=0"], "--num_lines=0 must be at least 1"),
        (["lines", "--num_lines=a"], "'a' is not a whole number"),
        (["lines", "--lengths=2K", "--num_cases=0"], "--num_cases=0 must be at least 1"),
        (["lines", "--lengths=2K", "--batch_size=0"], "--batch_size=0 must be at least 1"),
        (["lines", "--lengths=2K", "--chat"], "was not trained on conversations"),
        (["lines", "--lengths=2K", "--template_option=a=1"], "--template_option sets variables of the template of"),
        (["harness", "--tasks=none", "--template_option=a=1"], "--template_option sets variables of the template of"),
        (["lines", "--lengths=120"], "the shortest prompt has"),
        (["needle", "--lengths=2K", "--asked=2"], "2 of 1 needles"),
        (["needle", "--lengths=2K", "--depths=120"], "120 is not a percentage"),
        (["needle", "--lengths=2K", "--depths=nan"], "nan is not a percentage"),
        (["needle", "--lengths=2K", "--depths=x"], "'x' is not a number"),
        (["ruler", "--lengths=2K", "--tasks=vt,qa_3"], "unknown task 'qa_3'; known: niah_single_1"),
        (
            ["ruler", "--lengths=2K", "--tasks=vt,qa_1"],
            "qa_1 needs data that ringformer does not contain: set --sq",
        ),
        (["ruler", "--lengths=2K", "--squad=none.json"], "none.json cannot be read: [Errno 2] No such file"),
        (["ruler", "--lengths=2K", "--hotpotqa=docs"], "docs cannot be read: [Errno 21] Is a directory"),
        (["ruler", "--lengths=2K", "--words=docs"], "docs/adjectivelist.txt cannot be read: [Errno 2] No such file"),
        (["ruler", "--lengths=1K", "--tasks=fwe,vt"], "vt in 1,024 tokens: the shortest prompt has"),
        (["ruler", "--lengths=3K,4K", "--tasks=cwe"], "cwe in 4,096 tokens: the shortest prompt has"),
    ],
)
def test_what_is_refused_before_anything_is_computed(words, said, run, answered_by, capsys):
    answered_by(lambda prompt: pytest.fail("was asked"))
    assert evaluate(words[0], run, *words[1:]) == 2
    err = capsys.readouterr().err
    assert said in err and err.splitlines()[-1].startswith("ringformer eval ")


def test_a_model_is_not_loaded_for_a_length_that_it_never_saw(run, answered_by):
    _, loaded = answered_by(knows_lines)
    assert evaluate("lines", run, "--lengths=8K", "--num_cases=1") == 2 and not loaded
    assert evaluate("lines", run, "--lengths=8K", "--num_cases=1", "--allow_longer") == 0 and loaded == [8192]


def test_a_run_without_a_tokenizer_is_refused(run, capsys):
    saved = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(saved | {"data": {"tokenizer": "gone.model"}}))
    assert evaluate("lines", run, "--lengths=2K") == 2
    assert "holds no tokenizer" in capsys.readouterr().err


def refused_to_go_on(run, capsys, *options):
    """What it says that the cases in the folder were made with."""
    assert evaluate("lines", run, "--num_lines=3", "--num_cases=1", *options) == 2
    err = capsys.readouterr().err
    assert "holds cases with other settings: " in err
    return err.split("other settings: ")[1]


def test_the_dtype_of_the_cache_is_a_setting_of_the_outputs(run, answered_by, capsys):
    """The model's own dtype is none, so that files of earlier evaluations are continued."""
    answered_by(knows_lines)
    assert evaluate("lines", run, "--num_lines=3", "--num_cases=1") == 0
    settings = json.loads((run / "evals" / "lines" / "cases.jsonl").read_text().splitlines()[0])["settings"]
    assert "cache_dtype" not in settings
    assert "cache_dtype is None, not 'int8'" in refused_to_go_on(run, capsys, "--cache_dtype=int8")
    assert evaluate("lines", run, "--num_lines=3", "--num_cases=1", "--cache_dtype=compute") == 0


def test_outputs_of_somebody_else_are_kept(run, answered_by, tmp_path, capsys):
    """A table or a figure that no evaluation wrote."""
    answered_by(knows_lines)
    for name in ("table.txt", "lines.png"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("a poem")
        words = "--num_lines=3", "--num_cases=1", f"--out={folder}"
        assert evaluate("lines", run, *words) == 2
        assert f"{folder} has a {name} that no evaluation wrote: choose another --out" in capsys.readouterr().err
        assert [path.read_text() for path in folder.iterdir()] == ["a poem"]
    (folder / "lines.png").rename(folder / "poem.png")
    (folder / "lock").write_text("not to be emptied")
    assert evaluate("lines", run, *words) == 0
    assert (folder / "poem.png").read_text() == "a poem" and (folder / "lock").read_text() == "not to be emptied"


def test_another_rope_is_a_setting_of_the_outputs(run, answered_by, capsys):
    """Its scaling extends the context; a larger base does not say how far it reaches."""
    answered_by(knows_lines)
    yarn = ["--rope_scaling.kind=yarn", "--rope_scaling.factor=2"]
    assert evaluate("lines", run, "--lengths=8K", "--num_cases=1", *yarn, f"--out={run}/yarn") == 0
    assert "rope_scaling.kind yarn, rope_scaling.factor 2.0" in capsys.readouterr().out
    assert evaluate("lines", run, "--lengths=8K", "--num_cases=1", "--rope_theta=4e5") == 2
    assert "set --allow_longer" in capsys.readouterr().err
    assert evaluate("lines", run, "--num_lines=3", "--num_cases=1") == 0
    assert "rope_theta is None, not 400000.0" in refused_to_go_on(run, capsys, "--rope_theta=4e5")


def test_the_run_s_own_dtype_is_that_dtype_by_name(run, answered_by, capsys):
    answered_by(knows_lines)
    options = ["--num_lines=3", "--num_cases=1"]
    assert evaluate("lines", run, *options) == 0
    assert evaluate("lines", run, *options, f"--compute_dtype={MODEL.compute_dtype}") == 0
    other = "float32" if MODEL.compute_dtype == "bfloat16" else "bfloat16"
    assert refused_to_go_on(run, capsys, f"--compute_dtype={other}").startswith("compute_dtype is ")


def test_cases_of_other_end_tokens_are_not_mixed(run, answered_by, capsys):
    """Where an answer ends decides its score, with a chat template and without."""
    answered_by(knows_lines)
    assert evaluate("lines", run, "--num_lines=3", "--num_cases=1") == 0
    (run / "generation_config.json").write_text('{"eos_token_id": [7]}')
    assert refused_to_go_on(run, capsys).startswith(f"end_tokens is [{ByteTokenizer().eos_id}], not [7, ")


def test_cases_of_another_chat_template_of_the_same_name_are_not_mixed(tmp_path, answered_by, capsys):
    answered_by(knows_lines)
    run = converted_folder(tmp_path / "model", llama3(tmp_path / "t"))
    assert evaluate("lines", run, "--lengths=4K", "--num_lines=3", "--num_cases=1", "--chat") == 0
    config = json.loads((run / "tokenizer_config.json").read_text())
    assert config["chat_template"] != UNMARKED_JINJA
    (run / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": UNMARKED_JINJA}))
    assert "template is 'tokenizer-" in refused_to_go_on(run, capsys, "--lengths=4K", "--chat")


def test_an_out_with_cases_of_another_evaluation_is_refused(run, answered_by, capsys, tmp_path):
    answered_by(knows_lines)
    assert evaluate("lines", run, "--num_lines=3", "--num_cases=1", f"--out={tmp_path}/o") == 0
    assert evaluate("ruler", run, "--lengths=2K", "--num_cases=1", f"--out={tmp_path}/o") == 2
    assert "holds cases of lines, not of ruler: choose another --out" in capsys.readouterr().err


def test_one_process_at_a_time_writes_to_a_folder(run, answered_by, capsys, tmp_path):
    """The second is refused and leaves everything as it is; when the first is gone, killed even, the way is free."""
    answered_by(knows_lines)
    options = ["--num_lines=5", "--num_cases=1", f"--out={tmp_path / 'out'}"]
    program = f"""
from argparse import Namespace
from ringformer.evals.evaluation_setup import out_folder
with out_folder(Namespace(out={str(tmp_path / "out")!r}), "lines", ()):
    print(flush=True)
    input()
"""
    first = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert first.stdout.readline()
        assert evaluate("lines", run, *options) == 2
        assert f"another process writes {tmp_path / 'out'}: wait for it, or choose" in capsys.readouterr().err
        assert not (tmp_path / "out" / "cases.jsonl").exists()
    finally:
        first.kill()
        first.communicate()
    assert evaluate("lines", run, *options) == 0


def test_a_checkpoint_that_is_written_meanwhile_is_not_taken_for_the_one_before(run, monkeypatch, capsys):
    """Training goes on while the weights are read: of which step they are nobody knows."""
    steps = iter([30, 40])
    monkeypatch.setattr(model_folder, "latest_step", lambda _run: next(steps))
    monkeypatch.setattr(Generator, "load", lambda *_, **__: SimpleNamespace(kernel="kernel xla"))
    assert evaluate("lines", run, "--num_lines=5") == 2
    assert "wrote a checkpoint while it was being read: start again" in capsys.readouterr().err


def test_an_unknown_evaluation_gets_the_list(capsys):
    assert main(["eval", "lunes"]) == 2
    err = capsys.readouterr().err
    assert "did you mean 'eval lines'? eval has lines, needle, nolima, mrcr, ruler, helmet, longbench" in err
    assert main(["eval", "qqqqqq"]) == 2
    assert "eval has lines, needle, nolima, mrcr, ruler, helmet, longbench" in capsys.readouterr().err


def test_figures_without_matplotlib_are_refused_at_the_start(run, monkeypatch, capsys):
    monkeypatch.setattr("ringformer.plotting.importlib.util.find_spec", lambda name: None)
    assert evaluate("lines", run, "--lengths=2K") == 2
    assert "figures need matplotlib: pip install 'ringformer[plot]'" in capsys.readouterr().err


def test_lengths_are_read():
    assert parse_lengths("4K,1M, 300,4096") == [300, 4096, 2**20]


@pytest.fixture
def store(tmp_path):
    """Bytes of six documents, of 60 to 160 tokens."""
    documents = [json.dumps({"text": "".join(chr(97 + (i * j) % 23) for j in range(59 + 20 * i))}) for i in range(6)]
    (tmp_path / "docs.jsonl").write_text("\n".join(documents))
    options = StoreOptions(source=f"jsonl:{tmp_path}/docs.jsonl", held_out=0.0)
    open_or_build(tmp_path / "store", options, ByteTokenizer())
    return tmp_path / "store"


def test_a_hugging_face_checkpoint_has_the_perplexity_that_transformers_says(store, tmp_path, capsys):
    folder = save_model(tmp_path / "hf", "llama_3", vocab_size=260, num_hidden_layers=1, max_position_embeddings=128)
    options = [f"--store={store}", "--tokenizer=bytes", "--lengths=64,128", "--last=16", "--compute_dtype=float32"]
    assert evaluate("perplexity", folder, *options) == 2
    assert "is a Hugging Face checkpoint, which is never written to: set --out" in capsys.readouterr().err
    assert evaluate("perplexity", folder, *options, f"--out={tmp_path}/o") == 0
    assert "converted in float32 to" in capsys.readouterr().err
    opened, model = TokenStore(store / "train"), load(folder)
    rows = {(row["length"], row["document"]): row for row in rows_of(tmp_path / "o")}
    long = [i for i in range(6) if np.diff(opened.offsets)[i] >= 128]
    assert len(long) >= 2 and set(rows) == {(length, i) for length in (64, 128) for i in long}
    for (length, i), row in rows.items():
        end = opened.offsets[i] + 128
        ids = torch.tensor(np.asarray(opened.tokens[end - length : end]).astype(np.int64))
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
        sums = row["sums"]
        assert sums["last"][:2] == [pytest.approx(float(losses[-16:].sum()), rel=1e-4), 16]
        assert sums["all"][:2] == [pytest.approx(float(losses.sum()), rel=1e-4), length - 1]
        assert sums["4"][:2] == [pytest.approx(float(losses[3:7].sum()), rel=1e-4), 4]
    assert evaluate("perplexity", folder, *options[:2], "--lengths=256", f"--out={tmp_path}/p") == 2
    assert f"256 tokens are more than the 128 that {folder} was configured for" in capsys.readouterr().err
    save_model(
        folder, "llama_3", vocab_size=260, num_hidden_layers=1, max_position_embeddings=128, initializer_range=0.1
    )
    assert evaluate("perplexity", folder, *options, f"--out={tmp_path}/o") == 2
    assert "holds cases with other settings: checkpoint is " in capsys.readouterr().err


def test_bits_per_byte_are_of_the_measured_tokens(run, tmp_path, monkeypatch, capsys):
    """Neither of questions, nor of the store's mean: of two answers' last 16 tokens one has no text, an end token."""
    chats = [
        {"messages": [{"role": "user", "content": "?" * 30}, {"role": "assistant", "content": answer}]}
        for answer in ("ab" * 20, "é" * 25)
    ]
    (tmp_path / "chats.json").write_text(json.dumps(chats))
    options = StoreOptions(source=f"json:{tmp_path}/chats.json", format="messages", held_out=0.0)
    open_or_build(tmp_path / "chats", options, ByteTokenizer())
    model = SimpleNamespace(token_losses=lambda rows: [np.ones(len(row) - 1) for row in rows])
    monkeypatch.setattr(Opened, "load", lambda self, n: SimpleNamespace(generator=model))
    length = str(np.diff(TokenStore(tmp_path / "chats" / "train").offsets).min())
    assert evaluate("perplexity", run, f"--store={tmp_path}/chats", f"--lengths={length}", "--last=16") == 0
    row, *_ = (line.split() for line in capsys.readouterr().out.splitlines() if line.split()[:1] == [length])
    assert row[1:3] == ["2", "32"] and row[4:] == ["1.0000", f"{32 / 31 / np.log(2):.4f}", "2.718", "2.718-2.718"]


def test_a_store_of_another_tokenizer_is_refused(run, store, monkeypatch, capsys):
    monkeypatch.setattr(Opened, "load", lambda self, n: pytest.fail("was loaded"))
    with monkeypatch.context() as patch:
        patch.setattr(ByteTokenizer, "name", "other")
        build_stores(store.with_name("other"), [Document("text", "a document")], ByteTokenizer(), held_out=0)
    assert evaluate("perplexity", run, f"--store={store.with_name('other')}", "--lengths=64") == 2
    err = capsys.readouterr().err
    assert "was made with tokenizer other, but the model has bytes: name a store of" in err
    assert "--allow=data.tokenizer" in err
