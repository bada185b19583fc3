"""RULER's tasks against prompts of the original's generator, and solved by programs that read nothing but the prompt.

prompts.json has what the generator of NVIDIA/RULER wrote, at the commit that it names, for a tokenizer that is
written down there as a regular expression, from essays and questions of our own in the forms of PaulGrahamEssays.json,
SQuAD and HotpotQA.
"""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from ringformer.evals.cases import Case
from ringformer.evals.ruler import prompts, tasks
from ringformer.evals.ruler.data import own_words, read_data, sentences
from tests.evals.ruler.facts import NEEDLE, context_of, facts, parts, solve

OFFICIAL = json.loads(Path(__file__).with_name("prompts.json").read_text())
PROMPTS = OFFICIAL["prompts"]
PIECES = re.compile(OFFICIAL["token"])
NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
ESSAYS = [task for task in tasks.TASKS if tasks.TASKS[task].needs == "essays"]
FEWER_WORDS = {"cwe": 25}
"""Words of ours that a list has more, of a hundred: theirs are rarer ones, of more tokens."""


def tokens(prompt, prefix=""):
    return len(PIECES.findall(prompt + prefix))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The files that the generator was given."""
    folder = tmp_path_factory.mktemp("ruler")
    for name, content in OFFICIAL["data"].items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_data(None, *(str(folder / f"{name}.json") for name in ("essays", "squad", "hotpotqa")))


def made(length, task, count, data, seed=0):
    return list(tasks.cases_of_length(length, task, count, seed, tokens, data))


@pytest.mark.parametrize("row", PROMPTS, ids=lambda row: f"{row['task']}-{row['length']}-{row['index']}")
def test_what_the_original_drew_is_written_as_it_writes_it(row, data):
    """Its words, numbers, orders and places, read from its prompt: our text of them is its text, to the letter."""
    task, text = row["task"], row["input"]
    kind = task.split("_")[0]
    prompt = {"niah": rendered_niah, "vt": rendered_vt, "cwe": rendered_cwe, "fwe": rendered_fwe, "qa": rendered_qa}[
        kind
    ](text, row["outputs"], data)
    assert (prompt.question, prompt.prefix) == (text, row["answer_prefix"])


def rendered_niah(text, outputs, data):
    context, kind = context_of(text), "uuid" if "magic uuid" in text else "number"
    keys = re.split(r", and |, ", re.search(r"\nWhat .* for (.*) mentioned", text)[1])
    found = [match.groups() for match in NEEDLE.finditer(context)]
    assert all(prompts.needle(kind, *pair) in context for pair in found)
    hidden = [prompts.needle(kind, key, value) for key, value in found if key in keys or len(found) <= 4]
    if prompts.NOISE in context or len(found) > 4:
        lines = context.split("\n")
        places = [lines.index(needle) - i for i, needle in enumerate(hidden)]
        others = [line for line in lines if line not in hidden]
        written = prompts.among_lines(others, hidden, places)
    else:
        bare = " ".join(NEEDLE.sub("", context).split())
        assert bare.split() == list((data.essays * 99)[: len(bare.split())])
        whole, before = sentences(bare), []
        for i, needle in enumerate(hidden):
            text_before = " ".join(NEEDLE.sub("", context[: context.index(needle)]).split())
            before.append(len(sentences(text_before)) if text_before else 0)
            assert text_before == " ".join(whole[: before[i]]), "behind a sentence"
        depths = [next(d for d in tasks.DEPTHS if int(len(whole) * (d / 100)) == place) for place in before]
        written = prompts.among_sentences(whole, hidden, depths)
    return prompts.asking(kind, written, keys, len(outputs))


def rendered_vt(text, outputs, _data):
    example, asked = text.split("\n\nMemorize")
    names = example.split()[-5:]
    chains = []
    for part, variables in ((example, names), (asked, outputs)):
        lines = context_of(part).split("\n")
        places = [i for i, line in enumerate(lines) if line.startswith("VAR")]
        value = re.search(r"value (\d+) in", part)[1]
        noises = len(lines) - len(places)
        chains.append(prompts.chain(variables, value, noises, [place - i for i, place in enumerate(places)]))
    return prompts.chain_behind_example(chains[0], names, chains[1])


def rendered_cwe(text, outputs, _data):
    shown, answer, asked = (
        re.findall(r"\d+\. (.+?)(?= \d+\. |$)", part)
        for part in (
            context_of(text),
            re.search(r"list are: (.*)\n", text)[1],
            context_of(text[text.rindex("Below is") :]),
        )
    )
    assert set(outputs) < set(asked)
    return prompts.list_behind_example(shown, answer, asked)


def rendered_fwe(text, _outputs, _data):
    return prompts.coded_text(context_of(text).split(" "))


def rendered_qa(text, _outputs, _data):
    found = re.split(r"(?:^|\n\n)Document \d+:\n", context_of(text))[1:]
    return prompts.documents(found, text.rsplit("\n\nQuestion: ", 1)[1])


@pytest.mark.parametrize("row", PROMPTS, ids=lambda row: f"{row['task']}-{row['length']}-{row['index']}")
def test_our_prompts_have_the_original_s_make_up(row, data):
    """All but what is drawn: the text around it, its kinds, examples, how often a word stands there, the frequencies.
    How many parts there are is the next test's."""
    wanted = facts(row["task"], row["input"], row["answer_prefix"])
    for case in made(row["length"], row["task"], 3, data):
        assert facts(row["task"], case.prompt, case.prefix) == wanted
        assert len(case.expected) == len(row["outputs"])
        assert case.max_new_tokens == NEW_TOKENS[row["task"].split("_")[0]]
        assert tokens(case.prompt, case.prefix) + case.max_new_tokens <= row["length"]


