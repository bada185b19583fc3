"""Line retrieval: the official format and rule, written down here once more."""

import json
import re

import pytest

from ringformer.evals import lines
from ringformer.evals.cases import Case
from tests.evals.models import knows_lines

OFFICIAL = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its "
    "corresponding <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding "
    "<REGISTER_CONTENT> of a certain line index. Now the record start:\n\n"
    "line tall-hat: REGISTER_CONTENT is <12>\nline kind-frog: REGISTER_CONTENT is <40311>\n"
    "\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line kind-frog? I need the number. "
)
LINE = re.compile(r"line ([a-z]+-[a-z]+): REGISTER_CONTENT is <(\d+)>\n")


def tokens(prompt):
    return len(prompt) // 3


def case(expected="4711"):
    return Case(None, 0, "", (expected,), 100, {})


def test_a_prompt_is_the_official_one():
    record = lines.Record(lines.Numbers(), "x")
    record._lines = [("tall-hat", 12), ("kind-frog", 40311)]
    record._asked = 0.7
    assert record.prompt(2) == OFFICIAL


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("4711", 1),
        ("The <REGISTER_CONTENT> in line kind-frog is 4711.", 1),
        ("It is <04711>", 1),
        ("1, 2, 4711 it is", 1),
        ("4711, and line 3", 0),
        ("4711.0", 0),
        ("47 11", 0),
        ("4711x4711\n", 1),
        ("14711", 0),
        ("-4711", 1),
        ("", 0),
        ("I need more time.", 0),
        ("4" * 5000, 0),
        ("4,711", 0),
    ],
)
def test_the_last_number_of_the_answer_counts(answer, right):
    """As the official rule has it: `\\d+` and the last of them, as an integer; none is wrong."""
    assert lines.score(case(), answer) == right


def test_no_number_is_wrong_even_where_none_would_be_a_guess():
    assert lines.score(case("0"), "none") == 0


def test_22600_lines_are_distinct_and_the_seed_s():
    """512K tokens of LLaMA, 23.18 a line; more than the 910 adjectives that the official words have."""
    first, again, other = (lines.Record(lines.Numbers(), seed, 524288, 0).prompt(22_600) for seed in (0, 0, 1))
    found = LINE.findall(first)
    assert len(found) == len({index for index, _ in found}) == 22_600
    numbers = [int(number) for _, number in found]
    assert min(numbers) >= 1 and max(numbers) <= 50_000 and len(set(numbers)) > 15_000
    assert first == again != other
    assert first.startswith(OFFICIAL[: OFFICIAL.index("line tall")]) and first.endswith("? I need the number. ")


def test_a_million_tokens_and_more_have_lines():
    found = lines.Record(lines.Numbers(), 3).lines(90_000)
    assert len({index for index, _ in found}) == 90_000


def test_the_prompt_of_a_seed_stays_what_it_is():
    """On every machine and Python: a changed word or draw makes other cases of the same name."""
    (found,) = lines.cases_of_lines(3, 1, 0, lines.Numbers())
    assert LINE.findall(found.prompt) == PINNED and found.expected == (PINNED[found.labels["position"]][1],)


PINNED = [("regal-brother", "26961"), ("dusty-comet", "23136"), ("clear-wave", "29612")]


@pytest.mark.parametrize("length", [400, 1000, 20_000])
def test_a_length_is_filled_with_lines(length):
    found = list(lines.cases_of_length(length, 5, 0, lines.Numbers(), tokens))
    assert len({case.prompt for case in found}) == 5
    for case in found:
        assert length - 100 - 25 < tokens(case.prompt) <= length - 100
        assert len(LINE.findall(case.prompt)) == case.labels["num_lines"]
        assert lines.score(case, knows_lines(case.prompt)) == 1
        assert LINE.findall(case.prompt)[case.labels["position"]][1] == case.expected[0]


def test_questions_about_a_document_share_its_lines_and_ask_for_others():
    for cases in (
        [*lines.cases_of_lines(9, 3, 0, lines.Numbers(), 9)],
        [*lines.cases_of_length(600, 3, 0, lines.Numbers(), tokens, 9)],
    ):
        assert [(case.index, case.labels["question"]) for case in cases] == [(i, j) for i in range(3) for j in range(9)]
        for document in (cases[:9], cases[9:18], cases[18:]):
            records = {case.prompt[: case.prompt.index("\nNow the record is over.")] for case in document}
            assert len(records) == 1 and len({case.labels["position"] for case in document}) == 9
            for case in document:
                assert lines.score(case, knows_lines(case.prompt)) == 1
                assert LINE.findall(case.prompt)[case.labels["position"]][1] == case.expected[0]
                assert len(LINE.findall(case.prompt)) == case.labels["num_lines"]


