"""Tasks of lm-evaluation-harness: read before a model is loaded, refused by name; RULER's as the harness makes them."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import lm_eval.tasks
import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from ringformer.cli import main
from ringformer.data import load_tokenizer
from ringformer.data.tokenizers.byte_level import ByteTokenizer
from ringformer.evals import harness_tasks
from ringformer.evals.evaluation_setup import Opened
from ringformer.evals.harness import HarnessModel
from ringformer.evals.harness_tasks import RULER, read_tasks
from ringformer.evals.texts.words import ADJECTIVES, NOUNS
from ringformer.inference.text.text_generator import TextGenerator
from tests.data.chat_samples import llama3
from tests.inference.runs import converted_folder, model_folder


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    """A tokenizer.json; of the harness's tasks those of RULER are read, because all of them take 5 s."""
    [folder] = lm_eval.tasks.__path__
    tasks = TaskManager(include_path=f"{folder}/ruler", include_defaults=False)
    monkeypatch.setattr(harness_tasks, "TaskManager", lambda **_: tasks)
    return load_tokenizer(str(llama3(tmp_path / "tokenizer")))


@pytest.mark.slow
def test_the_harness_has_these_tasks_of_ruler():
    every_task = TaskManager()
    assert set(harness_tasks._leaves(every_task, "ruler")) == set(RULER)
    assert set(harness_tasks._leaves(every_task, "longcxt")) == set(RULER)
    assert list(harness_tasks._leaves(every_task, "arc_easy")) == ["arc_easy"]


@pytest.mark.parametrize("name", ["ruler", "longcxt", "niah_*", *(name for name, option in RULER.items() if option)])
def test_a_task_of_ruler_that_downloads_is_refused_by_name(name, tokenizer):
    with pytest.raises(
        ValueError, match=r"task '(niah|ruler)_\w+' downloads its data: run `ringformer eval ruler --\w+="
    ):
        read_tasks([name], None, tokenizer, [4096])


def test_what_ruler_cannot_do_is_one_line(tokenizer):
    with pytest.raises(
        ValueError, match=r"task 'ruler_vt' has no metric for 2048 tokens: set --lengths to some of 4096,"
    ):
        read_tasks(["ruler_vt"], None, tokenizer, [2048, 4096])
    with pytest.raises(
        ValueError, match=r"task 'ruler_fwe' needs a tokenizer\.json, which tokenizer bytes has not: run"
    ):
        read_tasks(["ruler_fwe"], None, ByteTokenizer(), [4096])


def test_data_that_cannot_be_read_are_named_before_a_model_is_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Opened, "load", lambda *_: pytest.fail("was loaded"))
    run = converted_folder(tmp_path / "model", llama3(tmp_path / "t"))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\ndataset_kwargs: {data_files: {test: none.jsonl}}\ntest_split: test\n"
        "doc_to_text: a\ndoc_to_target: b\n"
    )
    words = ["--tasks=mi*", f"--include_path={tmp_path / 'tasks'}", f"--run={run}", "--lengths=64", "--allow_longer"]
    assert main(["eval", "harness", *words, f"--out={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("ringformer eval harness: the data of task 'mine' cannot be read: Unable to find '")


@pytest.mark.slow
def test_a_task_of_ruler_is_that_of_the_hf_model(tmp_path, monkeypatch):
    """Made and answered alike; the words are a stand-in for those of the package that the harness imports."""
    logging.disable(logging.WARNING)
    words = {"nouns": NOUNS, "adjectives": ADJECTIVES, "verbs": ["go"], "noun": NOUNS, "adjective": ADJECTIVES}
    wonderwords = ModuleType("wonderwords")
    wonderwords.RandomWord = lambda: SimpleNamespace(_categories=words | {"verb": ["go"]})
    monkeypatch.setitem(sys.modules, "wonderwords", wonderwords)
    monkeypatch.setattr("nltk.download", lambda _name: None)
    model_folder(tmp_path / "ours", 4096)
    hf = str(tmp_path / "hf")
    args = {"pretrained": hf, "dtype": "float32", "device": "cpu"}
    theirs = simple_evaluate("hf", model_args=args, tasks=["niah_single_1"], limit=2, bootstrap_iters=0)
    text = TextGenerator.load(tmp_path / "ours", max_length=4097, compute_dtype="float32")
    manager, tasks = read_tasks(["niah_single_1"], None, text.tokenizer, [4096])
    ours = simple_evaluate(HarnessModel(text, 2), tasks=tasks, task_manager=manager, limit=2, bootstrap_iters=0)
    for mine, other in zip(ours["samples"]["niah_single_1"], theirs["samples"]["niah_single_1"], strict=True):
        assert mine["doc"] == other["doc"] and mine["filtered_resps"] == other["filtered_resps"]
    assert ours["results"]["niah_single_1"] == theirs["results"]["niah_single_1"]