@pytest.mark.parametrize(
    ("length", "task"), [(int(n), task) for n, tasks in OFFICIAL["parts"].items() for task in tasks]
)
def test_our_prompts_have_as_many_parts_as_the_original_s(task, length, data):
    """Sentences, words, documents: as many where all have the same length, else within a step of them; of cwe's words,
    which are ours, so many more."""
    official = OFFICIAL["parts"][str(length)][task]
    ours = [parts(task, case.prompt) for case in made(length, task, min(10, len(official)), data)]
    if task in ("niah_single_1", "niah_multikey_3", "vt", "fwe", "qa_1", "qa_2"):
        assert set(ours) == set(official) and len(set(official)) == 1
    else:
        step = 500 if task in ESSAYS else 10 if task == "cwe" else 25 if length >= 4096 else 5
        assert step == 500 or {(max(ours) - found) % step for found in ours} == {0}, (
            "a step or more where too much was drawn"
        )
        more = 1 + FEWER_WORDS.get(task, 0) / 100
        assert min(official) - step <= min(ours) <= max(ours) <= more * max(official) + step


def test_with_the_original_s_words_a_list_has_as_many(tmp_path, data):
    """Of the words that its prompts have, instead of all: within a step."""
    rows = [row for row in PROMPTS if row["task"] == "cwe"]
    words = {word for row in rows for word in re.findall(r"\d+\. (.+?)(?= \d+\. |\n|$)", row["input"])}
    for name in ("adjectivelist.txt", "nounlist.txt", "verblist.txt"):
        (tmp_path / name).write_text("\n".join(sorted(words)) + "\n")
    theirs = read_data(str(tmp_path))
    assert set(theirs.words.listed) == words
    for length in (1024, 4096):
        official = OFFICIAL["parts"][str(length)]["cwe"]
        ours = [parts("cwe", case.prompt) for case in made(length, "cwe", 10, theirs)]
        assert min(official) - 10 <= min(ours) <= max(ours) <= max(official) + 10


@pytest.mark.parametrize("length", [1500, 6000])
@pytest.mark.parametrize("task", [task for task in tasks.TASKS if not task.startswith("qa")])
def test_a_task_is_solved_by_who_reads_it_all(task, length, data):
    found = made(length, task, 3, data)
    assert len({case.prompt for case in found}) == 3
    for case in found:
        solved = solve(task, case.prompt)
        assert set(solved) == set(case.expected) and case.labels == {"task": task}
        assert tasks.score(case, " ".join(solved).upper()) == 1
    assert found == made(length, task, 3, data) != made(length, task, 3, data, seed=1)
    assert found[:2] == made(length, task, 2, data), "more cases begin with the same ones"


def test_a_question_is_about_its_documents(data):
    squad = OFFICIAL["data"]["squad"]
    asked = [
        (each["question"], [answer["text"] for answer in each["answers"]], paragraph["context"])
        for article in squad["data"]
        for paragraph in article["paragraphs"]
        for each in paragraph["qas"]
        if not each["is_impossible"]
    ]
    articles = [[paragraph["context"] for paragraph in article["paragraphs"]] for article in squad["data"]]
    for case, (question, answers, document) in zip(made(1024, "qa_1", 20, data), asked, strict=False):
        assert case.prompt.endswith(f"\n\nQuestion: {question}") and list(case.expected) == answers
        assert f"\n{document}\n\n" in case.prompt
        (article,) = [texts for texts in articles if document in texts]
        assert all(f"\n{text}\n\n" in case.prompt for text in article), "those beside it before any other"
    for case, row in zip(made(1024, "qa_2", 3, data), OFFICIAL["data"]["hotpotqa"], strict=True):
        assert case.expected == (row["answer"],) and case.prompt.endswith(f"\n\nQuestion: {row['question']}")
        assert all(f":\n{title}\n{''.join(lines)}\n\n" in case.prompt for title, lines in row["context"])
    with pytest.raises(ValueError, match="there are 3 questions: ask for as many --num_cases or fewer"):
        made(1024, "qa_2", 4, data)


