"""LongBench from its files: rows made to its schema, prompts without their middle, and metrics beside lm-eval's."""

import json
import random
import warnings

import pytest

from ringformer.evals.longbench import cases as longbench
from ringformer.evals.longbench import scores
from ringformer.evals.longbench.official_files import read_tasks
from tests.evals.models import Words

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lm_eval.tasks.longbench import metrics as theirs

THEIRS = {
    scores.question_f1: theirs.get_qa_f1_score,
    scores.question_f1_chinese: theirs.get_qa_f1_zh_score,
    scores.rouge_l: theirs.get_rouge_score,
    scores.rouge_l_chinese: theirs.get_rouge_zh_score,
    scores.classification: theirs.get_classification_score,
    scores.passage: theirs.get_retrieval_score,
    scores.passage_chinese: theirs.get_retrieval_zh_score,
    scores.count: theirs.get_count_score,
    scores.code_similarity: theirs.get_code_sim_score,
}
CLASSES = ["Manner of an action", "Description of a person", "person", "City", "Mountain", "体育", "体育新闻"]
TEXT = "The ring of a device, passes keys; and VALUES to the next: one 7 12 30 return x # y"
WORDS = TEXT.split()
CHINESE = "我们在北京的清华大学，学习。长文本模型！很好"


def made(task, rng):
    """A row of a task, and an answer that is right, in part right, or wrong."""
    metric = scores.METRICS[scores.base_task(task)]
    is_chinese = metric in (scores.question_f1_chinese, scores.rouge_l_chinese)

    def text(count):
        if is_chinese:
            return "".join(rng.choices(CHINESE, k=count))
        return " ".join(rng.choices(WORDS, k=count))

    references = [text(rng.randrange(1, 12)) for _ in range(rng.randrange(1, 4))]
    answer = rng.choice(
        [rng.choice(references), text(9), f"{text(3)}\n{text(4)}", "", "...", f"\n{references[0]}\nmore"]
    )
    classes = None
    if metric is scores.classification:
        classes = CLASSES
        references = [rng.choice(CLASSES)]
        answer = " ".join(rng.choices([*CLASSES, "other"], k=2))
    if metric in (scores.passage, scores.passage_chinese, scores.count):
        number = rng.randrange(1, 5)
        form = {scores.passage: "Paragraph {}", scores.passage_chinese: "段落{}", scores.count: "{}"}[metric]
        references = [form.format(number)]
        answer = rng.choice([references[0], f"It is {number} or {number + 1}", "none", f"{number} {number}"])
    return {"context": f"{text(40)}", "input": text(5), "answers": references, "all_classes": classes}, answer


@pytest.mark.parametrize("task", scores.METRICS)
def test_scores_are_those_of_lm_eval(task):
    """Of a hundred rows and answers; the first line alone counts of tasks by example, which the harness stops there."""
    rng = random.Random(task)
    seen = set()
    for _ in range(100):
        row, answer = made(task, rng)
        stopped = answer.lstrip("\n").split("\n")[0] if task in scores.FIRST_LINE else answer
        (expected,) = THEIRS[scores.METRICS[task]](row, [stopped]).values()
        found = scores.score_of(task, answer, row["answers"], row["all_classes"] or ())
        assert found == pytest.approx(expected, abs=1e-12), (row, answer)
        seen.add(round(found, 3))
    assert len(seen) > 2 and 0 in seen, "the answers do not tell one metric from another"


