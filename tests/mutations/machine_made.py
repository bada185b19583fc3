"""Compare two versions of the usual suite by mutants that a machine draws: does the present one catch as many?

    python -m tests.mutations.machine_made --before 98eb630 --costs measured.txt

A cut moves tests, or cells of tests, from the usual suite to the slow ones. For each mutant of a file near the cut
tests, this command runs the usual tests that the earlier suite had too. If none fails, it runs the cut ones. A mutant
is

- *caught* if a usual test fails, dies or passes its time limit;
- *lost* if only a cut test does;
- *survived* if none does.

The nearest tests run first (`nearness.py`), up to a number of CPU-seconds a round. Everything runs in one process and
its forks, as for the listed mutations (`run.py`), but with the checks of signatures, as in the suite. Verdicts are
appended to build/mutants/, so that a stopped command goes on. At the end, each test that has caught a mutant must pass
on the true package, or its verdicts are taken back. Once all mutants have a verdict, the table is written to
results/mutants.json.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from tests.commit import ROOT, revision
from tests.mutations.drawing import KINDS, Mutant, draw
from tests.mutations.nearness import UNKNOWN_SECONDS, Round, Test, affordable, files_near, nearest_first, read_costs
from tests.mutations.trials import Trial, failing_on_the_true_package, try_tests

BUILD = ROOT / "build" / "mutants"
RESULTS = ROOT / "results" / "mutants.json"

USUAL = "not slow and not gpu and not results"

ROUNDS = (Round(5, modules=2), Round(40, modules=12))
"""The usual tests run in these rounds; a later one repeats none."""
CUT_ROUND = Round(40, modules=12)
"""The cut tests run if the usual ones pass."""
LAST_ROUND = Round(300, modules=60)
"""More usual tests run if a cut test has failed."""


def judge(mutant: Mutant, usual: list[Test], cut: list[Test]) -> dict:
    """Return the verdict on a mutant: the tests that ran, and the one that failed."""
    usual = nearest_first(mutant.file, usual)
    tried: list[Test] = []

    def failure_of(tests: list[Test], limits: Round) -> tuple[str, str] | None:
        """Run the next tests, and return the one that failed with its message."""
        before = set(tried)
        chosen = affordable([test for test in tests if test not in before], limits)
        tried.extend(chosen)
        trial = try_tests(chosen, mutant) if chosen else Trial({}, 0)
        return next(iter(trial.failures.items()), None)

    for limits in ROUNDS:
        if failure := failure_of(usual, limits):
            return _verdict("caught", tried, failure)
    lost = failure_of(nearest_first(mutant.file, cut), CUT_ROUND)
    if lost is None:
        return _verdict("survived", tried, ("", ""))
    if failure := failure_of(usual, LAST_ROUND):
        return _verdict("caught", tried, failure)
    return _verdict("lost", tried, lost)


def _verdict(verdict: str, tried: list[Test], failure: tuple[str, str]) -> dict:
    by, message = failure
    return {"verdict": verdict, "by": by, "message": message, "tests": len(tried)}


def usual_tests(revision: str | None = None) -> list[str]:
    """Collect the usual tests of a revision, or of the working tree, and return their node ids."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) if revision else ROOT
        if revision:
            archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True)
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "-m", USUAL]
        collection = subprocess.run(
            command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True
        )
    return [line for line in collection.stdout.splitlines() if line.startswith("tests/") and "::" in line]


def kept(name: str, make) -> list:
    """Return what an earlier call with this name has made, in build/mutants/, or make it."""
    path = BUILD / f"{name}.json"
    if not path.exists():
        path.write_text(json.dumps(make()))
    return json.loads(path.read_text())


class Verdicts:
    """The verdicts so far, by the mutant's name, in a file that only grows."""

    def __init__(self, path: Path):
        self.path = path
        self.by_mutant: dict[str, dict] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            record = json.loads(line)
            self.by_mutant[record["mutant"]] = record

    def add(self, mutant: Mutant, verdict: dict) -> None:
        record = {"mutant": mutant.name, "kind": mutant.kind} | verdict
        with self.path.open("a") as file:
            file.write(f"{json.dumps(record)}\n")
        self.by_mutant[mutant.name] = record

    def catching(self) -> set[str]:
        return {record["by"] for record in self.by_mutant.values() if record["by"]}

    def take_back(self, tests: set[str]) -> None:
        """Forget the verdicts of some tests."""
        self.by_mutant = {name: record for name, record in self.by_mutant.items() if record["by"] not in tests}


def table(mutants: list[Mutant], verdicts: Verdicts) -> dict[str, dict[str, int]]:
    """Count the verdicts of each kind, and of all kinds."""
    counts = {}
    for kind in (*KINDS, "all"):
        records = [verdicts.by_mutant.get(mutant.name) for mutant in mutants if kind in (mutant.kind, "all")]
        decided = [record["verdict"] for record in records if record]
        counts[kind] = {"drawn": len(records), "tried": len(decided)}
        counts[kind] |= {verdict: decided.count(verdict) for verdict in ("caught", "lost", "survived")}
    return counts


