"""The report of all evaluations: what they found, with its intervals, and nothing that they did not."""

import json
import sys

import numpy as np
import pytest

from ringformer.checkpoints.saved_model import checkpoint_hash
from ringformer.cli import main
from ringformer.evals.intervals import bootstrap, wilson
from ringformer.evals.longbench import scores
from ringformer.evals.report.gather import NATS, SCORE, gather
from ringformer.evals.report.write import markdown
from tests.convert.models import save_model

CHECKPOINT = "0123"
MODEL = {"checkpoint": CHECKPOINT, "run": "/models/gone"}


def write_cases(evals, folder, evaluation, rows, checkpoint=CHECKPOINT, **settings):
    path = evals / folder / "cases.jsonl"
    path.parent.mkdir(parents=True)
    head = {"evaluation": evaluation, "settings": {"checkpoint": checkpoint} | settings}
    path.write_text("".join(json.dumps(line) + "\n" for line in (head, *rows)))
    return path


def ruler_row(length, index, task, right):
    key = json.dumps([length, index, {"task": task}])
    answer = "the number is 42" if right else "unknown"
    row = {"key": key, "prompt_hash": "a", "length": length, "index": index, "task": task, "prompt_tokens": length - 9}
    return row | {"expected": ["42"], "answer": answer, "score": float(right)}


def loss_row(document, nats):
    sums = {"all": [31 * nats, 31, 90], "last": [16 * nats, 16, 40]}
    first = 1
    while first < 32:
        sums[str(first)] = [first * nats, first, 3 * first - 1]
        first *= 2
    row = {"key": json.dumps([32, document, 0]), "prompt_hash": "b", "length": 32, "document": document, "start": 0}
    return row | {"sums": sums}


def write_all(evals, checkpoint=CHECKPOINT):
    """Ten right cases of twelve at 4,096 tokens, none of twelve at 8,192; four documents; a task of the harness."""
    rows = [ruler_row(4096, n, "vt", n < 10) for n in range(12)] + [ruler_row(8192, n, "vt", False) for n in range(12)]
    write_cases(evals, "ruler", "ruler", rows, checkpoint)
    write_cases(evals, "own-name", "perplexity", [loss_row(n, 2.0 + n) for n in range(4)], checkpoint, last=16)
    metrics = {"acc,none": 0.5, "acc_stderr,none": 0.1, "alias": "x"}
    metrics |= {"exact,flexible": 0.25, "exact_stderr,flexible": "N/A"}
    content = {"model": {"checkpoint": checkpoint}, "length": 2048, "results": {"piqa": metrics}}
    (evals / "harness").mkdir()
    (evals / "harness" / "results.json").write_text(json.dumps(content | {"n-samples": {"piqa": {"effective": 25}}}))


def test_every_number_is_that_of_the_cases(tmp_path):
    write_all(tmp_path)
    found = gather(tmp_path, MODEL)
    assert found.left_out == {}
    by_name = {(line.evaluation, line.task, line.context): line for line in found.lines}
    near, far = by_name["ruler", "vt", 4096], by_name["ruler", "vt", 8192]
    assert (near.value, near.cases, near.unit) == (10 / 12, 12, SCORE)
    assert near.interval == bootstrap([1.0] * 10 + [0.0] * 2, [1] * 12)
    assert (far.value, far.interval) == (0.0, wilson(0.0, 12))
    loss = by_name["own-name", "the same last 16 tokens", 32]
    assert (loss.value, loss.cases, loss.unit) == (3.5, 4, NATS)
    assert loss.interval == bootstrap([16 * nats for nats in (2.0, 3.0, 4.0, 5.0)], [16] * 4)
    assert by_name["own-name", "positions 8 to 15", 32].value == pytest.approx(3.5)
    assert by_name["own-name", "positions 16 to 31", 32].value == pytest.approx(3.5)
    task = by_name["harness", "piqa, acc", 2048]
    assert (task.value, task.cases, task.unit) == (0.5, 25, "acc")
    np.testing.assert_allclose(task.interval, (0.5 - 0.196, 0.5 + 0.196), atol=1e-4)
    assert by_name["harness", "piqa, exact (flexible)", 2048].interval is None
    assert len(found.lines) == 2 + 6 + 2
    table = markdown(found.lines).splitlines()
    assert len(table) == 2 + len(found.lines) and len({len(row) for row in table}) == 1
    assert any("83.3%" in row and "vt" in row for row in table)


