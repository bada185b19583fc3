"""scripts/test.sh, with stand-ins for what it runs."""

import shutil

import pytest

from tests.scripts.launching import ROOT, fake_python, launch


@pytest.fixture
def checks(tmp_path):
    """Runs test.sh where docs.sh ends with `site` and mypy with `types`: its exit code, and what it ran in order; mypy
    and docs.sh run side by side."""
    folder, log = tmp_path / "clone", tmp_path / "log"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "test.sh", folder / "scripts")

    def run(*arguments, site=0, types=0):
        command = f'echo "$2 $*" >> {log}; [ "$2" != mypy ] || exit {types}'
        fake_python(folder / ".venv" / "bin" / "python", command)
        for name, code in (("setup_venv.sh", 0), ("docs.sh", site)):
            (folder / "scripts" / name).write_text(f"echo {name} $* >> {log}\nexit {code}\n")
        log.unlink(missing_ok=True)
        done = launch("test.sh", *arguments, cwd=folder)
        return done.returncode, [line.split()[0] for line in log.read_text().splitlines()]

    return run


CHECKS = ["setup_venv.sh", "ruff", "ruff"]


@pytest.mark.parametrize("arguments", [(), ("--slow",)])
def test_the_whole_suite_builds_the_site(checks, arguments):
    code, ran = checks(*arguments)
    assert code == 0 and (ran[:3], {*ran[3:5]}, ran[5:]) == (CHECKS, {"mypy", "docs.sh"}, ["pytest"])


@pytest.mark.parametrize(("arguments", "are_compared"), [((), True), (("--slow",), True), (("tests/ops",), False)])
def test_the_whole_suite_compares_results(checks, tmp_path, arguments, are_compared):
    checks(*arguments)
    lines = (tmp_path / "log").read_text().splitlines()
    marker = "not gpu" if arguments == ("--slow",) else "not slow and not gpu"
    assert f"-m {marker}{'' if are_compared else ' and not results'}" in lines[-1]
    assert are_compared == ("docs.sh --site" in lines)


def test_some_tests_build_none(checks):
    assert checks("tests/ops", "-k", "zigzag") == (0, [*CHECKS, "mypy", "pytest"])


@pytest.mark.parametrize("arguments", [(), ("tests/ops",)])
def test_wrong_types_fail_the_script(checks, arguments):
    code, ran = checks(*arguments, types=3)
    assert code == 3 and "pytest" not in ran


def test_a_site_that_fails_fails_the_script(checks):
    code, ran = checks(site=3)
    assert code != 0 and "pytest" not in ran


def test_ci_runs_the_whole_suite():
    command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert command == 'exec bash "$(dirname "$0")/../scripts/test.sh"'
