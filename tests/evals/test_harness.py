"""lm-evaluation-harness on our models, beside its own `hf` model on the same checkpoint: local tasks of three kinds."""

import json
import logging
from typing import NamedTuple

import numpy as np
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM

from ringformer.cli import main
from ringformer.evals.harness import HarnessModel, _sums
from ringformer.inference.session_arrays import Scores
from ringformer.inference.text.text_generator import TextGenerator
from tests.data.chat_samples import CORPUS
from tests.inference.runs import model_folder

CONTEXT = 96
SENTENCES = [part for text in dict.fromkeys(CORPUS) for part in text.split(". ")]
TASKS = {
    "choices": """
task: choices
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean}, {metric: acc_norm, aggregation: mean}]
""",
    "rolling": """
task: rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "until": """
task: until
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["e"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}


def documents():
    for i in range(9):
        sentence = SENTENCES[i % len(SENTENCES)]
        yield {
            "context": "" if i == 4 else f"{sentence} {i} " * (1 + 5 * (i == 7)),
            "choices": [" keys", " values and", f" {sentence[:20]}", "."],
            "answer": i % 4,
            "text": f"{sentence} {i}. " * (1 + i),
            "target": "x",
        }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of Hugging Face, its conversion, and tasks."""
    folder = tmp_path_factory.mktemp("harness")
    model_folder(folder / "ours", CONTEXT)
    (folder / "tasks").mkdir()
    (folder / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents()))
    for name, task in TASKS.items():
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}\ntest_split: test\n"
        (folder / "tasks" / f"{name}.yaml").write_text(data + task)
    return folder


@pytest.fixture(scope="module")
def of_hf(folder):
    return evaluated(folder, "hf", {"pretrained": str(folder / "hf"), "dtype": "float32", "device": "cpu"})


def evaluated(folder, model, model_args=None, tasks=tuple(TASKS), **options):
    logging.disable(logging.WARNING)
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    return simple_evaluate(
        model, model_args=model_args, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **options
    )


OTHER_MESHES = [pytest.param(mesh_dim, marks=pytest.mark.slow) for mesh_dim in ("1,1,1,1", "2,1,1,2")]


@pytest.mark.slow
@pytest.mark.parametrize("mesh_dim", ["1,1,1,4", *OTHER_MESHES])
def test_every_response_is_that_of_the_hf_model(folder, of_hf, mesh_dim):
    text = TextGenerator.load(folder / "ours", mesh_dim=mesh_dim, max_length=CONTEXT + 1, compute_dtype="float32")
    ours = evaluated(folder, HarnessModel(text, batch_size=4))
    for task in TASKS:
        for mine, theirs in zip(ours["samples"][task], of_hf["samples"][task], strict=True):
            assert mine["doc"] == theirs["doc"]
            compare(mine["filtered_resps"], theirs["filtered_resps"])
        for metric, value in of_hf["results"][task].items():
            if isinstance(value, float):
                assert ours["results"][task][metric] == pytest.approx(value, rel=1e-4), metric


def compare(mine, theirs):
    assert len(mine) == len(theirs)
    for own, other in zip(mine, theirs, strict=True):
        if isinstance(other, (tuple, list)):
            assert own[0] == pytest.approx(other[0], abs=2e-4) and own[1] == other[1]
        elif isinstance(other, float):
            assert own == pytest.approx(other, rel=1e-4)
        else:
            assert own == other


def test_likelihoods_are_those_of_transformers(folder):
    """Without the harness's own loop, which takes most of the time of the other tests: a text longer than the context,
    continuations that share a context, and a text in windows."""
    text = TextGenerator.load(folder / "ours", max_length=CONTEXT + 1, compute_dtype="float32")
    ours = HarnessModel(text, batch_size=4)
    theirs = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    ids = ours.tok_encode("The ring carries keys and values around. " * 12)
    assert len(ids) > CONTEXT + 8
    cases = [(ids[:-5], ids[-5:]), (ids[:9], ids[9:12]), (ids[:9], ids[20:22]), (ids[:9], ids[30:31])]
    found = ours._loglikelihood_tokens([(None, context, continuation) for context, continuation in cases])
    for (context, continuation), (likelihood, is_greedy) in zip(cases, found, strict=True):
        expected = expected_likelihood(theirs, context, continuation)
        assert likelihood == pytest.approx(expected.likelihood, abs=2e-4) and is_greedy == expected.is_greedy


def test_generations_are_those_of_transformers(folder):
    text = TextGenerator.load(folder / "ours", max_length=CONTEXT + 1, compute_dtype="float32")
    ours = HarnessModel(text, batch_size=2)
    theirs = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    settings = {"until": [" "], "max_gen_toks": 6, "do_sample": False}
    prompts = ["The ring carries", "Keys"]
    requests = [Instance("generate_until", {}, (prompt, settings), 0) for prompt in prompts]
    for prompt, answer in zip(prompts, ours.generate_until(requests), strict=True):
        ids = ours.tok_encode(prompt)
        out = theirs.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :]
        assert answer == text.tokenizer.decode(out.tolist()).split(" ")[0]


def test_sampled_generations_do_not_depend_on_batches(folder):
    """A task may repeat its documents: each request has draws of its own."""
    text = TextGenerator.load(folder / "ours", max_length=CONTEXT + 1, compute_dtype="float32")
    settings = {"until": ["zzz"], "max_gen_toks": 6, "do_sample": True, "temperature": 5.0}
    requests = [Instance("generate_until", {}, ("Keys", settings), index) for index in range(3)]
    one, two = (HarnessModel(text, batch_size=size).generate_until(requests) for size in (1, 2))
    assert one == two and len(set(one)) == 3


class Expected(NamedTuple):
    likelihood: float
    is_greedy: bool


def expected_likelihood(model, context, continuation) -> Expected:
    """Score the last tokens of a text that has at most CONTEXT of them before its last one."""
    inputs = (context + continuation)[-(CONTEXT + 1) : -1]
    with torch.no_grad():
        logits = model(torch.tensor([inputs])).logits[0, -len(continuation) :].double()
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(continuation), reduction="sum")
    return Expected(-losses.item(), logits.argmax(-1).tolist() == continuation)


def test_a_continuation_is_greedy_if_every_token_of_it_is():
    losses = np.array([1.0, 2.0], np.float32)
    scores = [Scores(losses, np.array(flags)) for flags in ([True, True], [True, False], [False, False])]
    assert _sums([4, 5, 6], scores) == {4: (-3.0, True), 5: (-3.0, False), 6: (-3.0, False)}


@pytest.mark.slow
def test_chats_are_those_of_the_hf_model(folder):
    args = {"pretrained": str(folder / "hf"), "dtype": "float32", "device": "cpu"}
    theirs = evaluated(folder, "hf", args, ["until", "choices"], apply_chat_template=True)
    text = TextGenerator.load(folder / "ours", max_length=CONTEXT + 1, compute_dtype="float32")
    ours = evaluated(folder, HarnessModel(text, 4), None, ["until", "choices"], apply_chat_template=True)
    for task in ("until", "choices"):
        for mine, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert mine["arguments"] == other["arguments"]
            compare(mine["filtered_resps"], other["filtered_resps"])


@pytest.mark.slow
def test_the_command(folder, capsys, of_hf):
    words = [
        "--tasks=choices,until",
        f"--include_path={folder / 'tasks'}",
        f"--run={folder / 'ours'}",
        "--batch_size=4",
    ]
    assert main(["eval", "harness", *words, f"--lengths={CONTEXT}", f"--out={folder / 'out'}"]) == 0
    shown = capsys.readouterr().out
    assert "|choices|" in shown.replace(" ", "") and "acc_norm" in shown
    results = json.loads((folder / "out" / "results.json").read_text())
    for task in ("choices", "until"):
        for metric, value in of_hf["results"][task].items():
            if isinstance(value, float):
                assert results["results"][task][metric] == pytest.approx(value, rel=1e-4)
    assert results["model"]["step"] == 0 and results["length"] == CONTEXT


@pytest.mark.usual("words1-a task generates 12 tokens, beyond the context of 8")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks=choises"], "the harness has no task 'choises'"),
        (["--tasks=until", "--lengths=8"], "a task generates 12 tokens, beyond the context of 8"),
        (["--tasks=choices", "--batch_size=0"], "--batch_size=0 must be at least 1"),
    ],
)
def test_what_cannot_be_is_one_line(folder, capsys, words, message):
    base = [f"--include_path={folder / 'tasks'}", f"--run={folder / 'ours'}", f"--out={folder / 'none'}"]
    assert main(["eval", "harness", *base, f"--lengths={CONTEXT}", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
