"""RULER's tasks, solved by programs of our own that read nothing but the prompt; its metric by hand."""

import re
from collections import Counter

import pytest

from ringformer.evals import ruler
from ringformer.evals.cases import Case

LENGTHS = {"niah_single_1": 128, "niah_multikey_2": 128, "niah_multikey_3": 128, "vt": 30, "cwe": 120, "fwe": 50}


def tokens(prompt):
    return len(prompt) // 4


def solve_niah(prompt):
    key = re.search(r"What is the special magic \w+ for (\S+) mentioned", prompt)[1]
    (value,) = re.findall(rf"One of the special magic \w+s for {key} is: (\S+)\.\n", prompt)
    assert prompt.endswith(f" for {key} mentioned in the provided text is")
    return [value]


def solve_vt(prompt):
    asked = prompt[prompt.rindex("Memorize and track") :]
    value = re.search(r"that are assigned the value (\d+) in", asked)[1]
    known, names = {value}, []
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", asked):
        if source in known:
            known.add(name)
            names.append(name)
    assert asked.endswith(f" 5 variables are assgined the value {value}, they are: ")
    return names


def solve_cwe(prompt):
    asked = prompt[prompt.rindex("Below is a numbered list") :]
    numbered = re.findall(r"(\d+)\. ([a-z-]+)", asked[: asked.index("Question")])
    assert [int(number) for number, _ in numbered] == list(range(1, len(numbered) + 1))
    return [word for word, _ in Counter(word for _, word in numbered).most_common(10)]


def solve_fwe(prompt):
    words = re.search(r"coded words\. (.*)\nQuestion", prompt)[1].split()
    (_, _), *top = Counter(words).most_common(5)
    assert Counter(words).most_common(1)[0][0] == "..." and top[2][1] > top[3][1]
    return [word for word, _ in top[:3]]


SOLVERS = {"vt": solve_vt, "cwe": solve_cwe, "fwe": solve_fwe} | dict.fromkeys(
    ("niah_single_1", "niah_multikey_2", "niah_multikey_3"), solve_niah
)


@pytest.mark.parametrize("length", [1500, 6000])
@pytest.mark.parametrize("task", ruler.TASKS)
def test_a_task_is_solved_by_who_reads_it_all(task, length):
    found = list(ruler.cases_of_length(length, [task], 3, 0, tokens))
    assert len({case.prompt for case in found}) == 3
    for case in found:
        assert set(SOLVERS[task](case.prompt)) == set(case.expected)
        assert case.max_new_tokens == LENGTHS[task] and case.labels == {"task": task}
        assert length * 0.9 - LENGTHS[task] < tokens(case.prompt) <= length - LENGTHS[task]
        assert ruler.score(case, " ".join(SOLVERS[task](case.prompt)).upper()) == 1
    assert found == list(ruler.cases_of_length(length, [task], 3, 0, tokens))


def test_prompts_begin_and_end_as_the_original_s():
    (niah,) = ruler.cases_of_length(1000, ["niah_single_1"], 1, 0, tokens)
    assert niah.prompt.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\nThe grass is green. The sky is blue. The sun is yellow. Here we go. There and back "
        "again.\n"
    )
    (fwe,) = ruler.cases_of_length(1000, ["fwe"], 1, 0, tokens)
    assert fwe.prompt.endswith(
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text? Answer: According to the coded text above, the three most frequently "
        "appeared words are:"
    )
    (vt,) = ruler.cases_of_length(1500, ["vt"], 1, 0, tokens)
    assert "VAR" in vt.prompt and len(vt.expected) == 5 and all(re.fullmatch("[A-Z]{5}", v) for v in vt.expected)
    (uuids,) = ruler.cases_of_length(1500, ["niah_multikey_3"], 1, 0, tokens)
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", uuids.expected[0])


@pytest.mark.parametrize("task", ["niah_multikey_2", "niah_multikey_3"])
def test_keys_are_distinct(task):
    (case,) = ruler.cases_of_length(100_000, [task], 1, 0, tokens)
    keys = re.findall(r"One of the special magic \w+s for (\S+) is", case.prompt)
    assert len(keys) == len(set(keys)) > 2000


def test_words_run_out_and_pairs_take_their_place():
    for case in ruler.cases_of_length(40_000, ["cwe"], 4, 0, tokens):
        words = Counter(re.findall(r"\d+\. ([a-z-]+)", case.prompt[case.prompt.rindex("Below is") :]))
        assert len(words) > len(ruler.single_words()) and set(words.values()) == {30, 3}
        assert all("-" in word for word in words)
        text = " ".join(words)
        assert not [word for word in words if text.count(word) > 1], "a part of another one"


def test_no_word_is_a_part_of_another():
    words = ruler.single_words()
    assert len(words) > 900 and not [w for w in words if any(w in other for other in words if other != w)]


@pytest.mark.parametrize(("expected", "answer", "share"), [
    (("Lima",), "it is LIMA.", 1), (("a1", "b2", "c3", "d4"), "B2 and d4", 0.5), (("a1", "b2", "c3"), "", 0),
    (("one", "two", "three"), "onetwo", 2 / 3),
])  # fmt: skip
def test_the_metric_by_hand(expected, answer, share):
    assert ruler.score(Case(1, 0, "", expected, 1, {}), answer) == pytest.approx(share)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="unknown task 'qa_1'; known: niah_single_1"):
        ruler.check(["vt", "qa_1"])
    with pytest.raises(ValueError, match="cwe in 200 tokens: the shortest prompt has"):
        list(ruler.cases_of_length(200, ["cwe"], 1, 0, tokens))
