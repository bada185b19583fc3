"""A release: one command builds it from a clone, the nightly job runs that command, and a wrong tag stops it."""

import re
import shutil
import subprocess
import sys

import pytest

from scripts.checks.release_version import mistakes
from tests.scripts.launching import ROOT, launch

FILES = ("pyproject.toml", "CITATION.cff", "CHANGELOG.md")
(TAG,) = {f"v{number}" for number in re.findall(r'^version = "(.+?)"', (ROOT / FILES[0]).read_text(), re.MULTILINE)}
WORKFLOWS = ROOT / ".github" / "workflows"
needs_workflows = pytest.mark.skipif(not WORKFLOWS.is_dir(), reason="an sdist has no .github")


@pytest.fixture
def repository(tmp_path):
    """A folder with the files that name a version."""
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_all_files_name_the_version_of_the_next_tag(repository):
    assert mistakes(TAG, repository) == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_version_is_named(repository, name):
    path = repository / name
    path.write_text(path.read_text().replace(TAG[1:], "7.7.7"))
    (sentence,) = mistakes(TAG, repository)
    assert sentence.startswith(name)


@pytest.mark.parametrize("tag", ["0.1.0", "v0.1", "release"])
def test_a_tag_without_three_numbers_is_refused(repository, tag):
    (sentence,) = mistakes(tag, repository)
    assert "vX.Y.Z" in sentence


def git(folder, *words):
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize("tag", ["v7.7.7", TAG])
def test_a_release_has_the_committed_files_and_the_version_of_its_tag(repository, tag):
    """A tag of another version ends the script before it installs anything. Else a stand-in for setup_venv.sh does."""
    shutil.copytree(ROOT / "scripts", repository / "scripts")
    (repository / "scripts" / "setup_venv.sh").write_text("echo installing\nexit 3\n")
    git(repository, "init", "--quiet")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message=all")
    (repository / "not committed").write_text("")
    done = launch("release.sh", tag, cwd=repository, PYTHON=sys.executable)
    clone = repository / "build" / "release" / "clone"
    assert (clone / "scripts" / "release.sh").is_file() and not (clone / "not committed").exists()
    if tag == TAG:
        assert done.returncode == 3 and "installing" in done.stdout, done.stderr
    else:
        assert done.returncode == 1 and "installing" not in done.stdout
        assert all(f"{name} has no line of version 7.7.7" in done.stderr for name in FILES)


def job(workflow, name):
    """The text of a workflow's job."""
    text = (WORKFLOWS / workflow).read_text()
    (found,) = re.findall(rf"^  {name}:\n((?:    .*\n|\n)+)", text, re.MULTILINE)
    return found


@needs_workflows
def test_a_release_is_built_every_night():
    """The nightly job runs every part of check_all.sh, and the part `package` is the command of a release."""
    (schedule,) = re.findall(r'- cron: "(.*)"', (WORKFLOWS / "tests.yml").read_text())
    minute, hour, *days = schedule.split()
    assert minute.isdigit() and hour.isdigit() and days == ["*", "*", "*"], "the schedule is not nightly"
    everything = job("tests.yml", "everything")
    assert "github.event_name == 'schedule'" in everything
    assert re.search(r"- run: bash scripts/check_all\.sh$", everything, re.MULTILINE), "without a part, all parts run"
    script = (ROOT / "scripts" / "check_all.sh").read_text()
    (parts,) = re.findall(r"\[ \$# -gt 0 \] \|\| parts=\((.*)\)", script)
    assert "package" in parts.split()
    (package,) = re.findall(r"^package\(\) \{\n(.*?)^\}", script, re.MULTILINE | re.DOTALL)
    assert "bash scripts/release.sh\n" in package


@needs_workflows
def test_a_tag_is_released_by_the_same_command():
    build = job("release.yml", "build")
    assert '- run: bash scripts/release.sh "$GITHUB_REF_NAME"' in build
    (folder,) = re.findall(r"path: (build/.*)/", build)
    assert f"work=$PWD/{folder.removesuffix('/dist')}\n" in (ROOT / "scripts" / "release.sh").read_text()


def test_a_check_on_a_python_that_is_not_there_fails(tmp_path):
    """It names the variable, and runs no suite on another one. Here every Python is 3.11."""
    for name in ("python3", "python3.11", "python3.12"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\necho 3.11\n")
        program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = ["bash", "scripts/check_all.sh", "newest"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "check_all.sh: Python 3.12 not found; set NEWEST=/path/to/python3.12\n"