@pytest.mark.parametrize("task", ["niah_multikey_2", "niah_multikey_3", "niah_multikey_1", "niah_multiquery"])
def test_keys_and_values_are_distinct(task, data):
    for case in made(20_000, task, 3, data):
        keys, values = zip(*NEEDLE.findall(case.prompt), strict=True)
        assert len(keys) == len(set(keys)) == len(set(values)) >= 4


def test_words_run_out_and_pairs_take_their_place(data):
    for case in made(80_000, "cwe", 2, data):
        words = Counter(re.findall(r"\d+\. ([a-z-]+)", case.prompt[case.prompt.rindex("Below is") :]))
        assert len(words) > len(own_words().listed) and set(words.values()) == {30, 3}
        assert all("-" in word for word in words)
        text = " ".join(words)
        assert not [word for word in words if text.count(word) > 1], "a part of another one"


def test_no_word_of_ours_is_a_part_of_another():
    words = own_words().listed
    assert len(words) > 900 and not [w for w in words if any(w in other for other in words if other != w)]


@pytest.mark.parametrize(
    ("task", "expected", "answer", "share"),
    [
        ("vt", ("Lima",), "it is LIMA.", 1),
        ("cwe", ("a1", "b2", "c3", "d4"), "B2 and d4", 0.5),
        ("fwe", ("a1", "b2", "c3"), "", 0),
        ("niah_multivalue", ("one", "two", "three"), "onetwo", 2 / 3),
        ("qa_1", ("in Rome", "Rome"), "Rome, I think", 1),
        ("qa_2", ("yes",), "No.", 0),
        ("qa_1", ("a b", "c"), "a", 0),
    ],
)
def test_the_metric_by_hand(task, expected, answer, share):
    assert tasks.score(Case(1, 0, "", expected, 1, {"task": task}), answer) == pytest.approx(share)


def test_tasks_are_those_whose_data_are_named(data):
    alone = ["niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe"]
    assert tasks.choose(None, read_data()) == alone and tasks.choose(None, data) == list(OFFICIAL["parts"]["4096"])
    assert len(tasks.choose(None, data)) == 13
    squad = data._replace(settings=dict.fromkeys(data.settings) | {"squad": "a hash"})
    assert tasks.choose(None, squad) == [*alone, "qa_1"]
    with pytest.raises(ValueError, match="unknown task 'qa_3'; known: niah_single_1"):
        tasks.choose(["vt", "qa_3"], data)
    with pytest.raises(ValueError, match=r"niah_multivalue needs data .*: set --essays=FILE"):
        tasks.choose(["vt", "niah_multivalue"], squad)


def test_what_does_not_fit_is_refused(data):
    with pytest.raises(ValueError, match="cwe in 200 tokens: the shortest prompt has"):
        made(200, "cwe", 1, data)
    with pytest.raises(ValueError, match=r"niah_single_2 in 600 tokens: the shortest prompt has .* choose other --t"):
        made(600, "niah_single_2", 1, data)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("essays", "{}", r'is not an object with a "text"'),
        ("essays", '{"text": " "}', "has no words"),
        ("squad", "[1]", "is not SQuAD 2.0, as dev-v2.0.json"),
        ("squad", '{"data": []}', "has no questions"),
        ("hotpotqa", '[{"question": "a"}]', "is not HotpotQA, as hotpot_dev_distractor_v1.json"),
        ("essays", b"\xff", "is not UTF-8"),
    ],
)
def test_a_file_of_another_form_is_refused(name, content, said, tmp_path):
    path = tmp_path / "it.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"it\.json {said}|it\.json .*{said}"):
        read_data(**{name: str(path)})
    with pytest.raises(ValueError, match=r"none\.json cannot be read"):
        read_data(**{name: str(tmp_path / "none.json")})


def test_the_content_of_each_file_is_a_setting(tmp_path):
    (tmp_path / "a.txt").write_text("One. Two.")
    first = read_data(essays=str(tmp_path / "a.txt")).settings
    (tmp_path / "a.txt").write_text("One. Three.")
    second = read_data(essays=str(tmp_path / "a.txt")).settings
    assert first["essays"] != second["essays"] and {**first, "essays": 0} == {**second, "essays": 0}
    assert set(read_data().settings.values()) == {None}
    assert read_data(essays=str(tmp_path / "a.txt")).essays == ["One.", "Three."]


def test_a_sentence_ends_behind_its_stop():
    text = 'He left. "Why?" (Nobody knows.) It is 3.5 now! So.'
    assert sentences(text) == ["He left.", '"Why?"', "(Nobody knows.)", "It is 3.5 now!", "So."]
    assert " ".join(sentences(text)) == text
