"""Cases in batches: nothing is cut, nothing is answered twice, a killed evaluation goes on where it was."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ringformer.evals import lines, needle
from ringformer.evals.case_file import CaseFile
from ringformer.evals.runner import Answering, answer_cases, check_fit, row_checker
from ringformer.evals.tables import contexts, cross_table, lines_table, mean
from tests.evals.models import Scripted, knows_lines

SETTINGS = {"run": "runs/x", "step": 3, "seed": 0}
LINES, NEEDLE = row_checker(lines.score), row_checker(needle.score)


def groups(model, count=5, lengths=(2048, 4096)):
    return [list(lines.cases_of_length(n, count, 0, lines.Numbers(), lambda p: len(model.encode(p)))) for n in lengths]


def evaluate(model, path, *, count=5, batch_size=2, said=None, **settings):
    file = CaseFile(path, "lines", SETTINGS | settings, LINES)
    answering = Answering(model, 4096, batch_size, chat=False)
    answer_cases(groups(model, count), answering, lines.score, file, (said if said is not None else []).append)
    return file


@pytest.mark.parametrize("within", [10**9, 1, 1900])
def test_a_model_of_known_reach_gets_its_score(within, tmp_path):
    """It knows lines that stand in the last so many characters: all, none, those of the prompts in which they do."""
    model = Scripted(lambda prompt: knows_lines(prompt, within))
    file = evaluate(model, tmp_path / "cases.jsonl", count=20)
    rows = list(file.rows.values())
    asked = {prompt for batch in model.batches for prompt in batch}
    known: dict[int, list[bool]] = {2048: [], 4096: []}
    for prompt in asked:
        index = prompt[prompt.rindex("in line ") + 8 : prompt.rindex("?")]
        place = len(prompt) - prompt.index(f"line {index}: ")
        known[2048 if len(prompt) < 2048 else 4096].append(place <= within)
    assert {length: mean(found) for length, found in contexts(rows).items()} == {
        length: sum(found) / 20 for length, found in known.items()
    }
    shares = [sum(found) / 20 for found in known.values()]
    assert shares == {10**9: [1, 1], 1: [0, 0]}.get(within, shares) and (within != 1900 or 0 < shares[1] < shares[0])
    said = [line.split() for line in lines_table(rows).splitlines()[1:]]
    assert [(line[0], line[-3], line[-2]) for line in said] == [
        (context, "20", f"{share:.1%}") for context, share in zip(("2,048", "4,096"), shares, strict=True)
    ]
    if within == 10**9:
        assert [line[-1] for line in said] == ["83.9-100.0%"] * 2


def test_batches_have_one_length_and_one_size(tmp_path):
    model = Scripted(knows_lines)
    evaluate(model, tmp_path / "cases.jsonl")
    assert [len(batch) for batch in model.batches] == [2] * 6
    assert [len(set(batch)) for batch in model.batches] == [2, 2, 1, 2, 2, 1]
    for batch in model.batches:
        assert len({len(prompt) > 2048 for prompt in batch}) == 1


def test_every_case_is_a_line_with_what_was_said(tmp_path):
    model, path = Scripted(knows_lines), tmp_path / "cases.jsonl"
    evaluate(model, path, count=1)
    head, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert head == {"evaluation": "lines", "settings": SETTINGS}
    (prompt, _), _ = model.batches
    row = rows[0]
    assert row["prompt_tokens"] == len(prompt.encode()) and row["length"] == 2048 and row["index"] == 0
    assert row["answer"] == knows_lines(prompt) and row["score"] == 1 and row["expected"][0] in row["answer"]


@pytest.mark.parametrize("cut", [0, 1, 20, 400])
def test_an_evaluation_that_was_killed_goes_on(cut, tmp_path):
    """Whatever the last line had become: whole but for its end, torn, gone."""
    whole, path = tmp_path / "whole.jsonl", tmp_path / "cases.jsonl"
    evaluate(Scripted(knows_lines), whole)
    begun = whole.read_text().splitlines(keepends=True)[:5]
    text = "".join(begun)
    path.write_text(text[: len(text) - cut])
    model = Scripted(knows_lines)
    file = evaluate(model, path)
    assert path.read_text() == whole.read_text() and list(file.rows) == list(
        CaseFile(whole, "lines", SETTINGS, LINES).rows
    )
    answered = {prompt for batch in model.batches for prompt in batch}
    assert len(answered) == 10 - (text[: len(text) - cut].count("\n") - 1)


def test_what_is_done_is_not_asked_again_and_more_may_be_added(tmp_path):
    path = tmp_path / "cases.jsonl"
    evaluate(Scripted(knows_lines), path, count=2)
    model, said = Scripted(lambda prompt: pytest.fail("was asked again")), []
    evaluate(model, path, count=2, said=said)
    assert all("0 of them new" in line for line in said)
    more = Scripted(knows_lines)
    assert len(evaluate(more, path, count=3).rows) == 6
    assert len({prompt for batch in more.batches for prompt in batch}) == 2


def test_other_settings_and_other_evaluations_are_not_mixed(tmp_path):
    path = tmp_path / "cases.jsonl"
    evaluate(Scripted(knows_lines), path, count=1)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="with other settings: step is 3, not 4; choose another --out"):
        CaseFile(path, "lines", SETTINGS | {"step": 4}, LINES)
    with pytest.raises(ValueError, match="chat is None, not True"):
        CaseFile(path, "lines", SETTINGS | {"chat": True}, LINES)
    with pytest.raises(ValueError, match="holds cases of lines, not of needle"):
        CaseFile(path, "needle", SETTINGS, NEEDLE)
    assert path.read_bytes() == before


def test_a_case_with_another_prompt_is_another_case(tmp_path):
    path = tmp_path / "cases.jsonl"
    file = evaluate(Scripted(knows_lines), path, count=1)
    (key, *_) = file.rows
    with pytest.raises(ValueError, match="with another prompt"):
        file.missing([SimpleNamespace(key=key, prompt_hash="0" * 32)])


@pytest.mark.parametrize("content", ["mine", "mine\n", "{}\n", '{"a": 1}\n{"b": 2}\n', '{"evaluation": 3}\n'])
def test_a_file_of_another_kind_is_left_alone(content, tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="was not written by an evaluation"):
        CaseFile(path, "lines", SETTINGS, LINES)
    assert path.read_text() == content


def test_a_line_that_is_no_case_is_named(tmp_path):
    path = tmp_path / "cases.jsonl"
    evaluate(Scripted(knows_lines), path, count=1)
    text = path.read_text().splitlines()
    path.write_text("\n".join([text[0], "?", text[1]]) + "\n")
    with pytest.raises(ValueError, match=r"cases\.jsonl:2 is not a case: '\?'; delete the line"):
        CaseFile(path, "lines", SETTINGS, LINES)


@pytest.mark.parametrize(
    ("row", "field", "value"),
    [(1, "score", 0.0), (1, "expected", ["7"]), (1, "score", None), (2, "answer", None), (2, "num_lines", "many")],
)
def test_what_was_written_by_hand_is_no_answer(row, field, value, tmp_path):
    """A score that the answer has not, a field that is gone (None) or of another kind."""
    path = tmp_path / "cases.jsonl"
    evaluate(Scripted(knows_lines), path, count=2)
    text = path.read_text().splitlines()
    changed = json.loads(text[row]) | {field: value}
    text[row] = json.dumps({name: x for name, x in changed.items() if x is not None})
    path.write_text("\n".join(text) + "\n")
    with pytest.raises(ValueError, match=r"cases\.jsonl.*delete (its|the) line"):
        evaluate(Scripted(knows_lines), path, count=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("score", 0.0),
        ("key", "[2048, 9, {}]"),
        ("index", 7),
        ("num_lines", 3),
        ("expected", []),
        ("expected", ["x"]),
        ("score", None),
        ("prompt_tokens", None),
        ("position", None),
        ("answer", 3),
    ],
)
def test_a_row_that_no_evaluation_wrote_is_refused_whatever_is_asked_for(field, value, tmp_path):
    """When the file is opened, of cases that are not asked for, too: the table counts them. None: it is gone."""
    path = tmp_path / "cases.jsonl"
    evaluate(Scripted(knows_lines), path, count=1)
    text = path.read_text().splitlines()
    row = json.loads(text[1]) | {field: value}
    (path := tmp_path / "changed.jsonl").write_text(
        "\n".join([text[0], json.dumps({name: x for name, x in row.items() if x is not None})]) + "\n"
    )
    with pytest.raises(ValueError, match=r"changed\.jsonl:2 is not a case: .*; delete the line"):
        CaseFile(path, "lines", SETTINGS, LINES)


def test_a_case_that_stands_there_twice_is_refused(tmp_path):
    path = tmp_path / "cases.jsonl"
    evaluate(Scripted(knows_lines), path, count=1)
    with path.open("a") as file:
        file.write(path.read_text().splitlines()[2] + "\n")
    with pytest.raises(ValueError, match=r"cases\.jsonl:4 repeats an earlier case"):
        CaseFile(path, "lines", SETTINGS, LINES)


def test_settings_may_change_before_the_first_case(tmp_path):
    """A start that failed leaves a head alone."""
    path = tmp_path / "cases.jsonl"
    CaseFile(path, "lines", SETTINGS, LINES)
    CaseFile(path, "needle", SETTINGS | {"step": 9}, NEEDLE)
    assert json.loads(path.read_text())["evaluation"] == "needle"


def test_a_prompt_that_does_not_fit_is_refused_before_any_is_answered(tmp_path):
    model = Scripted(lambda prompt: pytest.fail("was asked"))
    cases = lines.cases_of_lines(10, 3, 0, lines.Numbers())
    longer = [*cases, *lines.cases_of_lines(60, 1, 0, lines.Numbers())]
    file = CaseFile(tmp_path / "cases.jsonl", "lines", SETTINGS, LINES)
    answering = Answering(model, 1300, 1, chat=False)
    with pytest.raises(
        ValueError,
        match=r"case 0 of 60 lines has 3,\d+ tokens and may generate 100, more than the "
        "1,300 that fit: prompts are never truncated",
    ):
        answer_cases([longer], answering, lines.score, file, str)
    assert not file.rows


def test_the_chat_template_takes_its_room():
    """A prompt that fits alone does not with the template around it."""
    model = Scripted(knows_lines)
    (case,) = lines.cases_of_lines(10, 1, 0, lines.Numbers())
    room = len(case.prompt.encode()) + 100
    assert check_fit([case], Answering(model, room, 1, chat=False)) == {case.key: room - 100}
    with pytest.raises(ValueError, match="prompts are never truncated"):
        check_fit([case], Answering(model, room, 1, chat=True))
    with pytest.raises(ValueError, match="prompts are never truncated"):
        check_fit([replace(case, prefix=" The")], Answering(model, room, 1, chat=False))
    assert replace(case, prefix=" The").prompt_hash != case.prompt_hash


@pytest.mark.slow
def test_a_model_that_sees_the_end_alone_has_this_heat_map(tmp_path):
    """It knows what stands in the last 1,800 bytes of a prompt; which cells these are is found in the prompts."""

    def answer(prompt):
        return " ".join(number for number in prompt[-1800:].split() if number.isdigit() and len(number) == 7)

    model, hay = Scripted(answer), needle.Haystack.load(None)
    depths = [0.0, 25.0, 50.0, 75.0, 100.0]
    file = CaseFile(tmp_path / "cases.jsonl", "needle", SETTINGS, NEEDLE)
    found = [
        list(needle.cases_of_length(n, depths, 2, 0, needle.Needles(), hay, lambda p: len(p.encode())))
        for n in (2000, 4000, 8000)
    ]
    answer_cases(found, Answering(model, 8000, 4, chat=False), needle.score, file, str)
    table = cross_table(list(file.rows.values()), "depth", "{:g}%")
    cells = {line.split()[0]: [float(x) for x in line.split()[1:]] for line in table.splitlines()[1:]}
    assert list(cells) == ["0%", "25%", "50%", "75%", "100%", "mean"]
    assert cells["0%"] == [0, 0, 0] and cells["100%"] == [100, 100, 100]
    assert cells["25%"] == [100, 0, 0] and cells["50%"] == [100, 0, 0] and cells["75%"] == [100, 100, 0]
    assert cells["mean"] == [80, 40, 20]
