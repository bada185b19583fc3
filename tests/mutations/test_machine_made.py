"""Mutants that a machine draws: where they are, which tests come first, and the verdict on one of each kind."""

import pytest

from tests.mutations import machine_made, nearness, trials
from tests.mutations.drawing import KINDS, Mutant, Places, draw
from tests.mutations.machine_made import Verdicts, judge
from tests.mutations.nearness import Round, Test, affordable, distances, nearest_first, read_costs

TEXT = '''
"""A docstring with 1 < 2."""
def f(x: Float[Array, "3 4"], é=0, axis="sp") -> int:
    "No 1."
    if x  <  (  # not <
        1.5
    ) and x is not None:
        raise ValueError(f"{x + 1} is not 7", 7)
    x += -é
    return x[0, :-2, é + 1] + lax.psum(x, ("dp", axis)) + "1" + "2"
class A:
    deep = True
    def __repr__(self):
        return str(1 + 1)
'''


def test_what_may_change_of_a_text():
    mutants = list(Places("a.py", TEXT).mutants())
    assert {(mutant.line, mutant.kind, mutant.old, mutant.new) for mutant in mutants} == {
        (3, "constant", "0", "1"),
        (3, "axis name", '"sp"', '"tp"'),
        (5, "comparison", "<", "<="),
        (6, "constant", "1.5", "3.0"),
        (7, "comparison", "is not", "is"),
        (9, "sign", "+=", "-="),
        (9, "sign", "-", "+"),
        (10, "index", "0", "1"),
        (10, "index", "2", "3"),
        (10, "sign", "+", "-"),
        (10, "constant", "1", "2"),
        (10, "axis name", '"dp"', '"fsdp"'),
        (12, "constant", "True", "False"),
    }
    for mutant in mutants:
        compile(mutant.mutated(TEXT), "a.py", "exec")


def test_a_seed_draws_the_same_of_every_kind():
    files = ["ringformer/train/step.py", "ringformer/ops/ring_passes.py"]
    drawn = draw(files, 20, seed=3)
    assert drawn == draw(files[::-1], 20, seed=3) != draw(files, 20, seed=4)
    assert [mutant.kind for mutant in drawn[:5]] == list(KINDS) and len(set(drawn)) == 20


def test_the_nearest_tests_come_first():
    modules = "tests/test_language.py", "tests/ops/test_rings.py", "tests/ops/test_layouts.py"
    tests = [Test(f"{module}::test_{seconds}", seconds) for seconds in (3.0, 1.0) for module in modules]
    order = nearest_first("ringformer/ops/layouts.py", tests)
    assert [(test.module, test.seconds) for test in order] == [
        ("tests/ops/test_layouts.py", 1.0),
        ("tests/ops/test_layouts.py", 3.0),
        ("tests/ops/test_rings.py", 1.0),
        ("tests/ops/test_rings.py", 3.0),
        ("tests/test_language.py", 1.0),
        ("tests/test_language.py", 3.0),
    ]
    assert distances("tests/ops/test_layouts.py")["ringformer/ops/layouts.py"] == 1


def test_a_round_has_room_for_some_tests(monkeypatch):
    monkeypatch.setattr(nearness, "OVERHEAD", 0.0)
    tests = [Test(f"tests/{name}", seconds) for name, seconds in [("a::1", 3), ("a::2", 3), ("b::1", 4), ("c::1", 1)]]
    assert [test.name for test in affordable(tests, Round(10, modules=2))] == ["tests/a::1", "tests/b::1"]


def test_costs_are_read_as_they_are_printed(tmp_path):
    path = tmp_path / "costs.txt"
    path.write_text(
        "=== CPU-seconds ===\n    58.7  tests/a.py::test_b[c d]\n    1.2 tests/a.py::test_e\n   60.0  all 2 tests\n"
    )
    assert read_costs(path) == {"tests/a.py::test_b[c d]": 58.7, "tests/a.py::test_e": 1.2}


def test_the_verdict_names_the_test(monkeypatch, tmp_path):
    """Usual tests come before cut ones, and once more after a cut one fails."""
    mutant = Mutant("sign", "ringformer/ops/layouts.py", 1, 1, "+", "-")
    usual, cut = ([Test(f"tests/ops/test_layouts.py::test_{name}", 1.0)] for name in ("usual", "cut"))
    failing = set()

    def try_tests(tests, mutant):
        del mutant
        failures = {test.name: "assert False" for test in tests if test.name.split("_")[-1] in failing}
        return machine_made.Trial(failures, len(tests))

    monkeypatch.setattr(machine_made, "try_tests", try_tests)
    assert judge(mutant, usual, cut)["verdict"] == "survived"
    failing.add("cut")
    lost = judge(mutant, usual, cut)
    assert (lost["verdict"], lost["by"]) == ("lost", cut[0].name)
    failing.add("usual")
    caught = judge(mutant, usual, cut)
    assert (caught["verdict"], caught["by"], caught["tests"]) == ("caught", usual[0].name, 1)
    for verdict in (lost, caught):
        Verdicts(tmp_path / "verdicts.jsonl").add(mutant, verdict)
    again = Verdicts(tmp_path / "verdicts.jsonl")
    assert again.by_mutant[mutant.name]["verdict"] == "caught"
    again.take_back({usual[0].name})
    assert again.by_mutant == {}


def test_a_test_that_kills_the_true_package_stops_no_other(monkeypatch):
    dying, failing, working = (f"tests/test_a.py::test_{name}" for name in ("dying", "failing", "working"))

    def try_tests(tests, mutant, first_failure_ends):
        assert mutant is None and not first_failure_ends
        names = {test.name for test in tests}
        return trials.Trial({dying: "died"}, 0) if dying in names else trials.Trial({failing: "failed"}, len(names))

    monkeypatch.setattr(trials, "try_tests", try_tests)
    tests = [Test(name, 1.0) for name in (dying, failing, working)]
    assert trials.failing_on_the_true_package(tests) == {dying, failing}


def test_a_text_that_no_name_has_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine_made, "BUILD", tmp_path)
    monkeypatch.setattr(machine_made, "tests_of_both", lambda before, costs: ([], []))
    monkeypatch.setattr(machine_made, "files_near", lambda modules: ["ringformer/ops/layouts.py"])
    with pytest.raises(SystemExit) as exit:
        machine_made.main(["--before", "HEAD", "--count", "10", "--only", "this text"])
    out, err = capsys.readouterr()
    assert (exit.value.code, out, err.count("\n")) == (2, "", 1)
    assert "none of 10 mutants has 'this text' in its name; names are like 'ringformer/ops/layouts.py:" in err