@pytest.fixture
def folder(tmp_path):
    """A folder as the official one: three tasks."""
    (tmp_path / "config").mkdir()
    (tmp_path / "data").mkdir()
    prompts = {
        "qasper": "Read.\n{context}\n\nQuestion: {input}\nAnswer:",
        "lcc": "Complete. \n{context}Next line:\n",
        "trec": "{context}\n{input}",
    }
    (tmp_path / "config" / "dataset2prompt.json").write_text(json.dumps(prompts))
    (tmp_path / "config" / "dataset2maxlen.json").write_text(json.dumps({"qasper": 8, "lcc": 6, "trec": 4}))
    rng = random.Random(0)
    for task in ("qasper", "qasper_e", "lcc", "trec"):
        rows = [made(task, rng)[0] for _ in range(3)]
        (tmp_path / "data" / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def count(text):
    return len(text.split(" ")) + 3  # of a template


def test_prompts_are_the_official_ones(folder):
    tasks = read_tasks(folder, None)
    assert [task.name for task in tasks] == ["lcc", "qasper", "qasper_e", "trec"]
    for task in tasks:
        rows = [json.loads(line) for line in (folder / "data" / f"{task.name}.jsonl").read_text().splitlines()]
        cases = list(longbench.cases_of_length(400, task, None, Words(), count))
        for case, row in zip(cases, rows, strict=True):
            assert case.prompt == task.prompt.format(context=row["context"], input=row["input"])
            assert case.expected == tuple(row["answers"]) and case.labels["cut"] == 0
            assert case.max_new_tokens == {"qasper": 8, "lcc": 6, "trec": 4}[task.name.removesuffix("_e")]
    assert [len(list(longbench.cases_of_length(400, task, 2, Words(), count))) for task in tasks] == [2] * 4
    assert [longbench.is_plain(task.name) for task in tasks] == [True, False, False, True]


@pytest.mark.parametrize("length", [20, 33, 41])
def test_a_long_prompt_loses_its_middle(folder, length):
    """Its beginning and its end stay, as much of them as fits."""
    (task,) = read_tasks(folder, ["qasper"])
    cases = longbench.cases_of_length(length, task, None, Words(), count)
    for case, question in zip(cases, task.questions, strict=True):
        ids, whole = case.prompt.split(" "), task.text(question).split(" ")
        half = (len(whole) - case.labels["cut"]) // 2
        assert ids == [*whole[: half - 1], whole[half - 1] + whole[-half], *whole[len(whole) - half + 1 :]]
        assert length - 8 - 2 <= count(case.prompt) <= length - 8


def test_a_context_without_room_is_refused(folder):
    (task,) = read_tasks(folder, ["qasper"])
    with pytest.raises(ValueError, match="too short for LongBench"):
        list(longbench.cases_of_length(11, task, None, Words(), count))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[]", "qasper.jsonl:1 is no row of LongBench"),
        ('{"context": "a", "input": "b"}', "is no row of LongBench"),
        ('{"context": "a", "input": "b", "answers": []}', "answers must be a list of texts"),
        ('{"context": "a", "input": "b", "answers": "Paris"}', "answers must be a list of texts"),
        ('{"context": "a", "input": 3, "answers": ["c"]}', "answers must be a list of texts"),
        ("", "has no rows"),
    ],
)
def test_rows_of_another_form_are_named(folder, row, message):
    (folder / "data" / "qasper.jsonl").write_text(f"{row}\n")
    with pytest.raises(ValueError, match=message):
        read_tasks(folder, ["qasper"])


def test_rows_that_no_answer_could_score_are_named(folder):
    row = {"context": "a", "input": "b", "answers": ["City"], "all_classes": None}
    (folder / "data" / "trec.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"trec\.jsonl:1: all_classes does not have the answer"):
        read_tasks(folder, ["trec"])
    assert scores.fault_of("passage_retrieval_en", ["7"], ()) and not scores.fault_of("qasper", ["7"], ())
    assert scores.fault_of("passage_retrieval_zh", ["段落7"], ()) is None


def test_texts_with_too_much_in_common_score_as_in_the_original():
    rng = random.Random(0)
    text = "，".join(rng.choices("的一是不了人我在有他这为之大来以个中上们", k=600))
    assert scores.rouge_l_chinese(text, text[::-1]) == theirs.rouge_zh_score(text, text[::-1])


def test_other_folders_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="has no hotpotqa; it has: lcc, qasper, qasper_e, trec"):
        read_tasks(folder, ["hotpotqa"])
    (folder / "config" / "dataset2maxlen.json").write_text("{}")
    with pytest.raises(ValueError, match="or no number of new tokens, for qasper"):
        read_tasks(folder, ["qasper"])
    (folder / "config" / "dataset2prompt.json").unlink()
    with pytest.raises(FileNotFoundError, match="is no folder of LongBench: name the folder LongBench of github"):
        read_tasks(folder, None)
