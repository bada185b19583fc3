"""HELMET from its files: rows made to its schema, prompts and draws as its code makes them, metrics beside others'."""

import hashlib
import json
import random

import datasets
import pytest
from sklearn.metrics import ndcg_score

from ringformer.evals.helmet import cases as helmet
from ringformer.evals.helmet import scores
from ringformer.evals.helmet.official_files import read_questions, tasks_of
from ringformer.evals.helmet.tasks import BY_NAME, LENGTHS, TASKS
from tests.evals.models import Words


def needle(number):
    return {
        "context": f"Grass is green. The special magic number for key-{number} is {number}00. The sky is blue.",
        "query": f"key-{number}",
        "type_needle_v": "number",
        "answer": [f"{number}00", f"{number}01"],
    }


def pair(number):
    return {
        "context": json.dumps({f"k{i}": f"v{i}" for i in range(4)}),
        "question": f"k{number}",
        "answer": f"v{number}",
        "num_kvs": 4,
        "demos": [["d1", "e1"], ["d2", "e2"], ["d3", "e3"]],
    }


def question(number, place=0, **more):
    documents = [{"title": f"T{i}", "text": f"text {i} of {number}.", "has_answer": False} for i in range(3)]
    return {"question": f"Who {number}?", "answers": [f"Ann {number}", "Bo"], "ctxs": documents[place:], **more}


def query(number, place=0):
    documents = [{"id": str(10 * number + i), "text": f"passage {i}", "label": (i + number) % 3} for i in range(4)]
    return {"qid": f"q{number}", "query": f"find {number}", "ctxs": documents[place:] + documents[:place]}


