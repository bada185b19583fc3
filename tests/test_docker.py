"""docker/*.Dockerfile: a linter has nothing to say, they copy files that there are, and install what is locked."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from ringformer.parallel.runtime_environment import GPU_FRACTION, MEMORY_FRACTION
from tests.test_package import ENDS, LOCKS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
CPU, GPU = FILES
EACH = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def instructions(file):
    """The instructions of a Dockerfile, as (name, words)."""
    text = re.sub(r"^#.*\n", "", file.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(name, shlex.split(rest)) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def words_of(file, instruction):
    return [words for name, words in instructions(file) if name == instruction]


def copied(file):
    """The files and folders that it takes from the repository."""
    return [source for words in words_of(file, "COPY") if "--from=" not in words[0] for source in words[:-1]]


def variables(file):
    return dict(word.split("=", 1) for words in words_of(file, "ENV") for word in words)


def lint(*arguments, **options):
    hadolint = Path(sys.executable).parent / "hadolint"
    return subprocess.run([hadolint, "--no-color", *arguments], capture_output=True, text=True, **options)


@EACH
def test_a_linter_has_nothing_to_say(file):
    done = lint(file)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_linter_is_one():
    done = lint("-", input="FROM python\nRUN pip install jax\n")
    assert done.returncode == 1 and {"DL3006", "DL3013", "DL3042"} <= set(re.findall(r"DL\d+", done.stdout))


@EACH
def test_what_is_copied_is_there(file):
    assert len(copied(file)) > 5
    assert [name for name in copied(file) if not (ROOT / name).exists()] == []


def test_the_builder_gets_no_more_than_what_is_copied():
    """No runs, no data, no keys: everything is left out, except what an instruction names."""
    first, *rest = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    admitted, left_out = [r[1:] for r in rest if r[0] == "!"], [r for r in rest if r[0] != "!"]
    assert first == "*" and set(admitted) == {name for file in FILES for name in copied(file)}
    assert not any(fnmatch(name, pattern.removeprefix("**/")) for name in admitted for pattern in left_out)


@EACH
def test_everything_is_installed_from_the_lock_of_its_extras(file):
    pips = [words for words in words_of(file, "RUN") if "pip" in words]
    locked, wheel, package = (words[words.index("pip") + 1 :] for words in pips)
    lock = Path(locked[-1])
    assert locked == ["install", "--require-hashes", "--no-deps", "--requirement", str(lock)] and str(lock) in copied(
        file
    )
    extras = re.fullmatch(r"ringformer\[(.*)\]", package[package.index("&&") - 1])[1].split(",")
    assert extras == LOCKS[lock.stem] and {*extras} <= PROJECT["optional-dependencies"].keys()
    assert "--no-index" in wheel and "--no-index" in package, "the lock has everything else"
    assert ("cuda" in extras) == (file == GPU)


@EACH
def test_a_container_runs_ringformer_without_being_root(file):
    assert words_of(file, "ENTRYPOINT") == [["[ringformer]"]] and "ringformer" in PROJECT["scripts"]
    (user,) = words_of(file, "USER")
    (added,) = [words for words in words_of(file, "RUN") if words[0] == "useradd"]
    assert user == [added[added.index("--uid") + 1]] and int(user[0]) > 0
    assert variables(file)["HOME"] == added[added.index("--home-dir") + 1] == words_of(file, "WORKDIR")[-1][0]
    assert not [name for name in variables(file) if re.search("TOKEN|KEY|PASSWORD|SECRET", name)]
    assert not words_of(file, "ARG"), "a value given to a build stays in the image"


@EACH
def test_the_base_has_a_tested_python(file):
    bases = {words[0] for words in words_of(file, "FROM")}
    names = {words[2] for words in words_of(file, "FROM") if len(words) == 3}
    (base,) = bases - names
    assert re.fullmatch(r"python:(\d\.\d+)-slim-\w+", base)[1] in ENDS


def test_a_container_for_gpus_gets_what_estimates_assume():
    found = variables(GPU)
    assert float(found[MEMORY_FRACTION]) == GPU_FRACTION
    assert found["NVIDIA_VISIBLE_DEVICES"] == "all" and found["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"


def python_of(file):
    """An interpreter of the base's version, or a reason to skip."""
    version = re.search(r"python:(\d\.\d+)", file.read_text())[1]
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for python in (sys.executable, shutil.which(f"python{version}"), *pyenv):
        asked = python and subprocess.run([python, "--version"], capture_output=True, text=True)
        if asked and asked.returncode == 0 and asked.stdout.startswith(f"Python {version}."):
            return python
    pytest.skip(f"the image has Python {version}, which is not here")


@pytest.mark.slow
def test_the_commands_of_the_image_make_a_ringformer_that_trains(tmp_path):
    """Each RUN of pip, with an environment in the place of the image's Python, and folders in the place of its root."""
    subprocess.run([python_of(CPU), "-m", "venv", tmp_path / "python"], check=True)
    build, wheel, work = (tmp_path / name for name in ("build", "wheel", "work"))
    work.mkdir()
    own = {"PATH": f"{tmp_path}/python/bin:/usr/bin:/bin", "HOME": str(work)}
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    environment |= variables(CPU) | own

    def run(command, cwd):
        done = subprocess.run(["bash", "-ec", command], cwd=cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    ran = 0
    for name, words in instructions(CPU):
        if name == "COPY":
            for source in words[:-1]:
                target = build / words[-1] / (Path(source).name if (ROOT / source).is_file() else "")
                target.parent.mkdir(parents=True, exist_ok=True)
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copyfile
                copy(ROOT / source, target)
        elif name == "RUN" and "pip" in words:
            command = " ".join(word if word == "&&" else shlex.quote(word) for word in words[words.index("pip") :])
            run(command.replace("/wheel", str(wheel)), build)
            ran += 1
    assert ran == 3
    shutil.rmtree(build)  # the image has no sources
    assert "usage: ringformer" in run("ringformer --help", work)
    run("ringformer configs copy quickstart", work)
    settings = ["steps=2", "seq_len=256", "run_dir=run", "optimizer.warmup_steps=1", "eval_batches=1"]
    overrides = [f"--config.{setting}" for setting in settings]
    run(shlex.join(["ringformer", "train", "--config=configs/quickstart.py", *overrides]), work)
    assert (work / "run" / "checkpoints" / "2").is_dir()
