"""The script of Figure 3: what it lists, what it calls trained and missing, and its end at toy size."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from ringformer.data import load_tokenizer
from ringformer.data.stores.options import StoreOptions
from ringformer.data.stores.prepare import open_or_build
from ringformer.evals import lines
from ringformer.evals.case_file import CaseFile
from ringformer.evals.model_folder import identity
from ringformer.evals.runner import Answering, answer_cases, row_checker
from tests.evals.models import Scripted, knows_lines

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


def loaded(name):
    spec = spec_from_file_location(f"{name}_script", ROOT / f"experiments/{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


figure3, retrieval = loaded("figure3"), loaded("retrieval")
K = 1024
NUMBERS = lines.Numbers(1, 99)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store of ten records of 8K tokens, four of them (0, 3, 6 and 9) as long as their context."""
    folder = tmp_path_factory.mktemp("store")
    retrieval.write_tokenizer(folder, retrieval.pieces())
    (folder / "records.jsonl").write_text("".join(json.dumps(retrieval.record(5, i, 99)) + "\n" for i in range(10)))
    options = StoreOptions(
        source=f"jsonl:{folder}/records.jsonl", format="messages", template="tokenizer", held_out=0.0
    )
    open_or_build(folder / "store", options, load_tokenizer(str(folder)))
    return folder / "store"


@pytest.fixture
def trained(tmp_path, store):
    """A function that makes the folder of a finished run whose stage 6 has read `read` records."""

    def make_run(name="seed-0", read=10):
        run_dir = tmp_path / name / "run" / "stage-6-8192"
        run_dir.mkdir(parents=True)
        shutil.copytree(store, tmp_path / name / "store")
        (run_dir / "config.json").write_text(json.dumps({"data": {"min_length": 4097, "max_length": 8192}}))
        rows = [{"step": i, "loss": 1.0, "tokens_per_second": 4096.0} for i in range(1, read + 1)]
        rows.append({"step": read, "eval_loss": 1.0})
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        stage = {"stage": 6, "run_dir": run_dir.name, "state": "finished", "steps": read, "seq_len": 8 * K}
        stage |= {"rope_theta": 1e9, "tokens": read * 8 * K}
        others = {"stage": 7, "run_dir": "stage-7-16384", "state": "at step 3", "steps": 60, "seq_len": 16 * K}
        (tmp_path / name / "run" / "stages.json").write_text(json.dumps([stage, others]))
        return run_dir

    return make_run


class SixBytes(Scripted):
    """A model whose tokens are six bytes, about as many as this task's."""

    def encode(self, prompt, **options):
        return super().encode(prompt, **options)[::6]


def evaluate(run_dir, name, length, documents, questions=1, within=10**9, seed=7):
    """Answer cases by search in the last `within` characters of their text."""
    settings = {"form": "numbers 1 to 99", "seed": seed, "checkpoint": identity(run_dir)["checkpoint"]}
    path = run_dir / "evals" / name / "cases.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = CaseFile(path, "lines", settings, row_checker(lines.score))
    answering = Answering(SixBytes(lambda prompt: knows_lines(prompt, within)), 10**6, 1, chat=False)
    cases = lines.cases_of_length(length, documents, seed, NUMBERS, answering.tokens, questions)
    answer_cases([list(cases)], answering, lines.score, file, str)
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def test_a_run_lists_its_stages_and_what_was_measured(trained, tmp_path):
    run_dir = trained()
    few = evaluate(run_dir, "figure3", K, 200)
    many = evaluate(run_dir, "figure3_documents", 16 * K, 10, questions=20, within=50_000)
    (run,), missing = figure3.collect(tmp_path)
    assert (run["name"], run["seed"], run["ring"]) == ("seed-0", 0, 8)
    (stage,) = run["stages"]
    assert (stage["seconds"], stage["tokens"], stage["rope_theta"]) == (20.0, 81_920, 1e9)
    assert stage["longest_record"] == 1 + 8 * (1011 + 12)
    (curve,) = run["curves"]
    assert (curve["trained"], curve["cases_seed"]) == (8 * K, 7)
    for found, rows, documents in zip(curve["accuracy"], (few, many), (200, 10), strict=True):
        right = [re.findall(r"\d+", row["answer"])[-1:] == row["expected"] for row in rows]
        assert (found["documents"], found["cases"]) == (documents, 200)
        assert found["lines"] == max(row["num_lines"] for row in rows)
        assert found["accuracy"] == pytest.approx(sum(right) / 200, abs=1e-4)
        assert found["interval"][0] <= found["accuracy"] <= found["interval"][1]
    far, near = curve["accuracy"]
    assert far["accuracy"] == 1 and far["interval"] == [pytest.approx(0.9812, abs=1e-4), 1.0]
    assert 0.3 < near["accuracy"] < 0.7
    assert "seed-0: training at 16K" in missing and "seed-1: training at 8K" in missing
    evaluated = [f"seed-0: the model trained at 8K, evaluated at {n}K" for n in (1, 2, 4, 8, 16, 32, 64)]
    assert [text in missing for text in evaluated] == [False, True, True, True, False, True, False]


def test_the_control_is_a_second_run_with_the_records_of_seed_0(trained, tmp_path):
    shutil.copytree(trained().parent, tmp_path / "seed-0" / "control")
    (first, control), missing = figure3.collect(tmp_path)
    assert [(run["name"], run["seed"], run["ring"]) for run in (first, control)] == [
        ("seed-0", 0, 8),
        ("control", 0, 1),
    ]
    assert control["stages"] == first["stages"] != []
    assert "control: training at 4K" in missing and "control: training at 16K" not in missing


