"""Every mutation of the list is caught by its test: two a commit in the usual suite, all with `-m slow`."""

from functools import cache

import pytest

from tests.mutations.mutations import MUTATIONS, Mutation
from tests.mutations.run import ROOT, apply, of_this_commit, try_tests


def test_every_patch_applies_once_and_changes_the_program(tmp_path):
    for i, mutation in enumerate(MUTATIONS):
        target = tmp_path / str(i) / "ringformer" / mutation.file
        target.parent.mkdir(parents=True)
        before = (ROOT / "ringformer" / mutation.file).read_text()
        target.write_text(before)
        apply(mutation, tmp_path / str(i))
        after = target.read_text()
        assert after != before
        compile(after, mutation.file, "exec")
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    with pytest.raises(ValueError, match=r"occurs 0 times in ringformer/cli/command_line\.py"):
        apply(Mutation("gone", "cli/command_line.py", "no such text", "", ""), ROOT)


def test_the_judge(tmp_path):
    """A mutation that changes nothing survives, one that does is caught; a test that cannot run has no verdict."""
    test = "ops/test_layouts.py::test_unknown_layout_is_named"
    same = Mutation("same", "ops/layouts.py", "PARTS = {", "PARTS =  {", test)
    wrong = Mutation("wrong", "ops/layouts.py", "unknown layout {layout!r}", "unknown", test)
    broken = Mutation("broken", "ops/layouts.py", "PARTS = {", "PARTS = [", test)
    rotten = Mutation("rotten", "ops/layouts.py", "if layout not in VISIBLE", "if layuot not in VISIBLE", test)
    for mutation in (same, wrong, broken, rotten):
        (tmp_path / mutation.name).mkdir()
    assert try_tests([test], tmp_path / same.name, same)[:2] == (1, 0)
    assert try_tests([test], tmp_path / wrong.name, wrong)[:2] == (0, 1)
    with pytest.raises(RuntimeError, match="SyntaxError"):
        try_tests([test], tmp_path / broken.name, broken)
    with pytest.raises(RuntimeError, match="NameError"):
        try_tests([test], tmp_path / rotten.name, rotten)


def test_one_of_this_commit_is_caught(tmp_path):
    """Another with each commit. Its test on the true package is one of this suite."""
    caught(of_this_commit(), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_all_are_caught(mutation, tmp_path, unpatched):
    true = unpatched(mutation.test)
    assert true.failed == 0, true.text
    caught(mutation, tmp_path)


@pytest.fixture(scope="module")
def unpatched(tmp_path_factory):
    """`unpatched(test)`: what becomes of a test on the true package, tried once."""
    return cache(lambda test: try_tests([test], tmp_path_factory.mktemp("unpatched")))


def caught(mutation: Mutation, folder):
    outcome = try_tests([mutation.test], folder, mutation)
    verdict = "caught" if outcome.failed else "SURVIVED"
    print(f"\n{verdict}: {mutation.name}, by {mutation.test} in {outcome.seconds:.0f} s")
    assert outcome.failed == 1, outcome.text