def test_the_longest_question_fits_and_one_more_line_would_not():
    """Against trying all numbers of lines, with a question of every position that is asked for."""
    for seed in range(6):
        (first, *others) = lines.cases_of_length(500, 1, seed, lines.Numbers(), len_in_bytes, 4)
        count = first.labels["num_lines"]
        record = lines.Record(lines.Numbers(), seed, 500, 0, questions=4)
        longest = {n: max(len_in_bytes(case.prompt) for case in record.cases(500, 0, n)) for n in (count, count + 1)}
        assert max(len_in_bytes(case.prompt) for case in (first, *others)) == longest[count] <= 400 < longest[count + 1]


def len_in_bytes(prompt):
    return max(1, len(prompt) - 400)


def test_one_question_is_the_first_of_several():
    (one,) = lines.cases_of_lines(40, 1, 0, lines.Numbers())
    (first, second) = lines.cases_of_lines(40, 1, 0, lines.Numbers(), 2)
    assert first.prompt == one.prompt != second.prompt and "question" not in one.labels


def test_more_questions_than_lines_are_refused():
    with pytest.raises(ValueError, match="--questions=4: a document has only 3 lines to ask for"):
        next(lines.cases_of_lines(3, 1, 0, lines.Numbers(), 4))
    with pytest.raises(ValueError, match=r"--questions=50: a document has only \d+ lines to ask for"):
        next(lines.cases_of_length(600, 1, 0, lines.Numbers(), tokens, 50))


def test_more_cases_begin_with_the_same_ones():
    few, many = (list(lines.cases_of_length(1000, count, 0, lines.Numbers(), tokens)) for count in (2, 4))
    assert many[:2] == few


def test_every_line_is_asked_for():
    asked = {case.labels["position"] for case in lines.cases_of_lines(4, 60, 0, lines.Numbers())}
    assert asked == {0, 1, 2, 3}


def test_other_numbers_are_another_form_and_called_so():
    form = lines.Numbers(1, 99)
    (found,) = lines.cases_of_lines(3000, 1, 0, form)
    assert {int(number) for _, number in LINE.findall(found.prompt)} == set(range(1, 100))
    assert "not LongEval" in form.form and "99" in form.form and lines.Numbers().form == "LongEval's"
    with pytest.raises(ValueError, match="numbers from 9 to 3"):
        next(lines.cases_of_lines(3, 1, 0, lines.Numbers(9, 3)))


def test_official_rows_are_taken_verbatim(tmp_path):
    odd = OFFICIAL.replace("tall-hat", "tall-hat-0") + "\u2028ASSISTANT: "
    row = {
        "random_idx": ["kind-frog-1", 1],
        "expected_number": 40311,
        "num_lines": 2,
        "token_size": 200,
        "correct_line": "line kind-frog: REGISTER_CONTENT is <40311>\n",
        "prompt": odd,
        "prompt_length": -1,
    }
    path = tmp_path / "200_lines.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n" + json.dumps(row | {"expected_number": 7}) + "\n")
    first, second = lines.read_official(path)
    assert first.prompt == odd and first.expected == ("40311",) and first.max_new_tokens == 100
    assert first.labels == {"num_lines": 2, "position": 1} and second.expected == ("7",)
    assert lines.score(first, knows_lines(OFFICIAL)) == 1 and lines.score(second, knows_lines(OFFICIAL)) == 0


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        "{}",
        '{"prompt": "", "expected_number": 1, "num_lines": 1, "random_idx": ["a", 0]}',
        '{"prompt": "a", "expected_number": "1", "num_lines": 1, "random_idx": ["a", 0]}',
    ],
)
def test_what_is_no_official_row_is_named(bad, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + bad + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl:2 is not a row of LongEval"):
        lines.read_official(path)


def test_a_length_without_room_is_refused():
    with pytest.raises(ValueError, match="no room for a prompt before 100 new tokens"):
        next(lines.cases_of_length(100, 1, 0, lines.Numbers(), tokens))
    with pytest.raises(ValueError, match=r"the shortest prompt has 1\d\d tokens, but 50 fit"):
        next(lines.cases_of_length(150, 1, 0, lines.Numbers(), tokens))
