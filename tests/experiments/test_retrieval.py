"""The demonstration of line retrieval: its records against the official format, its tokens, its script end to end."""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

from ringformer.data import TokenStore, load_tokenizer
from ringformer.data.stores.options import StoreOptions
from ringformer.data.stores.prepare import open_or_build
from ringformer.evals import lines
from ringformer.evals.case_file import CaseFile
from ringformer.evals.model_folder import identity
from ringformer.evals.runner import Answering, answer_cases, row_checker
from ringformer.runs.config_file import load_config, parse_stages
from tests.evals.models import Scripted, knows_lines

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
spec = spec_from_file_location("retrieval_script", ROOT / "experiments/retrieval.py")
retrieval = module_from_spec(spec)
spec.loader.exec_module(retrieval)

LINE = re.compile(r"^line ([a-z]+)-([a-z]+): REGISTER_CONTENT is <(\d+)>$", re.MULTILINE)
ASKED = re.compile(r"<REGISTER_CONTENT> in line ([a-z]+)-([a-z]+)\? I need the number\. $")
DRILLED = re.compile(r"line ([a-z]+)-([a-z]+): REGISTER_CONTENT is <(\d+)(>?\n?)$")
KINDS = range(len(retrieval.KINDS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of the script with a hundred records of each kind."""
    out = tmp_path_factory.mktemp("retrieval") / "out"
    retrieval.make(out, 0.0, 99)
    return out


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(str(folder / "tokenizer"))


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_the_number_of_the_line_that_is_asked_for(kind):
    """Or, of a drill, the noun that was just said, or the number."""
    fewest, most = retrieval.KINDS[kind].lines
    drills = 0
    for number in range(20 if most < 20 else 3):
        messages = retrieval.record(kind, number, 50_000)["messages"]
        assert messages[0]["content"].startswith(lines.HEADER)
        record = messages[0]["content"].split("\nNow the record is over.")[0]
        found = {line[:2]: line[2] for line in LINE.findall(record)}
        questions, context = len(messages) // 2, retrieval.KINDS[kind].context
        tokens = 1 + 8 * (len(found) + questions)
        one_more_fits = context is None or tokens + 8 <= context
        assert questions == retrieval.KINDS[kind].questions if one_more_fits else questions >= 12 and tokens <= context
        if retrieval.KINDS[kind].drills == 0:
            assert fewest <= len(found) <= most
        for question, answer in zip(messages[::2], messages[1::2], strict=True):
            assert (question["role"], answer["role"]) == ("user", "assistant")
            asked, line = ASKED.search(question["content"]), DRILLED.search(question["content"])
            noun, own = (asked or line)[2], line and line[3]
            if answer["content"].isdigit():
                assert answer["content"] == (own if line else found[asked.groups()])
                assert not line or question["content"].endswith((">", ">\n"))
            else:
                drills += 1
                assert answer["content"] == noun
    assert (drills > 0) == (retrieval.KINDS[kind].drills > 0)


def test_a_drill_has_each_answer_as_often():
    """At a line's number the noun and the number: the one would drown the other."""
    answers = [
        (DRILLED.search(question["content"]), answer["content"].isdigit())
        for i in range(200)
        for messages in [retrieval.record(0, i, 99)["messages"]]
        for question, answer in zip(messages[::2], messages[1::2], strict=True)
    ]
    assert 0.45 < np.mean([line is not None for line, _ in answers]) < 0.55
    assert not any(number for line, number in answers if line is None or line[4] == "")
    assert 0.4 < np.mean([number for line, number in answers if line and line[4]]) < 0.6


def test_lines_share_their_words_where_adjectives_are_to_be_learned():
    (kind,) = [i for i in KINDS if retrieval.KINDS[i].lines_per_word]
    for number in range(20):
        found = LINE.findall(retrieval.record(kind, number, 99)["messages"][0]["content"])
        for place in (0, 1):
            assert len({line[place] for line in found}) <= len(found) / 3 + 1


def test_nouns_follow_zipf_s_law_where_the_match_is_to_be_found():
    """The n-th as often as 1/n, nearly, and none twice in a record; all of them are there. Adjectives follow no law."""
    kinds = [i for i in KINDS if retrieval.KINDS[i].zipf]
    assert kinds == [0, 1]
    records = [retrieval.record(1, i, 99)["messages"][0]["content"] for i in range(4000)]
    found = [LINE.findall(record)[:4] for record in records]  # the fifth would be of a drill
    assert all(len({noun for _, noun, _ in lines}) == 4 for lines in found)
    counts = Counter(noun for lines in found for _, noun, _ in lines)
    by_rank = np.array([counts[noun] for noun in retrieval.NOUNS])
    whole = 16_000 / np.log(len(by_rank) + 1)  # of the first it would be, were a noun drawn twice in a record
    for first, last in ((4, 16), (16, 64), (64, 256), (256, len(by_rank))):
        expected = whole * np.log((last + 1) / (first + 1))
        assert by_rank[first:last].sum() == pytest.approx(expected, rel=0.15)
    assert (by_rank > 0).mean() > 0.97
    adjectives = Counter(adjective for lines in found for adjective, _, _ in lines)
    assert max(adjectives.values()) < 80 < 16_000 / len(retrieval.ADJECTIVES) * 3


def test_questions_repeat():
    """Or the last of them could be answered by elimination."""
    for number in range(5):
        messages = retrieval.record(2, number, 99)["messages"]
        assert len({message["content"][-60:] for message in messages[::2]}) < len(messages) / 2


def test_no_record_is_one_of_an_evaluation():
    """Whatever its whole-numbered seed: the first lines are others."""
    trained = {
        LINE.search(retrieval.record(kind, i, 99)["messages"][0]["content"])[0]
        for kind in KINDS
        if retrieval.KINDS[kind].drills < 1
        for i in range(20)
    }
    cases = [
        lines.Record(lines.Numbers(1, 99), seed, length, i)
        for seed in range(4)
        for length in (1024, 4096, 8192)
        for i in range(20)
    ]
    assert not trained & {LINE.search(case.prompt(5))[0] for case in cases}


def test_a_line_has_eight_tokens_and_a_number_of_two_digits_one(tokenizer):
    prompts = [lines.Record(lines.Numbers(1, 99), 0, 1024, 7).prompt(count) for count in (10, 110)]
    few, many = map(tokenizer.encode, prompts)
    assert len(many) - len(few) == 100 * 8 and len(few) == 1 + 10 * 8 + 6
    assert [tokenizer.decode(ids) for ids in (few, many)] == prompts
    assert [len(tokenizer.encode(str(number))) for number in (7, 42, 12345)] == [1, 1, 3]
    words = [*retrieval.ADJECTIVES, *retrieval.NOUNS]
    assert {len(tokenizer.encode(word)) for word in words} == {1}


def test_other_text_is_bytes_and_lossless(tokenizer):
    for text in ("Hyvää päivää, \u2028 line-dance </s> 1234", "\x00\n\n", "seal-sea"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_evaluation_s_prompt_is_what_training_saw(folder, tokenizer, tmp_path):
    """Token by token, for the lines of a case that were written as a conversation; answers alone are trained on."""
    (case,) = lines.Record(lines.Numbers(1, 99), 5, 1024, 0).cases(None, 0, 20)
    turns = [{"role": "user", "content": case.prompt}, {"role": "assistant", "content": case.expected[0]}]
    (tmp_path / "one.jsonl").write_text(json.dumps({"messages": turns}))
    options = StoreOptions(source=f"jsonl:{tmp_path}/one.jsonl", format="messages", template="tokenizer", held_out=0.0)
    store, _ = open_or_build(tmp_path / "store", options, tokenizer)
    prompt, answer = tokenizer.encode(case.prompt), tokenizer.encode(case.expected[0])
    assert store.tokens[:].tolist() == [*prompt, *answer, tokenizer.eos_id]
    assert store.mask[:].tolist() == [0] * len(prompt) + [1, 1]


@pytest.mark.usual("50000")
@pytest.mark.parametrize("largest", [99, 50_000])
def test_each_stage_has_its_records(largest, folder, tokenizer, tmp_path):
    """The lengths that a stage takes are those of one kind, all of it, and the model has all the tokens; of five digits
    the longest are of the next stage, from where a stage is as long as its context."""
    configs = parse_stages(load_config(ROOT / "configs/retrieval.py", []), inherit=False)
    assert len(configs) == len(KINDS) and configs[0].model.vocab_size >= tokenizer.vocab_size
    for kind, config in enumerate(configs):
        path = tmp_path / f"kind-{kind}.jsonl"
        path.write_text("".join(json.dumps(retrieval.record(kind, i, largest)) + "\n" for i in range(20)))
        options = StoreOptions(source=f"jsonl:{path}", format="messages", template="tokenizer", held_out=0.0)
        lengths = np.diff(open_or_build(tmp_path / f"store-{kind}", options, tokenizer)[0].offsets)
        assert config.data.max_length <= config.seq_len
        assert lengths.min() >= config.data.min_length > (configs[kind - 1].data.max_length if kind else -1)
        fits = lengths <= config.data.max_length
        assert fits.all() if largest == 99 or kind < 3 else fits.mean() > 0.25


CONTEXTS = (1024, 4096, 8192, 16_384, 32_768)
"""Contexts that the model is trained at."""


def test_the_stages_grow_the_context_and_the_base_of_the_rope():
    configs = parse_stages(load_config(ROOT / "configs/retrieval.py", []), inherit=False)
    assert tuple(config.seq_len for config in configs[3:]) == CONTEXTS
    assert {config.seq_len for config in configs[:4]} == {1024}
    thetas = [config.model.rope_theta for config in configs]
    assert thetas == sorted(thetas) and len(set(thetas[3:])) == len(CONTEXTS)
    assert [config.mesh_dim for config in configs[4:]] == ["1,1,1,-1"] * 4, "all devices are the ring"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if retrieval.KINDS[kind].context])
def test_the_longest_record_is_longer_than_a_case_of_the_context(kind, tokenizer):
    """So that what is called trained at a context was trained at all positions of a case, and every third record is so
    long."""
    context = retrieval.KINDS[kind].context
    assert context == CONTEXTS[kind - 3]
    (case,) = lines.cases_of_length(context, 1, 7, lines.Numbers(1, 99), lambda text: len(tokenizer.encode(text)))
    longest = []
    for number in range(6):
        messages = retrieval.record(kind, number, 99)["messages"]
        found = messages[0]["content"].count("\nline ")
        tokens = sum(len(tokenizer.encode(m["content"])) + (m["role"] == "assistant") for m in messages)
        assert tokens <= context
        if found > case.labels["num_lines"]:
            longest.append(number)
            assert len(tokenizer.encode(case.prompt)) < tokens
    assert {0, 3} <= set(longest)


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_draws_other_records(kind):
    drawn = [str(retrieval.record(kind, 1, 99, seed)["messages"]) for seed in (0, 0, 1, 2)]
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3


def test_records_are_made_once(folder, capsys):
    before = (folder / "records.jsonl").stat()
    retrieval.make(folder, 0.0, 99)
    assert capsys.readouterr().out == f"{folder} has them\n" and (folder / "records.jsonl").stat() == before
    for largest, seed in ((50_000, 0), (99, 1)):
        with pytest.raises(ValueError, match="holds other records: name another folder"):
            retrieval.make(folder, 0.0, largest, seed)


@pytest.mark.parametrize(
    ("largest", "share", "said"),
    [
        (0, 1.0, "--largest=0 must lie between 1 and LongEval's 50,000"),
        (50_001, 1.0, "--largest=50001 must"),
        (99, math.nan, "--share=nan must lie between 0"),
        (99, math.inf, "--share=inf"),
        (99, -1.0, "--share=-1.0"),
    ],
)
def test_records_that_cannot_be_are_refused(largest, share, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        retrieval.make(tmp_path / "out", share, largest)
    assert not (tmp_path / "out").exists()


def script(*words):
    done = subprocess.run(
        [sys.executable, "experiments/retrieval.py", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return done.returncode, done.stderr


def test_mistakes_of_a_person_are_one_line(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "made.json").write_text('{"largest": 9')
    for words, said in (
        (["make", tmp_path / "file"], "Not a directory"),
        (["make", tmp_path / "damaged"], f"made.json is damaged: remove {tmp_path}/damaged, or name another folder"),
        (["report", tmp_path / "r.json", tmp_path, "--measured_on=x"], "No such file or directory"),
        (["report", tmp_path / "r.json", tmp_path, "--measured_on=x", "--add"], "r.json"),
    ):
        code, err = script(*words)
        assert code == 2 and err.count("\n") == 1 and err.startswith("experiments/retrieval.py: ") and said in err, err
    code, err = script("report", tmp_path / "none" / "r.json", tmp_path, "--measured_on=x")
    assert code == 2 and "there is no folder" in err


@pytest.fixture
def finished(tmp_path):
    """A function that makes the folder of a finished run, of a seed, with three cases at each of two contexts."""

    def make_run(seed=0, name="run-of-seed-0"):
        out = tmp_path / name
        stage = out / "run" / "stage-1-1024"
        (stage / "evals" / "lines").mkdir(parents=True)
        (stage / "config.json").write_text(json.dumps({"seed": seed}))
        metrics = [{"step": i, "loss": 1 / i} for i in range(1, 31)]
        (stage / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
        stages = [{"stage": 1, "run_dir": stage.name, "state": "finished", "steps": 30, "seq_len": 1024}]
        stages.append({"stage": 2, "run_dir": "stage-2-4096", "state": "not begun", "steps": 30, "seq_len": 4096})
        (out / "run" / "stages.json").write_text(json.dumps(stages))
        settings = {"form": "of the test", "seed": seed, "checkpoint": identity(stage)["checkpoint"]}
        file = CaseFile(stage / "evals" / "lines" / "cases.jsonl", "lines", settings, row_checker(lines.score))
        model = Scripted(lambda prompt: knows_lines(prompt, 1900))
        cases = [list(lines.cases_of_length(n, 3, seed, lines.Numbers(), lambda p: len(p))) for n in (1024, 4096)]
        answer_cases(cases, Answering(model, 4096, 1, chat=False), lines.score, file, str)
        return out

    return make_run


def test_a_report_says_what_the_cases_say(finished, tmp_path):
    folders = [finished(), finished(1, "run-of-seed-1")]
    retrieval.report(tmp_path / "r.json", folders[:1], "a test", ["the command"], "lines", add=False)
    retrieval.report(tmp_path / "r.json", folders[1:], "a test", ["another"], "lines", add=True)
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["measured_on"] == "a test" and content["commands"] == ["the command", "another"]
    assert [(run["seed"], run["form"]) for run in content["runs"]] == [(0, "of the test"), (1, "of the test")]
    for run, folder in zip(content["runs"], folders, strict=True):
        rows = (folder / "run/stage-1-1024/evals/lines/cases.jsonl").read_text().splitlines()[1:]
        right = {1024: [], 4096: []}
        for row in map(json.loads, rows):
            right[row["length"]].append(re.findall(r"\d+", row["answer"])[-1:] == row["expected"])
        assert [(row["context"], row["accuracy"], row["cases"]) for row in run["accuracy"]] == [
            (context, sum(found) / 3, 3) for context, found in right.items()
        ]
        assert all(
            row["interval"] == [pytest.approx(end, abs=1e-4) for end in INTERVALS[round(3 * row["accuracy"])]]
            for row in run["accuracy"]
        )
        published = [json.loads(line) for line in (tmp_path / "r_cases.jsonl").read_text().splitlines()]
        mine = [row for row in published if row["seed"] == run["seed"]]
        assert [
            row | {"seed": run["seed"], "cases_seed": run["seed"], "form": "of the test"}
            for row in map(json.loads, rows)
        ] == mine
        (stage,) = run["stages"]
        assert stage["losses"] == [
            round(sum(1 / i for i in range(1, 21)) / 20, 4),
            round(sum(1 / i for i in range(21, 31)) / 10, 4),
        ]


INTERVALS = {0: (0, 0.5615), 1: (0.0615, 0.7923), 2: (0.2077, 0.9385), 3: (0.4385, 1)}
"""Wilson's, by how many of three are right: of none z²/(3 + z²) at most."""
CASES, METRICS, STAGES = "stage-1-1024/evals/lines/cases.jsonl", "stage-1-1024/metrics.jsonl", "stages.json"


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (CASES, lambda rows: rows[:-1], r"not as many cases of each context \(3 of 1,024, 2 of 4,096\)"),
        (CASES, lambda rows: rows[:1], "holds no cases"),
        (CASES, lambda rows: [*rows, rows[-1]], r"cases.jsonl:8 repeats an earlier case"),
        (CASES, lambda rows: [*rows[:-1], re.sub(r'"score": \S+}', '"score": 0.5}', rows[-1])], "is not a case"),
        (
            CASES,
            lambda rows: [rows[0].replace('"checkpoint": "', '"checkpoint": "f'), *rows[1:]],
            "of another checkpoint",
        ),
        (
            CASES,
            lambda rows: [rows[0].replace('"form"', '"from"'), *rows[1:]],
            "a file of the run is damaged: KeyError",
        ),
        (STAGES, lambda rows: [rows[0].replace("finished", "running")], "stage 1 is not finished"),
        (STAGES, lambda rows: [rows[0][:-9]], "a file of the run is damaged: JSONDecodeError"),
        (STAGES, lambda rows: ["[]"], "a file of the run is damaged: IndexError"),
        (METRICS, lambda rows: [], "metrics.jsonl has no losses"),
    ],
)
def test_a_report_of_what_was_changed_or_cut_is_refused(name, change, said, finished, tmp_path):
    path = finished() / "run" / name
    rows = path.read_text().splitlines()
    path.write_text("".join(f"{row}\n" for row in change(rows)))
    assert path.read_text().splitlines() != rows
    with pytest.raises(ValueError, match=said):
        retrieval.report(tmp_path / "r.json", [tmp_path / "run-of-seed-0"], "a test", [], "lines", add=False)
    assert not (tmp_path / "r.json").exists()


def test_a_run_counts_once(finished, tmp_path):
    folder = finished()
    with pytest.raises(ValueError, match="there is a run of of the test, seed 0, before it"):
        retrieval.report(tmp_path / "r.json", [folder, folder], "a test", [], "lines", add=False)


TINY = """
import sys
sys.path.insert(0, {configs!r})
from retrieval import get_config as whole


def get_config():
    config = whole()
    config.optimizer.warmup_steps = 1
    config.data.held_out = 0.4
    config.stages = tuple({{**stage, "steps": 2}} for stage in config.stages)
    return config
"""


def test_the_script_ends_with_the_table_and_the_figure(tmp_path):
    """With two steps a stage: it finds nothing, and says so. The same command goes on, here with nothing left to do."""
    config = tmp_path / "tiny.py"
    config.write_text(TINY.format(configs=str(ROOT / "configs")))
    environment = os.environ | {"RINGFORMER_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    out = tmp_path / "out"
    command = ["bash", "experiments/retrieval.sh", "--short", "--share=0", f"--config={config}", str(out)]
    first, again = (subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True) for _ in "12")
    assert first.returncode == again.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    evals = out / "run" / "stage-6-8192" / "evals" / "lines"
    table = (evals / "table.txt").read_text()
    assert "numbers 1 to 99, not LongEval's" in table and first.stdout.endswith(table) and again.stdout.endswith(table)
    assert (evals / "lines.png").read_bytes().startswith(b"\x89PNG")
    stages = json.loads((out / "run" / "stages.json").read_text())
    assert [s["state"] for s in stages] == ["finished"] * 6 + ["not begun"] * 2
    assert stages[5]["mesh_dim"] == "1,1,1,-1"
    retrieval.report(tmp_path / "results.json", [out], "a test", ["the command"], "lines", add=False)
    (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [len(stage["losses"]) for stage in run["stages"]] == [1] * 6
    assert [row["context"] for row in run["accuracy"]] == [1024, 4096, 8192]
    rows = [json.loads(line) for line in (evals / "cases.jsonl").read_text().splitlines()[1:]]
    assert run["accuracy"][0]["accuracy"] == np.mean([row["score"] for row in rows if row["length"] == 1024])
    assert TokenStore(out / "store" / "train").mask is not None
