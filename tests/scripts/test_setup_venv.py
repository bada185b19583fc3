"""scripts/setup_venv.sh, with a stand-in for pip."""

import os
import shutil
import time

import pytest

from tests.scripts.launching import ROOT, fake_python, launch

LOCK = "requirements/train.txt"


@pytest.fixture
def installing(tmp_path):
    """A clone without .venv, and a python3 whose venv's pip only says what it was asked: (folder, run, asked)."""
    folder, log = tmp_path / "clone", tmp_path / "log"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    pip = f'#!/bin/bash\necho "${{@:6}}" >> {log}\n'
    (tmp_path / "pip").write_text(pip)
    (tmp_path / "pip").chmod(0o755)
    made = f"mkdir -p .venv/bin && cp {tmp_path}/pip .venv/bin/python"
    python = fake_python(tmp_path / "bin" / "python3", f'[ "$1 $2" != "-m venv" ] || {{ {made}; }}')

    def run(*arguments, **env):
        done = launch("setup_venv.sh", *arguments, cwd=folder, PATH=f"{python.parent}:/usr/bin:/bin", **env)
        assert done.returncode == 0, done.stderr
        asked = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return asked

    return folder, run


@pytest.mark.parametrize(
    ("extra", "lock", "then"),
    [
        ([], "train", "--no-build-isolation --no-deps --editable ."),
        (["train"], "train", "--no-build-isolation --no-deps --editable ."),
        (["test"], "test", "--no-build-isolation --editable .[train,test]"),
        (["cuda"], "cuda", "--no-build-isolation --editable .[train,cuda]"),
        (["tpu"], "train", "--no-build-isolation --editable .[train,tpu]"),
    ],
    ids=str,
)
def test_what_is_installed_is_what_is_locked(installing, extra, lock, then):
    _, run = installing
    locked, package = run(*extra)
    assert locked == f"--require-hashes --no-deps --requirement requirements/{lock}.txt"
    assert package == then


def test_nothing_is_installed_twice_unless_something_changed(installing):
    folder, run = installing
    assert run() and not run() and not run("train")
    assert run("test") and not run("test") and not run()
    for name in ("setup.py", "pyproject.toml", LOCK):
        later = time.time() + 60
        os.utime(folder / name, (later, later))
        assert run(), name
        os.utime(folder / name, (0, 0))
        assert not run()


def test_the_python_that_is_named_makes_the_environment(installing, tmp_path):
    folder, run = installing
    other = fake_python(tmp_path / "other", f'echo "$@" >> {tmp_path}/other.log; exec {tmp_path}/bin/python3 "$@"')
    assert run(PYTHON=str(other))
    assert "-m venv .venv" in (tmp_path / "other.log").read_text()
    shutil.rmtree(folder / ".venv")
    old = fake_python(tmp_path / "old", '[ "$1" != --version ] || echo Python 3.9.2; exit 1')
    done = launch("setup_venv.sh", cwd=folder, PYTHON=str(old))
    assert done.returncode == 1 and "ringformer needs Python 3.11 or newer" in done.stderr