ROWS = {
    "ruler": [needle(i) for i in range(9)],
    "json": [pair(i % 4) for i in range(9)],
    "kilt": [question(i, place) for i in range(9) for place in range(2)],
    "msmarco": [query(i, place) for i in range(9) for place in range(2)],
}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path):
    """A folder as the official one, with files of 8,192 and 131,072 tokens."""
    for task in TASKS:
        rows = ROWS[task.file.split("/")[0].split("_")[0]]
        if task.rare:
            rows = [row | {"id": f"id {i // 2}", "s_pop": 10 ** (i // 2)} for i, row in enumerate(rows)]
        for size in (task.sizes[0], task.sizes[-1]):
            write(tmp_path / "data" / task.file.format(size=size), rows)
        if task.examples:
            write(tmp_path / "data" / task.examples, rows)
    return tmp_path


def count(text):
    return len(text.split(" "))


def cases_of(folder, name, chat=False, number=None, length=8192, most=8192):
    questions = read_questions(folder, BY_NAME[name], length, number)
    return list(helmet.cases_of_length(most, BY_NAME[name], questions, chat, Words(), count))


def test_the_files_of_each_task_and_length_are_the_authors(folder):
    """As their configs recall, rag and rerank name them, and their short forms."""
    assert [task.name for task in tasks_of(folder, LENGTHS[:1], None)] == list(BY_NAME)
    names = {task.name: [task.file.format(size=size) for size in task.sizes] for task in TASKS}
    assert names["json_kv"] == [f"json_kv/test_k{k}_dep6.jsonl" for k in (105, 220, 440, 900, 1800)]
    assert names["kilt_hotpotqa"][:2] == [f"kilt/hotpotqa-dev-multikilt_1000_k{k}_dep3.jsonl" for k in (50, 105)]
    assert names["kilt_popqa_3"][-1] == "kilt/popqa_test_1000_k1000_dep6.jsonl"
    assert names["msmarco_rerank_psg"][2] == "msmarco/test_reranking_data_k285_dep3.jsonl"
    assert names["ruler_niah_mk_3"][3] == "ruler/niah_multikey_3/validation_65536.jsonl"
    assert BY_NAME["kilt_nq"].examples == "kilt/nq-train-multikilt_1000_k3_dep6.jsonl"


def test_prompts_of_needles_and_pairs(folder):
    """Written out as the authors' templates make them."""
    case = cases_of(folder, "ruler_niah_mv")[0]
    number = case.expected[0].removesuffix("00")
    assert case.prompt == (
        "Some special magic number are hidden within the following text. Make sure to memorize it. I will quiz you "
        f"about the number afterwards.\n{needle(number)['context']}\nWhat are all the special magic number for "
        f"key-{number} mentioned in the provided text?\nThe special magic number for key-{number} mentioned in the "
        "provided text are"
    )
    case = cases_of(folder, "json_kv")[0]
    assert case.prompt == (
        '{"k0": "v0", "k1": "v1", "k2": "v2", "k3": "v3"}\n\nExtract the value corresponding to the specified key in '
        "the JSON object below.\n\nKey: d1\nCorresponding value: e1\n\nKey: d2\nCorresponding value: e2\n\n"
        f"Key: k{case.expected[0][1:]}\nCorresponding value:"
    )


def shuffled(rows, seed):
    """The library that the authors' code shuffles with."""
    order = datasets.Dataset.from_dict({"place": list(range(len(rows)))}).shuffle(seed=seed)["place"]
    return [rows[place] for place in order]


def first_two(examples, name, key):
    """The first two of different questions, shuffled by the question's hash."""
    seed = int(hashlib.sha256(name.encode("utf-8")).hexdigest(), 16) % 2**31
    found = []
    for example in shuffled(examples, seed):
        if example[key] not in [other[key] for other in found]:
            found.append(example)
    return found[:2]


def document_text(row):
    return "\n\n".join(f"Document (Title: {x['title']}): {x['text']}" for x in row["ctxs"])


def test_questions_have_the_examples_that_their_code_shuffles_to_the_front(folder):
    """All rows of each question, in the order of the file; without a template the answer is begun."""
    found = cases_of(folder, "kilt_nq", chat=True)
    assert [(case.index, case.labels["place"]) for case in found] == [(i, place) for i in range(9) for place in (0, 1)]
    for case, row in zip(found, ROWS["kilt"], strict=True):
        demos = ""
        for example in first_two(ROWS["kilt"], row["question"], "question"):
            demos += f"{document_text(example)}\n\nQuestion: {example['question']}\nAnswer: {example['answers'][0]}\n\n"
        assert case.prompt == (
            "Use the given documents to write a concise and short answer to the question. Write your answer in the "
            f"following format:\nAnswer: [answer]\n\n{demos}{document_text(row)}\n\nQuestion: {row['question']}"
        )
        assert case.expected == tuple(row["answers"])
    assert cases_of(folder, "kilt_nq")[0].prompt == f"{found[0].prompt}\nAnswer:"


def test_rare_questions_alone_and_other_examples(folder):
    """PopQA has one split: a question is no example of itself, and popular ones are neither."""
    found = cases_of(folder, "kilt_popqa_3", chat=True)
    assert {case.expected[0] for case in found} == {"Ann 0", "Ann 1", "Ann 2"} and len(found) == 6
    rare = [row | {"id": f"id {i // 2}"} for i, row in enumerate(ROWS["kilt"]) if i // 2 < 3]
    for case in found:
        name = f"id {case.expected[0][-1]}"
        examples = first_two([row for row in rare if row["id"] != name], name, "id")
        assert [case.prompt.index(f"Question: {example['question']}") > 0 for example in examples] == [True, True]
        assert case.prompt.count(f"Question: Who {case.expected[0][-1]}?") == 1


def test_rankings_are_of_queries_that_are_not_examples(folder):
    """With more than two examples for each row that is drawn, none of them is of a query that is."""
    found = cases_of(folder, "msmarco_rerank_psg", number=2)
    asked = random.Random(42).sample(sorted({row["qid"] for row in ROWS["msmarco"]}), 2)
    assert len(found) == 4 and {case.index for case in found} == {0, 1}
    rows = {row["query"]: row for row in ROWS["msmarco"]}
    for case in found:
        queries = [line.removeprefix("Query: ") for line in case.prompt.split("\n") if line.startswith("Query: ")]
        assert len(queries) == 3 and rows[queries[2]]["qid"] in asked
        assert not {rows[query]["qid"] for query in queries[:2]} & set(asked)
        row = [row for row in ROWS["msmarco"] if row["query"] == queries[2]][case.labels["place"]]
        assert case.labels["relevant"] == {x["id"]: x["label"] for x in row["ctxs"] if x["label"]}
        labels = {x["id"]: x["label"] for x in row["ctxs"]}
        of_ranking = [labels[name] for name in case.expected[0].split(" > ")]
        assert of_ranking == sorted(labels.values(), reverse=True)
        documents = "\n\n".join(f"[ID: {x['id']}] Document: {x['text']}" for x in row["ctxs"])
        assert case.prompt.endswith(f"\n\n{documents}\n\nQuery: {row['query']}\nRanking:")


def test_a_hundred_are_drawn_as_the_library_shuffles(folder):
    expected = [f"v{row['question'][1:]}" for row in shuffled(ROWS["json"], 42)[:4]]
    assert [case.expected[0] for case in cases_of(folder, "json_kv", number=4)] == expected
    assert [case.index for case in cases_of(folder, "json_kv", number=4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("room", [95, 105, 120])
def test_a_long_prompt_loses_the_end_of_its_documents(folder, room):
    """As much of them stays as fits, behind all of the examples."""
    whole = cases_of(folder, "kilt_nq")
    for case, uncut in zip(cases_of(folder, "kilt_nq", most=room), whole, strict=True):
        assert count(case.prompt) <= room - 20 and case.labels["cut"] == max(0, count(uncut.prompt) - (room - 20))
        head, _, tail = uncut.prompt.rpartition("\n\nQuestion: ")
        kept = case.prompt.rpartition("\n\nQuestion: ")
        assert head.startswith(kept[0]) and kept[2] == tail
    with pytest.raises(ValueError, match="too short for kilt_nq"):
        cases_of(folder, "kilt_nq", most=60)


def test_scores_by_their_rules():
    """The first line counts where their code stops there; a prefix may be repeated."""
    kilt, pairs, needles = BY_NAME["kilt_nq"], BY_NAME["json_kv"], BY_NAME["ruler_niah_mv"]
    for answer, expected in (
        (" It is the Eiffel Tower!", 1.0),
        ("Answer: an eiffel  tower", 1.0),
        ("Paris\nEiffel Tower", 0.0),
        ("Eiffel", 0.0),
        ("", 0.0),
    ):
        assert scores.score_of(kilt, answer, ("Big Ben", "The Eiffel Tower"), {}) == expected, answer
    assert scores.score_of(pairs, "a\nCorresponding value: 12-ab", ("12-AB",), {}) == 1.0
    assert scores.score_of(needles, "are 100 and\n7", ("100", "7", "8"), {}) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (" ID3 > ID1 > ID2", ["3", "1", "2"]),
        ("[ID: 3] > [ID: 1]\n", ["3", "1"]),
        ("7, then 3 > 1 > 3", ["3", "1"]),
        ("none", ["none"]),
        ("", [""]),
    ],
)
def test_a_ranking_is_the_longest_list(answer, expected):
    assert scores.ranking(answer.split("\n")[0]) == expected


def test_ndcg_is_that_of_scikit_learn():
    """For rankings of all documents; short rankings and unknown documents are computed by hand."""
    rng = random.Random(0)
    for size in (3, 10, 25):
        labels = {str(i): rng.randrange(4) for i in range(size)}
        ranked = sorted(labels, key=lambda _: rng.random())
        places = [[-ranked.index(name) for name in labels]]
        expected = ndcg_score([list(labels.values())], places, k=10)
        relevant = {name: label for name, label in labels.items() if label}
        assert scores.ndcg(ranked, relevant) == pytest.approx(expected, abs=1e-5)
    assert scores.ndcg(["9", "a"], {"a": 2, "b": 0}) == pytest.approx(0.63093)
    assert scores.ndcg(["9"], {}) == scores.ndcg([], {"a": 1}) == 0.0


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("json_kv", "{"),
        ("json_kv", "[]"),
        ("json_kv", pair(0) | {"demos": [["a"]]}),
        ("json_kv", pair(0) | {"answer": ["a"]}),
        ("kilt_nq", question(0) | {"answers": []}),
        ("kilt_nq", question(0) | {"ctxs": [{"text": "a"}]}),
        ("msmarco_rerank_psg", query(0) | {"ctxs": []}),
        ("msmarco_rerank_psg", query(0) | {"qid": 3}),
        ("ruler_niah_mk_2", needle(0) | {"answer": []}),
        ("ruler_niah_mk_2", {key: value for key, value in needle(0).items() if key != "query"}),
    ],
)
def test_a_row_of_another_form_is_named(folder, name, row):
    task = BY_NAME[name]
    path = folder / "data" / task.file.format(size=task.sizes[0])
    path.write_text(path.read_text() + "\n" + (row if isinstance(row, str) else json.dumps(row)) + "\n")
    lines = path.read_text().splitlines()
    with pytest.raises(ValueError, match=rf"{path.name}:{len(lines)} is no row of this file of HELMET"):
        read_questions(folder, task, 8192, None)


def test_folders_lengths_and_tasks_that_cannot_be(folder, tmp_path):
    with pytest.raises(ValueError, match="no files for 4,096 tokens; it has some for 8192, 16384, "):
        tasks_of(folder, [4096], None)
    with pytest.raises(ValueError, match="HELMET has no narrativeqa that no model judges; it has ruler_niah_mk_2, "):
        tasks_of(folder, [8192], ["narrativeqa"])
    with pytest.raises(FileNotFoundError, match=r"there is no .*test_k220_dep6\.jsonl: name the folder of github"):
        tasks_of(folder, [16384], ["json_kv"])
    with pytest.raises(FileNotFoundError, match="no task with files for all --lengths"):
        tasks_of(folder, [8192, 16384], None)
    with pytest.raises(FileNotFoundError, match="is no folder of HELMET"):
        tasks_of(tmp_path / "data", [8192], None)
    (folder / "data" / BY_NAME["kilt_nq"].examples).unlink()
    with pytest.raises(FileNotFoundError, match="nq-train-multikilt_1000_k3_dep6"):
        read_questions(folder, BY_NAME["kilt_nq"], 8192, None)


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("kilt_popqa_3", [question(0, id="a")], ":1 is no row of this file"),
        ("kilt_popqa_3", [question(0, id="a", s_pop=1000)], "has no rows of rare subjects"),
        ("kilt_popqa_3", [question(0, id=3, s_pop=0)], "has a row whose 'id' is no text"),
        ("kilt_nq", [question(0, id="a"), question(1)], "has a row whose 'id' is no text"),
        (
            "msmarco_rerank_psg",
            [query(0) | {"ctxs": [{"id": "1", "text": "a", "label": 1, "title": 3}]}],
            ":1 is no row",
        ),
    ],
)
def test_rows_without_what_a_task_needs_are_named(folder, name, rows, message):
    task = BY_NAME[name]
    write(folder / "data" / task.file.format(size=task.sizes[0]), rows)
    with pytest.raises(ValueError, match=message):
        read_questions(folder, task, 8192, None)


@pytest.mark.parametrize("name", ["kilt_nq", "msmarco_rerank_psg"])
def test_examples_are_of_other_questions_or_there_are_too_few(folder, name):
    task = BY_NAME[name]
    examples = folder / "data" / task.examples
    write(examples, [json.loads(examples.read_text().splitlines()[0])] * 3)
    with pytest.raises(ValueError, match=f"{examples.name} has fewer than 2 examples that are other questions than"):
        read_questions(folder, task, 8192, 2)
