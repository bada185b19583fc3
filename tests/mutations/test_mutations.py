"""Every mutation of the list is caught by its test: one a commit in the usual suite, all with `-m slow`."""

import subprocess
from functools import cache

import pytest

from tests.commit import ROOT, commit_number
from tests.mutations.mutations import MUTATIONS, Mutation
from tests.mutations.run import main, mutated_text, try_apart


def test_every_patch_applies_once_and_changes_the_program():
    for mutation in MUTATIONS:
        after = mutated_text(mutation)
        assert after != (ROOT / "ringformer" / mutation.file).read_text()
        compile(after, mutation.file, "exec")
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    with pytest.raises(ValueError, match=r"occurs 0 times in ringformer/cli/command_line\.py"):
        mutated_text(Mutation("gone", "cli/command_line.py", "no such text", "", ""))


UNKNOWN_LAYOUT = "ops/test_layouts.py::test_unknown_layout_is_named"


@pytest.mark.slow
def test_a_mutation_that_changes_nothing_survives():
    same = Mutation("same", "ops/layouts.py", "PARTS = {", "PARTS =  {", UNKNOWN_LAYOUT)
    assert try_apart([UNKNOWN_LAYOUT], same)[:2] == (1, 0)


def test_a_mutation_that_changes_what_is_asserted_is_caught():
    wrong = Mutation("wrong", "ops/layouts.py", "unknown layout {layout!r}", "unknown", UNKNOWN_LAYOUT)
    assert try_apart([UNKNOWN_LAYOUT], wrong)[:2] == (0, 1)


@pytest.mark.slow
def test_a_test_that_cannot_run_has_no_verdict():
    rotten = Mutation(
        "rotten", "ops/layouts.py", "if layout not in VISIBLE", "if layuot not in VISIBLE", UNKNOWN_LAYOUT
    )
    with pytest.raises(RuntimeError, match="NameError"):
        try_apart([UNKNOWN_LAYOUT], rotten)


@pytest.mark.slow
def test_processes_of_a_test_have_the_mutation():
    """The test starts `ringformer configs list` as a process, and wants its exit code."""
    test = "cli/test_command_line.py::test_who_reads_no_further_sees_no_traceback"
    wrong = Mutation("wrong", "cli/command_line.py", "141", "142", test)
    assert try_apart([test], wrong)[:2] == (0, 1)


DEAR = {
    "train/test_buckets.py::test_loss_and_gradients_of_a_batch_are_those_of_one_device[1,1,1,8-change0-expected_rings0]",
    "train/test_precision.py::test_no_error_grows[1,1,1,8]",
    "ops/test_windows.py::test_tpu_kernels[zigzag-180-options0]",
    "ops/kernels/test_flash_attention.py::test_gradients_of_one_half_of_the_heads_travel_during_the_other",
    "ops/kernels/test_flash_attention.py::test_bfloat16_errors_do_not_grow_with_chunks_and_hops",
    "convert/test_families.py::test_greedy_tokens[1,1,2,4-None-gemma3]",
}
"""Tests that exceed what a usual test may take, once the start of their process is added. Only `-m slow` tries their
mutations."""


def test_one_of_this_commit_is_caught():
    """Another with each commit. Its test on the true package is one of this suite."""
    affordable = [mutation for mutation in MUTATIONS if mutation.test not in DEAR]
    assert {mutation.test for mutation in MUTATIONS} > DEAR and len(affordable) > 200
    caught(affordable[commit_number() % len(affordable)])


def test_an_unknown_revision_is_one_line(capsys):
    with pytest.raises(SystemExit):
        main(["--since", "no-such-revision"])
    assert "--since: no-such-revision is no commit of this clone" in capsys.readouterr().err


def test_those_since_a_revision_are_chosen(capsys, monkeypatch):
    monkeypatch.setattr("tests.mutations.run.changed_since", lambda revision: set())
    assert main(["--since", "HEAD"]) == 0
    assert "0 of 0 mutations are caught" in capsys.readouterr().out


def test_a_text_that_no_name_has_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--only", "this text"])
    out, err = capsys.readouterr()
    assert (exit.value.code, out, err.count("\n")) == (2, "", 1) and "no mutation has 'this text' in its name" in err
    list_names = err.partition("names: ")[2].split()
    listed = subprocess.run(list_names, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f"@@ {mutation.name} @@" in listed for mutation in MUTATIONS), "the advice"


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_all_are_caught(mutation, unpatched):
    true = unpatched(mutation.test)
    assert true.failed == 0, true.text
    caught(mutation)


@pytest.fixture(scope="module")
def unpatched():
    """`unpatched(test)`: what becomes of a test on the true package, tried once."""
    return cache(lambda test: try_apart([test]))


def caught(mutation: Mutation):
    outcome = try_apart([mutation.test], mutation)
    verdict = "caught" if outcome.failed else "SURVIVED"
    print(f"\n{verdict}: {mutation.name}, by {mutation.test} in {outcome.seconds:.0f} s")
    assert outcome.failed == 1, outcome.text