def test_what_is_no_evaluation_of_the_checkpoint_is_left_out(tmp_path):
    """And named, with the reason."""
    write_all(tmp_path, checkpoint="4567")
    write_cases(tmp_path, "empty", "ruler", [])
    write_cases(tmp_path, "other", "poetry", [])
    (tmp_path / "mine").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "cases.jsonl").write_text("one case\n")
    (tmp_path / "report").mkdir()
    found = gather(tmp_path, MODEL)
    other = "it is of another checkpoint"
    assert not found.lines
    assert found.left_out == {
        "ruler": other,
        "own-name": other,
        "harness": other,
        "empty": "it has no case yet",
        "other": "it is of 'poetry', which no report knows",
        "mine": "it has neither cases.jsonl nor results.json",
        "notes": "no evaluation wrote it",
    }


def test_the_same_weights_with_another_rope_are_another_model(tmp_path):
    """A conversion with a larger theta has the same checkpoint; the folder says which it is."""
    write_cases(tmp_path, "ruler", "ruler", [ruler_row(4096, 0, "vt", True)], run=str(tmp_path))
    found = gather(tmp_path, MODEL)
    assert found.left_out == {"ruler": f"it is of {tmp_path}"} and not found.lines
    assert len(gather(tmp_path, MODEL | {"run": str(tmp_path)}).lines) == 1


def test_a_line_says_what_it_was_measured_with(tmp_path):
    """Another rope for the evaluation, a chat template, the number of needles."""
    row = ruler_row(4096, 0, "vt", True)
    write_cases(tmp_path, "a", "ruler", [row])
    write_cases(tmp_path, "b", "ruler", [row], chat=True, rope_theta=3e6)
    write_cases(tmp_path, "c", "ruler", [row], **{"rope_scaling.kind": "yarn", "rope_scaling.factor": 4.0})
    tasks = [line.task for line in gather(tmp_path, MODEL).lines]
    assert tasks == ["vt", "vt, chat, rope_theta 3000000.0", "vt, rope_scaling.kind yarn, rope_scaling.factor 4.0"]


def test_scores_without_their_package_are_left_out(tmp_path, monkeypatch):
    """And the advice is not to delete good cases."""
    row = ruler_row(4096, 0, "samsum", False) | {"cut": 0, "classes": [], "expected": ["a b"], "answer": "c"}
    row["key"] = json.dumps([4096, 0, {"classes": [], "cut": 0, "task": "samsum"}])
    write_cases(tmp_path, "longbench", "longbench", [row])
    assert len(gather(tmp_path, MODEL).lines) == 1
    scores._rouge.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge", None)
    assert "its scores need the package rouge" in gather(tmp_path, MODEL).left_out["longbench"]


def test_a_case_that_was_changed_is_refused(tmp_path):
    row = ruler_row(4096, 0, "vt", False) | {"score": 1.0}
    write_cases(tmp_path, "ruler", "ruler", [row])
    with pytest.raises(ValueError, match="is not a case"):
        gather(tmp_path, MODEL)


def test_the_command_writes_beside_the_evaluations(tmp_path, capsys):
    """A converted model: its table, as text and as numbers, and its figure; none without evaluations."""
    save_model(tmp_path / "theirs", "llama_2")
    run = tmp_path / "ours"
    assert main(["convert", "from-hf", str(tmp_path / "theirs"), str(run)]) == 0
    assert main(["eval", "report", str(run)]) == 2
    assert "has no evaluation of the checkpoint of" in capsys.readouterr().err
    write_all(run / "evals", checkpoint_hash(run / "checkpoints" / "0"))
    assert main(["eval", "report", str(run)]) == 0
    printed = capsys.readouterr().out
    folder = run / "evals" / "report"
    assert printed.strip() in (folder / "report.md").read_text()
    lines = json.loads((folder / "report.json").read_text())["lines"]
    assert len(lines) == 10 and lines[0].keys() >= {"evaluation", "value", "interval"}
    assert (folder / "report.png").stat().st_size > 10_000
    assert main(["eval", "report", str(run), f"--out={run}/evals/ruler"]) == 2
    assert "is the folder of an evaluation: choose another" in capsys.readouterr().err
    assert main(["eval", "report", str(tmp_path)]) == 2
    assert "is no folder of a run or of a model" in capsys.readouterr().err
    assert main(["eval", "report", str(tmp_path / "theirs")]) == 2
    assert "which is never written to: set --evals and --out" in capsys.readouterr().err