def report(args, mutants: list[Mutant], verdicts: Verdicts) -> dict:
    """Return what results/mutants.json holds."""
    counts = table(mutants, verdicts)
    caught, lost = counts["all"]["caught"], counts["all"]["lost"]
    lost_mutants = []
    for mutant in mutants:
        record = verdicts.by_mutant.get(mutant.name, {})
        if record.get("verdict") == "lost":
            place = f"{mutant.file}:{mutant.line}"
            change = f"{mutant.old} -> {mutant.new}"
            lost_mutants.append({"place": place, "change": change, "caught_by": record["by"]})
    return {
        "what": "measured on a CPU: mutants that the usual suite catches after a cut, of those that it caught before",
        "command": f"python -m tests.mutations.machine_made --before {args.before} --seed {args.seed}",
        "date": date.today().isoformat(),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in ("jax", "flax", "pytest")},
        "commit": commit(),
        "before": args.before,
        "seed": args.seed,
        "rounds": {
            "usual": [limits._asdict() for limits in ROUNDS],
            "cut, if these pass": CUT_ROUND._asdict(),
            "usual, if a cut one fails": LAST_ROUND._asdict(),
        },
        "mutants": counts,
        "caught_over_before": round(caught / max(caught + lost, 1), 4),
        "lost": lost_mutants,
    }


def commit() -> str:
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return git.stdout.strip()


def tests_of_both(before: str, costs: dict[str, float]) -> tuple[list[Test], list[Test]]:
    """Return the tests that are usual in both suites, and those that were cut. New tests are in neither."""
    earlier = kept(f"usual-{before}", lambda: usual_tests(before))
    present = set(kept(f"usual-{commit()}", usual_tests))
    tests = [Test(name, costs.get(name, UNKNOWN_SECONDS)) for name in earlier]
    tests = [test for test in tests if (ROOT / test.module).exists()]
    return [test for test in tests if test.name in present], [test for test in tests if test.name not in present]


def try_all(mutants: list[Mutant], usual: list[Test], cut: list[Test], verdicts: Verdicts) -> None:
    """Judge the mutants that have no verdict yet, until every test that has caught one passes on the true package."""
    believed: set[str] = set()
    failing: set[str] = set()
    while True:
        sound = [[test for test in tests if test.name not in failing] for tests in (usual, cut)]
        try_each(mutants, *sound, verdicts)
        unsound = take_back_unsound(verdicts, believed, usual + cut)
        if not unsound:
            return
        failing |= unsound
        believed |= verdicts.catching()
        print(f"these fail without a mutant, and judge none: {sorted(unsound)}", flush=True)


def try_each(mutants: list[Mutant], usual: list[Test], cut: list[Test], verdicts: Verdicts) -> None:
    """Judge the mutants that have no verdict yet."""
    for number, mutant in enumerate(mutants, 1):
        if mutant.name in verdicts.by_mutant:
            continue
        begun = time.perf_counter()
        verdict = judge(mutant, usual, cut)
        verdicts.add(mutant, verdict)
        seconds = time.perf_counter() - begun
        line = f"{verdict['verdict']}: {mutant.name}, {verdict['tests']} tests, {seconds:.0f} s, {verdict['by']}"
        print(f"{number:4} of {len(mutants)}  {line}", flush=True)


def take_back_unsound(verdicts: Verdicts, believed: set[str], tests: list[Test]) -> set[str]:
    """Take back the verdicts of tests that fail on the true package, and return these tests."""
    names = verdicts.catching() - believed
    modules = [Test(test.module, 0.0) for test in tests if test.module in names]  # a mutant was caught on their import
    catching = [test for test in tests if test.name in names]
    unsound = failing_on_the_true_package([*dict.fromkeys(modules), *catching])
    verdicts.take_back(unsound)
    return unsound


def main(words: list[str] | None = None) -> int:
    summary = __doc__.split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.machine_made", description=summary)
    parser.add_argument(
        "--before", metavar="REVISION", type=revision, required=True, help="the last commit before the cut"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawing")
    parser.add_argument("--count", type=int, default=300, help="number of mutants")
    parser.add_argument("--only", metavar="TEXT", default="", help="only mutants whose name has this text")
    parser.add_argument("--costs", metavar="FILE", type=Path, help="CPU-seconds of the tests, as --measure prints them")
    parser.add_argument("--report", action="store_true", help="report the verdicts so far, and judge no other mutants")
    args = parser.parse_args(words)
    BUILD.mkdir(parents=True, exist_ok=True)
    usual, cut = tests_of_both(args.before, read_costs(args.costs))
    files = files_near({test.module for test in cut})
    drawn = draw(files, args.count, args.seed)
    mutants = [mutant for mutant in drawn if args.only in mutant.name]
    if drawn and not mutants:
        example = f"names are like {drawn[0].name!r}, and without --only each is printed with its verdict"
        parser.exit(2, f"none of {len(drawn)} mutants has {args.only!r} in its name; {example}\n")
    verdicts = Verdicts(BUILD / f"verdicts-{commit()}-{args.seed}.jsonl")
    print(f"{len(usual):,} usual tests, {len(cut):,} cut ones", flush=True)
    print(f"{len(mutants)} mutants of {len(files)} files", flush=True)
    if args.report:
        take_back_unsound(verdicts, set(), usual + cut)
    else:
        try_all(mutants, usual, cut, verdicts)
    results = report(args, mutants, verdicts)
    print(json.dumps(results, indent=1))
    counts = results["mutants"]["all"]
    if not args.only and counts["tried"] == counts["drawn"]:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
