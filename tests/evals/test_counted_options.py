"""A resumed evaluation adds no case under other settings: every option is known to count, or not to."""

import dataclasses
import json

import pytest

from ringformer.cli import main
from ringformer.cli.parser import Parser
from ringformer.evals import commands
from ringformer.evals.evaluation_setup import Opened
from tests.evals.models import Scripted
from tests.train.runs import MODEL

VERBS = ("lines", "needle", "ruler", "nolima", "mrcr", "longbench", "helmet", "perplexity", "sliding", "longppl")
COUNTED = {
    "of all": {"compute_dtype", "cache_dtype", "rope_theta", "rope_scaling"},
    "of prompts": {"chat", "seed"},
    "lines": {"cases", "max_value", "min_value", "questions"},
    "needle": {"asked", "haystack", "needles"},
    "nolima": {"direct", "haystack"},
    "ruler": {"essays", "hotpotqa", "squad", "words"},
    "mrcr": {"needles", "text"},
    "longbench": {"data"},
    "helmet": {"data"},
    "perplexity": {"documents", "last", "store"},
    "sliding": {"documents", "store", "stride", "tokens"},
    "longppl": {"alpha", "beta", "documents", "evaluator", "short", "store", "stride"},
}
"""Options, of which the first line of the cases has the value, or the hash of what it names."""
OF_CASES = {"lengths", "num_cases", "num_lines", "depths", "tasks"}
"""Options that name cases: each case has a row of its own, which says what it is."""
OF_COMPUTATION = {"batch_size", "mesh_dim", "cpu_devices", "prefill_chunk", "kernel", "kernel_check"}
OF_COMPUTATION |= {"q_chunk", "k_chunk"}
"""Options that decide how an outcome is computed."""
OF_THE_MODEL = {"run", "config", "tokenizer", "allow", "allow_longer", "template", "template_option", "out"}
"""Options whose consequence counts: the hash of the weights, the tokenizer's name, the template's hash."""


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_known_to_count_or_not(verb):
    """A new option must be listed."""
    parser = Parser()
    getattr(commands, f"add_{verb}")(parser)
    options = {action.dest.partition(".")[0] for action in parser._actions} - {"help"}
    counted = COUNTED["of all"] | COUNTED["of prompts"] | COUNTED[verb]
    listed = [counted, OF_CASES, OF_COMPUTATION, OF_THE_MODEL]
    assert options <= set().union(*listed)
    assert COUNTED[verb] <= options
    assert len(set().union(*listed)) == sum(map(len, listed)), "an option is listed twice"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run in bytes, whose answers are those of a script."""
    folder = tmp_path / "run"
    folder.mkdir()
    saved = {"model": dataclasses.asdict(MODEL), "preset": "tiny", "seq_len": 4096, "data": {"tokenizer": "bytes"}}
    (folder / "config.json").write_text(json.dumps(saved))
    monkeypatch.setattr(Opened, "load", lambda _self, _length: Scripted(lambda _: "no idea"))
    return folder


BASE = {
    "lines": ["--lengths=1K", "--num_cases=2"],
    "needle": ["--lengths=2K", "--depths=0,50", "--num_cases=1", "--haystack=HAYSTACK"],
    "nolima": ["--lengths=2K", "--depths=50", "--num_cases=1", "--haystack=HAYSTACK"],
    "mrcr": ["--lengths=8K", "--num_cases=1", "--allow_longer"],
}
CHANGES = [
    ("lines", "compute_dtype", ["--compute_dtype=bfloat16"]),
    ("lines", "cache_dtype", ["--cache_dtype=int8"]),
    ("lines", "rope_theta", ["--rope_theta=5e5"]),
    ("lines", "rope_scaling", ["--rope_scaling.kind=linear", "--rope_scaling.factor=2"]),
    ("lines", "seed", ["--seed=1"]),
    ("lines", "form", ["--max_value=99"]),
    ("lines", "questions", ["--questions=2"]),
    ("needle", "needles", ["--needles=2"]),
    ("needle", "asked", ["--needles=2", "--asked=2"]),
    ("needle", "haystack", ["--haystack=OTHER"]),
    ("nolima", "direct", ["--direct"]),
    ("mrcr", "needles", ["--needles=4"]),
]


def evaluate(run, verb, words, folder):
    texts = {"HAYSTACK": "The sea is wide. " * 400, "OTHER": "The land is narrow. " * 400}
    options = []
    for word in words:
        for name, text in texts.items():
            (folder / name).write_text(text)
            word = word.replace(f"={name}", f"={folder / name}")
        options.append(word)
    return main(["eval", verb, f"--run={run}", f"--out={folder / 'out'}", *options])


@pytest.mark.parametrize(("verb", "setting", "change"), CHANGES, ids=[f"{verb} {name}" for verb, name, _ in CHANGES])
def test_cases_with_other_settings_are_refused(run, tmp_path, capsys, verb, setting, change):
    assert evaluate(run, verb, BASE[verb], tmp_path) == 0
    cases = tmp_path / "out" / "cases.jsonl"
    before = cases.read_bytes()
    changed = {word.partition("=")[0] for word in change}
    kept = [word for word in BASE[verb] if word.partition("=")[0] not in changed]
    capsys.readouterr()
    assert evaluate(run, verb, [*kept, *change], tmp_path) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "holds cases with other settings: " in error and f"{setting}" in error
    assert cases.read_bytes() == before


@pytest.mark.parametrize("change", ["--batch_size=2", "--num_cases=3", "--lengths=1K,2K"])
def test_other_options_keep_the_cases_that_are_there(run, tmp_path, change):
    assert evaluate(run, "lines", BASE["lines"], tmp_path) == 0
    before = (tmp_path / "out" / "cases.jsonl").read_bytes()
    assert evaluate(run, "lines", [*BASE["lines"], change], tmp_path) == 0
    after = (tmp_path / "out" / "cases.jsonl").read_bytes()
    assert after.startswith(before)
    assert (after == before) == (change == "--batch_size=2")