def test_depths_are_fifths_of_the_record(trained, tmp_path):
    rows = evaluate(trained(), "figure3_documents", 16 * K, 10, questions=20, within=50_000)
    bins = figure3.depth_bins(rows)
    assert [part["from"] for part in bins] == [0, 0.2, 0.4, 0.6, 0.8] and sum(part["cases"] for part in bins) == 200
    assert bins[0]["accuracy"] == 0 and bins[-1]["accuracy"] == 1
    last = [row["score"] for row in rows if row["position"] >= 0.8 * row["num_lines"]]
    assert (bins[-1]["cases"], bins[-1]["accuracy"]) == (len(last), sum(last) / len(last))


def test_a_length_is_called_trained_only_if_records_certainly_reached_it(trained, tmp_path):
    """Of ten records, four are the longest: seven read contain one of them, six perhaps not."""
    for name, read in (("seed-0", 7), ("seed-1", 6)):
        trained(name, read)
    first, second = figure3.collect(tmp_path)[0]
    assert first["stages"][0]["longest_record"] == 8185 > second["stages"][0]["longest_record"]
    path = tmp_path / "seed-1" / "run" / "stage-6-8192"
    rows = evaluate(path, "figure3", 8 * K, 1)
    cases = path / "evals" / "figure3" / "cases.jsonl"
    row = rows[0] | {"prompt_tokens": 8087}
    cases.write_text(cases.read_text().splitlines()[0] + "\n" + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"seed-1: stage 6 is certain to have trained on .* raise its steps"):
        figure3.collect(tmp_path)


def test_cases_of_another_checkpoint_are_refused(trained, tmp_path):
    run_dir = trained()
    evaluate(run_dir, "figure3", K, 2)
    path = run_dir / "evals" / "figure3" / "cases.jsonl"
    path.write_text(path.read_text().replace('"checkpoint": "', '"checkpoint": "f', 1))
    with pytest.raises(ValueError, match=r"cases of another checkpoint than .*: remove"):
        figure3.collect(tmp_path)


def test_the_family_is_evaluated_to_four_times_its_context_and_at_most_64k():
    family = figure3.RUNS["seed-0"]
    assert figure3.wanted(family, K) == [K, 2 * K, 4 * K]
    assert figure3.wanted(family, 8 * K)[-1] == 32 * K and figure3.wanted(family, 32 * K)[-1] == 64 * K
    assert all(figure3.wanted(run, 8 * K) == [8 * K] for name, run in figure3.RUNS.items() if name != "seed-0")
    assert [(run.seed, run.devices) for run in figure3.RUNS.values()] == [(0, 8), (1, 8), (2, 8), (0, 1)]


def test_seconds_of_interrupted_evaluations_are_added(tmp_path):
    (tmp_path / "evaluation_seconds.txt").write_text("seed-0 stage-4-1024 12\nseed-1 stage-4-1024 3\n" * 2)
    assert figure3.evaluation_seconds(tmp_path) == {"seed-0 stage-4-1024": 24, "seed-1 stage-4-1024": 6}


def test_a_folder_without_runs_is_one_line(tmp_path):
    words = [str(tmp_path), f"--results={tmp_path}/r.json", f"--figure={tmp_path}/f.png", "--measured_on=x"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "experiments/figure3.py", *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (
        done.returncode == 2 and done.stderr.count("\n") == 1 and "run bash experiments/figure3.sh first" in done.stderr
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--cases=many", "--cases=many is not a number"),
        ("--cases=30", "--cases=30 is not a multiple of 20"),
        ("--results=nowhere/r.json", "there is no folder nowhere for nowhere/r.json"),
        ("--figure=nowhere/f.png", "there is no folder nowhere for nowhere/f.png"),
        ("--lats=8", "usage: bash experiments/figure3.sh"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_trained(argument, message, tmp_path):
    command = ["bash", "experiments/figure3.sh", argument, str(tmp_path / "out")]
    environment = os.environ | {"RINGFORMER_PYTHON": sys.executable}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr
    assert not (tmp_path / "out").exists()


TINY = """
import sys
sys.path.insert(0, {configs!r})
from retrieval import get_config as whole


def get_config():
    config = whole()
    config.optimizer.warmup_steps = 1
    config.data.held_out = 0.4
    steps = (2, 2, 2, 40, 30, 2, 2, 2)
    config.stages = tuple({{**stage, "steps": n}} for stage, n in zip(config.stages, steps))
    return config
"""


def test_the_script_ends_with_results_and_a_figure(tmp_path):
    """With few steps a stage: it finds nothing, and says what is missing. The same command goes on."""
    config = tmp_path / "tiny.py"
    config.write_text(TINY.format(configs=str(ROOT / "configs")))
    environment = os.environ | {"RINGFORMER_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    out, results, figure = tmp_path / "out", tmp_path / "r.json", tmp_path / "f.png"
    command = ["bash", "experiments/figure3.sh", "--last=4", "--share=0", "--cases=20", f"--config={config}"]
    command += [f"--results={results}", f"--figure={figure}", str(out)]
    first, again = (subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True) for _ in "12")
    assert first.returncode == again.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    content = json.loads(results.read_text())
    assert [run["name"] for run in content["runs"]] == list(figure3.RUNS) and content["missing"]
    for run in content["runs"]:
        assert [stage["stage"] for stage in run["stages"]] == [1, 2, 3, 4]
        (curve,) = run["curves"]
        contexts = [row["context"] for row in curve["accuracy"]]
        assert contexts == ([K, 2 * K, 4 * K] if run["name"] == "seed-0" else [K])
        assert {row["cases"] for row in curve["accuracy"]} == {20} and curve["cases_seed"] == 7927
    assert figure.read_bytes().startswith(b"\x89PNG") and again.stderr.count(" 0 of them new") == 7
