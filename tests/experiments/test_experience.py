"""The script of in-context reinforcement learning: its chains, its cases, what it counts, and its end at toy size."""

import json
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from experiments import dark_room as room
from ringformer.data import load_tokenizer
from ringformer.evals.model_folder import identity

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def loaded(name):
    """A script as a module of another name: its imports stay its own."""
    spec = spec_from_file_location(f"{name}_script", ROOT / f"experiments/{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


experience, experience_results = loaded("experience"), loaded("experience_results")
case = room.case


class FollowsStars:
    """A model that goes where the stars are, and else up; a token is a character."""

    def __init__(self):
        self.generator, self.texts, self.appended = self, [], 0

    def encode(self, text):
        return [ord(character) for character in text]

    def session(self, rows):
        self.texts = [""] * rows
        return self

    def append(self, rows):
        self.appended += 1
        self.texts = [text + "".join(map(chr, row)) for text, row in zip(self.texts, rows, strict=True)]

    @property
    def logits(self):
        found = np.zeros((len(self.texts), 128))
        for row, text in zip(found, self.texts, strict=True):
            before, _, now = text.rpartition("\n")
            star = before.find("*")
            goal = None if star < 0 else room.Cell.parse(before[star - 2 : star])
            steps = now.replace("*", "")
            cell = room.Cell.parse(steps[-2:]) if steps else room.MIDDLE
            row[ord(room.expert(cell, goal) if goal else "u")] = 1
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twenty chains of each kind."""
    out = tmp_path_factory.mktemp("experience")
    experience.make(out, 1, 0.0)
    return out


def chains(folder):
    return [json.loads(line)["messages"] for line in (folder / "chains.jsonl").read_text().splitlines()]


def test_a_token_is_a_character(folder):
    """So that lengths of chains are those that the stages select by; the template ends an answer."""
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    text = "\nuc4ub4*\n"
    assert len(tokenizer.encode(text)) == len(text) and tokenizer.decode(tokenizer.encode(text)) == text
    lengths = {}
    for question, answer in chains(folder):
        whole = question["content"] + answer["content"]
        lengths.setdefault(whole.count("\n"), []).append(len(whole) + 1)
    assert sorted(lengths) == [4, 16, 32, 64, 128]
    bounds = {4: (0, 300), 16: (301, 1024), 64: (1025, 4096), 128: (1025, 4096)}
    assert all(low <= n <= high for kind, (low, high) in bounds.items() for n in lengths[kind])
    assert np.median(lengths[32]) < 1024


def test_a_seed_makes_the_same_chains_and_another_seed_others(folder, tmp_path):
    for seed, same in ((1, True), (2, False)):
        experience.make(tmp_path / str(seed), seed, 0.0)
        assert ((tmp_path / str(seed) / "chains.jsonl").read_bytes() == (folder / "chains.jsonl").read_bytes()) is same


def test_chains_are_made_once(folder, capsys):
    before = (folder / "chains.jsonl").stat()
    experience.make(folder, 1, 0.0)
    assert capsys.readouterr().out == f"{folder} has its chains\n" and (folder / "chains.jsonl").stat() == before
    for seed, share in ((2, 0.0), (1, 0.5)):
        with pytest.raises(ValueError, match="has chains of other settings"):
            experience.make(folder, seed, share)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan"), float("inf")])
def test_a_share_that_is_none_is_refused(share, tmp_path):
    with pytest.raises(ValueError, match=f"--share={share} must lie between 0 and 1"):
        experience.make(tmp_path / "out", 1, share)
    assert not (tmp_path / "out").exists()


def test_no_chain_has_a_star_on_a_goal_that_is_never_seen(folder):
    _, unseen = room.goals(1)
    for question, answer in chains(folder):
        _, goal = room.parse(question["content"] + answer["content"])
        assert goal not in unseen


def test_cases_of_an_index_begin_with_the_same_explorations():
    for index in range(20):
        short, long = case(1, 16, index), case(1, 32, index)
        assert short.explorations == long.explorations[:15] and short.goal == long.goal == short.starred
        assert short.goal in room.goals(1)[1]
    assert len({case(1, 16, i).goal for i in range(9)}) == 9


def test_controls_change_what_they_say_and_nothing_else():
    for index in range(30):
        plain, blank, other, shuffled = (case(2, 16, index, control) for control in room.CONTROLS)
        assert "*" not in blank.text and blank.text == plain.text.replace("*", "") and not blank.shown
        assert other.starred in room.goals(2)[1] and other.starred != plain.goal == other.goal
        assert other.text.replace("*", "") == blank.text
        assert sorted(shuffled.explorations) == sorted(plain.explorations) != shuffled.explorations
        assert shuffled.goal == plain.goal == shuffled.starred


def test_a_model_that_follows_stars_reaches_the_ceiling():
    """It reads each context once, and then one step after the other."""
    model, cases = FollowsStars(), [case(1, 16, i) for i in range(60)]
    rows = [experience.record(*pair) for pair in zip(cases, experience.play(model, cases), strict=True)]
    assert model.appended == 10
    shares = experience_results.shares(rows)
    shown = np.array([row["shown"] for row in rows])
    assert 0 < shown.sum() < 60 and (shares[shown] == 1).all() and shares[~shown].mean() < 0.1
    others = [case(1, 16, i, "other") for i in range(60)]
    rows = [experience.record(*pair) for pair in zip(others, experience.play(model, others), strict=True)]
    cells = [room.Cell.parse(row["starred"]) for row in rows]
    reached = [experience_results.reaches(row["actions"], cell) for row, cell in zip(rows, cells, strict=True)]
    assert all(there for there, row in zip(reached, rows, strict=True) if row["shown"])
    assert experience_results.shares(rows).mean() < 0.1, "the goal that counts is not the one that the context shows"


def test_the_world_gives_stars_at_the_goal_and_not_where_the_context_says():
    model, goal, starred = FollowsStars(), room.Cell(3, 6), room.Cell(3, 0)
    experience.play(model, [room.Case([room.walk("llllllllll")], goal, starred)])
    assert model.texts[0].rpartition("\n")[2] == "ld3ld2ld1sd1sd1sd1sd1sd1sd1"
    experience.play(model, [room.Case([room.walk("rrrrrrrrrr")], goal, goal)])
    assert model.texts[0].endswith("\nrd5rd6rd7*sd7*sd7*sd7*sd7*sd7*sd7*")


@pytest.fixture
def played(tmp_path):
    """A function that writes the episodes of a seed: at n = 1 nothing, at n = 16 half of the returns, at 32 all."""

    def write(seed, count=18):
        stage = tmp_path / f"seed-{seed}" / "run" / "stage-3-4096"
        stage.mkdir(parents=True)
        (stage / "config.json").write_text("{}")
        experience.make(tmp_path / f"seed-{seed}", seed, 0.0)
        episodes = {}
        for n, every in ((1, 0), (16, 2), (32, 1)):
            cases = [case(seed, n, i) for i in range(count)]
            experts = ["".join(action for action, _ in room.with_expert("", c.goal)) for c in cases]
            acts = [expert if every and i % every == 0 else "s" * 10 for i, expert in enumerate(experts)]
            episodes[n] = [experience.record(*pair) for pair in zip(cases, acts, strict=True)]
        made = {"seed": seed, "count": count, "control": "", "checkpoint": identity(stage)["checkpoint"]}
        path = tmp_path / f"seed-{seed}" / "episodes" / "run.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(made | {"episodes": episodes}))
        return path

    return write


def results(tmp_path):
    return subprocess.run(
        [
            *(sys.executable, "experiments/experience_results.py", tmp_path, "--measured_on=a test", "--command=c"),
            *(f"--results={tmp_path}/r.json", f"--figure={tmp_path}/f.png"),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_results_pool_the_seeds_and_compare_the_same_cases(played, tmp_path):
    for seed in (1, 2):
        played(seed)
    done = results(tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "r.json").read_text())
    one, half, whole = content["summary"]
    assert [(row["n"], row["episodes"], row["return"]) for row in (one, half, whole)] == [
        (1, 36, 0.0),
        (16, 36, 0.5),
        (32, 36, 1.0),
    ]
    assert one["interval"] == [0.0, pytest.approx(1.96**2 / (36 + 1.96**2), abs=1e-3)], "Wilson's, for none of 36"
    low, high = half["interval"]
    assert 0.3 < low < 0.4 and 0.6 < high < 0.7 and half["by_seed"] == {"1": 0.5, "2": 0.5}
    (paired,) = content["comparisons"]
    assert (paired["of"], paired["over"], paired["pairs"]) == ("run, n = 32", "run, n = 16", 36)
    assert paired["difference"] == 0.5 and paired["interval"][0] > 0.3
    assert half["interval_over_goals"] != half["interval"] and paired["interval_over_goals"][0] > 0
    assert content["command"] == "c" and content["chains"]["2"]["seed"] == 2
    assert content["ring_over_one_device"] == {}
    kept = content["episodes"]["seed 2"]["run, n = 16"]
    assert len(kept["shown"]) == len(kept["actions"].split()) == len(kept["goal"].split()) == 18
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    assert "run           n = 32   1.000" in done.stdout and "+0.500" in done.stdout


@pytest.mark.usual("<lambda>-has episodes of another seed or control than its name says0")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: made | {"checkpoint": "0"}, "has episodes of another checkpoint than its run: remove"),
        (lambda made: made | {"control": "blank"}, "has episodes of another seed or control than its name says"),
        (lambda made: made | {"seed": 2}, "has episodes of another seed or control than its name says"),
        (
            lambda made: made | {"episodes": {"16": made["episodes"]["16"][1:], "32": made["episodes"]["32"]}},
            "other goals",
        ),
        (lambda made: {}, "has episodes of another seed or control"),
        (lambda made: [], "run.json holds a JSON list, not an object; remove it"),
    ],
)
def test_results_of_other_or_changed_episodes_are_refused(change, message, played, tmp_path):
    path = played(1)
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    done = results(tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "r.json").exists()
    assert done.stderr.startswith("experiments/experience_results.py: ")
    assert re.search(message, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chain", "RUN", "CUT"], "episode 1 is not 10 steps such as ub4"),
        (["chain", "RUN", "UNKNOWN"], "episode 1 has the unknown character 'q'"),
        (["chain", "RUN", "none"], "No such file"),
        (["chain", "RUN", "EMPTY"], "EMPTY: it has no episode"),
        (["chain", "RUN", "BINARY"], "BINARY: 'utf-8' codec can't decode"),
        (["chain", "RUN", "MANY"], "the context takes 1,064 tokens; RUN was trained on 1,024"),
        (["chain", "CONVERTED", "WHOLE"], "CONVERTED is no stage of a run: its config.json has no seq_len"),
        (["chain", "LIST", "WHOLE"], "config.json holds a JSON list"),
        (["chain", ".", "WHOLE"], "[.] is no stage of a run: name one, e.g. runs/experience/seed-1/run/stage-3-4096"),
        (
            ["play", "RUN", "--count=9", "--out=o.json", "--episodes=16,200"],
            "the context takes 6,.* tokens",
        ),
        (["play", "LOST", "--count=9", "--out=o.json", "--episodes=4"], "chains of gone, which has no made.json with"),
        (
            ["compare", "RUN", "OTHER", "--out=o.json", "--episodes=4"],
            "RUN was trained on chains of seed 1, OTHER on .* 2",
        ),
        (["play", "RUN", "--count=0", "--out=o.json", "--episodes=4"], "0 is no number of cases"),
        (["play", "RUN", "--count=9", "--out=LIST/config.json", "--episodes=4"], "holds a JSON list"),
        (["compare", "RUN", "RUN", "--out=o.json", "--episodes=4"], "have the same checkpoint"),
        (["make", "new", "--seed=1", "--share=inf"], "--share=inf must lie between 0 and 1"),
        (["make", "chains", "--seed=2"], "chains has chains of other settings"),
        (
            ["play", "RUN", "--count=9", "--out=o.json", "--episodes=0"],
            "0 is no list of numbers of episodes",
        ),
        (["play", "RUN", "--count=9", "--out=none/o.json", "--episodes=1"], "there is no folder"),
        (["play", "none", "--count=9", "--out=o.json", "--episodes=1"], "none"),
    ],
)
def test_mistakes_of_a_person_are_one_line(words, message, tmp_path):
    whole = room.text(room.walk("uuuuuuuuuu"), None)
    texts = {"CUT": whole[:-2], "UNKNOWN": whole.replace("u", "q"), "MANY": "\n".join([whole] * 33)}
    texts |= {"WHOLE": whole, "EMPTY": "\n\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "BINARY").write_bytes(b"\xff\xfe\x00")
    run = {"seq_len": 1024, "data": {"source": "jsonl:chains/chains.jsonl"}}
    lost, other = ({**run, "data": {"source": f"jsonl:{folder}/chains.jsonl"}} for folder in ("gone", "others"))
    configs = {"RUN": run, "LOST": lost, "OTHER": other, "CONVERTED": {"model": {}}, "LIST": []}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    for seed, folder in enumerate(("chains", "others"), 1):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "made.json").write_text(json.dumps({"seed": seed}))
    done = subprocess.run(
        [sys.executable, ROOT / "experiments/experience.py", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.search(message, last), done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds=0"], "usage: bash experiments/experience.sh"),
        (["--count=many"], "--count=many is not a number"),
        (["--count=20"], "--count=20 is too small"),
        (["--results=none/r.json"], "none/r.json cannot be a file"),
        (["--figure=docs"], "docs cannot be a file"),
        (["--config=configs/none.py"], "there is no config configs/none.py"),
        (["one-folder"], "are two folders; give one"),
        (["--control"], "usage: bash experiments/experience.sh"),
    ],
)
def test_the_script_refuses_wrong_arguments_before_it_trains(words, message, tmp_path):
    done = subprocess.run(
        ["bash", "experiments/experience.sh", *words, str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and message in done.stderr and not (tmp_path / "out").exists()


TINY = """
import sys
sys.path.insert(0, {configs!r})
from in_context_rl import get_config as whole


def get_config():
    config = whole()
    config.optimizer.warmup_steps = 1
    config.data.held_out = 0.5
    config.stages = tuple({{**stage, "steps": 2, "batch_size": 2}} for stage in config.stages)
    return config
"""


def test_the_script_ends_with_the_results_and_the_figure(tmp_path):
    """With two steps a stage. The same command goes on, here with nothing left to do."""
    (tmp_path / "tiny.py").write_text(TINY.format(configs=str(ROOT / "configs")))
    environment = os.environ | {"RINGFORMER_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    out = tmp_path / "out"
    command = [
        "bash",
        "experiments/experience.sh",
        "--controls",
        "--count=27",
        "--share=0",
        f"--config={tmp_path}/tiny.py",
    ]
    first, again = (
        subprocess.run([*command, str(out)], cwd=ROOT, env=environment, capture_output=True, text=True) for _ in "12"
    )
    assert first.returncode == again.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    content = json.loads((out / "experience.json").read_text())
    assert {(row["model"], row["n"]): row["episodes"] for row in content["summary"]} == {
        (name, n): 27 if name == "run" else 9 for name, of_name in experience_results.PLAYED.items() for n in of_name
    }
    assert content["ring_over_one_device"]["1"]["relative_norm"] < 1e-5
    assert [stage["state"] for stage in content["stages"]["1"]] == ["finished"] * 3
    chain = tmp_path / "chain.txt"
    chain.write_text(case(1, 4, 0).text)
    (run,) = out.glob("seed-1/run/stage-3-*")
    done = subprocess.run(
        [sys.executable, "experiments/experience.py", "chain", str(run), str(chain)],
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "star: goal" in done.stdout, done.stderr
