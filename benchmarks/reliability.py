"""All that docs/reliability.md promises, tried once for the record: a long while.

    python benchmarks/reliability.py [--kills=50] [--flips=100] [--out=results/reliability.json] [--again=FILE]

Runs scripts/chaos.py, then every test in the files that the page names, slow ones too, two at a time. What fails is
tried again alone, since several have limits in seconds and four processes each; the record has both outcomes. Exit code
1 if anything went wrong; the file says what, and which tests were skipped here. --again tries what failed in a record.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.result_files import write_results
from ringformer.cli.parser import output_argument
from tests.cpu_flags import cpu_environment

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reliability.md"


def tests_of(page: str) -> list[str]:
    """The files of tests that a page names, relative to the repository; without a folder, in that of the one before."""
    found, folder = [], Path("tests")
    for name in re.findall(r"`((?:tests/[\w/]*)?test_\w+\.py)`", page):
        folder = Path(name).parent if "/" in name else folder
        found.append(str(folder / Path(name).name))
    return list(dict.fromkeys(found))


def outcomes(report: Path) -> list[dict]:
    """Of a JUnit report each test's name, seconds and outcome."""
    rows = []
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [each.tag for each in case if each.tag in ("failure", "error", "skipped")]
        name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
        rows.append({"test": name, "seconds": float(case.attrib["time"]), "outcome": bad[0] if bad else "passed"})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--flips", type=int, default=100)
    parser.add_argument("--out", type=output_argument, default=str(ROOT / "results" / "reliability.json"))
    parser.add_argument(
        "--again",
        type=Path,
        metavar="FILE",
        help="a record whose failed tests are tried again, alone, and whose missing ones are tried",
    )
    args = parser.parse_args()
    if args.again:
        told = json.loads(args.again.read_text())
        tried = {row["test"].split("::")[0] for row in told["tests"]}
        missing = [test for test in tests_of(PAGE.read_text()) if test not in tried]
        return finish(told, told["tests"] + (run_tests(missing, 2) if missing else []), args.out)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "chaos.json")
        chaos = ["scripts/chaos.py", f"--kills={args.kills}", f"--flips={args.flips}", f"--results={table}"]
        subprocess.run([sys.executable, *chaos], cwd=ROOT, env=cpu_environment(PYTHONPATH=str(ROOT)))
        if not table.is_file():
            return 1  # it has said why
        files = tests_of(PAGE.read_text())
        tests = run_tests(files, 2)
        told = json.loads(table.read_text())
    told["command"] = " ".join(["python benchmarks/reliability.py", *sys.argv[1:]])
    return finish(told, tests, args.out)


def run_tests(tests: list[str], at_once: int) -> list[dict]:
    """Their outcomes, of so many at once."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "junit.xml")
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"-n{at_once}", f"--junitxml={report}"]
        subprocess.run([*pytest, *tests], cwd=ROOT)
        return outcomes(report)


def finish(told: dict, tests: list[dict], out: Path) -> int:
    """Try again alone what failed, and write the record; the exit code."""
    if failed := [row for row in tests if row["outcome"] in ("failure", "error")]:
        alone = {row["test"]: row for row in run_tests([row["test"] for row in failed], 0)}
        for row in failed:
            row |= alone[row["test"]] | {"beside_another": row["outcome"]}
    told["tests"] = tests
    write_results(out, told)
    wrong = sum(row["verdict"] != "ok" for row in told["trials"])
    wrong += sum(row["outcome"] in ("failure", "error") for row in tests) or not tests
    skipped = sum(row["outcome"] == "skipped" for row in tests)
    print(f"{len(told['trials'])} trials and {len(tests)} tests, {wrong} wrong, {skipped} skipped: {out}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
