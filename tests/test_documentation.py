"""Every block of code in README and docs is run here, or parsed and dry-run if it needs hardware or minutes.

A block that no rule covers fails: give it a language, or a rule. Paths, links and modules that a page names are there.
"""

import ast
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from ringformer.cli.command_line import find_verb, make_parsers
from ringformer.models import config_checks, own_attention, registry
from ringformer.runs.config import base_config
from ringformer.runs.config_file import load_config, parse_stages
from tests import dense
from tests.cpu_flags import cpu_environment
from tests.helpers import relative_error

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    where: str
    language: str
    text: str


def blocks_of(path: Path) -> list[Block]:
    """The code blocks of a page; an indented one has no language."""
    found, lines = [], path.read_text().splitlines()
    i = 0
    while i < len(lines):
        start = i
        if fence := re.match(r"( *)```(.*)", lines[i]):
            while not lines[i := i + 1].startswith(f"{fence[1]}```"):
                pass
            body = [line.removeprefix(fence[1]) for line in lines[start + 1 : i]]
            found.append(Block(f"{path.relative_to(ROOT)}:{start + 1}", fence[2], "\n".join(body) + "\n"))
        elif lines[i].startswith("    ") and lines[i].strip() and not lines[i - 1].strip():
            before = next((line for line in reversed(lines[:i]) if line.strip()), "")
            if not re.match(r" *([-*]|\d+\.) ", before):  # the next paragraph of a list's item
                found.append(Block(f"{path.relative_to(ROOT)}:{i + 1}", "", lines[i]))
        i += 1
    return found


RUN_ELSEWHERE = "docs/how-to/my-documents-to-512k.md"  # in order: tests/test_my_documents.py
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python" and not block.where.startswith(RUN_ELSEWHERE)]
FRAGMENTS = [block for block in PYTHON if re.search(r"^config\.|^def get_config", block.text, re.MULTILINE)]
OF_A_RUN = [block for block in PYTHON if re.search(r"load_model\(|Generator\.load\(", block.text)]
WITH_IMPORTS = [block for block in PYTHON if "import " in block.text]
PROGRAMS = [block for block in PYTHON if block not in FRAGMENTS + OF_A_RUN]


USUAL_PAGES = ("README.md", "docs/tutorial.md")
"""Pages whose programs and scripts run in the usual suite; those of the others are slow."""


def commands() -> list:
    """Each command of the shell blocks, as words without comments, environment and where its output goes, and where it
    stands."""
    found = []
    for block in BLOCKS:
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                for command in " ".join(shlex.split(line, comments=True, posix=False)).split(" && "):
                    words = shlex.split(command)
                    while words and re.match(r"[A-Z_]+=", words[0]):
                        words = words[1:]
                    words = words[: words.index(">")] if ">" in words else words
                    if words:
                        starts_a_script = words[0] in ("bash", "sbatch") and not block.where.startswith(USUAL_PAGES)
                        marks = [pytest.mark.slow] if starts_a_script else []
                        found.append(pytest.param(words, id=f"{block.where} {' '.join(words[:3])}", marks=marks))
    return found


def test_every_block_has_a_rule():
    assert len(BLOCKS) > 40 and len(PROGRAMS) >= 6
    unknown = [block.where for block in BLOCKS if block.language not in ("python", "bash", "text")]
    assert not unknown, "give these blocks a language: python, bash, or text for what is only read"
    hidden = [b.where for b in BLOCKS if b.language == "text" and re.search(r"^(ringformer|bash|pip) ", b.text, re.M)]
    assert not hidden, "these look like commands, and text is not checked"


def program(block):
    """A parameter: the programs of other pages are slow tests."""
    usual = block.where.startswith(USUAL_PAGES)
    return pytest.param(block, id=block.where, marks=[] if usual else pytest.mark.slow)


@pytest.mark.parametrize("block", [program(block) for block in PROGRAMS])
def test_a_program_runs_and_is_exact(block, tmp_path):
    """In a fresh interpreter on a machine with one CPU device; what it computes is dense attention, by its own word (a
    line "relative error ...: X") or, if it prints nothing, by its o to its q, k and v."""
    own = "print(" not in block.text
    save = f"\nimport numpy\nnumpy.savez('o.npz', n=mesh.shape['sp'], {', '.join(f'{x}={x}' for x in 'qkvo')})\n"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = cpu_environment(PYTHONPATH=path)
    command = [sys.executable, "-W", "error", "-c", block.text + (save if own else "")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if own:
        found = np.load(tmp_path / "o.npz")
        assert found["n"] == 8
        errors = [relative_error(found["o"], dense.attention(found)["o"])]
    else:
        errors = [float(x) for x in re.findall(r"(?:relative error.*: |^)(\d\S*e-\d+)$", done.stdout, re.MULTILINE)]
    assert len(errors) == 1 and max(errors) < 1e-5, done.stdout


@pytest.mark.slow
def test_programs_pass_a_type_checker(tmp_path):
    """All of the pages, as mypy sees them where it finds the package."""
    paths = [tmp_path / f"program_{number}.py" for number in range(len(WITH_IMPORTS))]
    for path, block in zip(paths, WITH_IMPORTS, strict=True):
        path.write_text(block.text)
    assert type_errors(*paths) == []


RESULTS_OF_THE_OP = """
import jax
from ringformer import ring_attention, sharded_ring_attention
mesh = jax.make_mesh((8,), ("sp",))
q: jax.Array
a: jax.Array = sharded_ring_attention(q, q, q, mesh=mesh, layout="striped", head_axis="tp")
b: jax.Array = ring_attention(q, q, q, axis_name="sp", return_lse=False, q_chunk=128)
c: tuple[jax.Array, jax.Array] = sharded_ring_attention(q, q, q, mesh=mesh, return_lse=True)
d: tuple[jax.Array, jax.Array] = ring_attention(q, q, q, axis_name=None, return_lse=True)
e: jax.Array | tuple[jax.Array, jax.Array] = sharded_ring_attention(q, q, q, mesh=mesh, return_lse=bool(q.ndim))
f: jax.Array = sharded_ring_attention(q, q, q, mesh=mesh, return_lse=True)  # wrong
g: tuple[jax.Array, jax.Array] = ring_attention(q, q, q, axis_name="sp")  # wrong
h: jax.Array = sharded_ring_attention(q, q, q, mesh=mesh, q_chunks=128)  # wrong
i: jax.Array = ring_attention(q, q, q, axis_name="sp", layout="zagzig")  # wrong
"""


@pytest.mark.slow
def test_the_type_of_a_result_follows_return_lse(tmp_path):
    path = tmp_path / "results.py"
    path.write_text(RESULTS_OF_THE_OP)
    wrong = [number for number, line in enumerate(RESULTS_OF_THE_OP.split("\n"), 1) if line.endswith("# wrong")]
    assert sorted({int(line.split(":")[1]) for line in type_errors(path)}) == wrong


def type_errors(*programs: Path) -> list[str]:
    """mypy's lines about the programs, which it reads with this package beside them."""
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", "--no-pretty"]
    done = subprocess.run([*command, *map(str, programs)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if ": error:" in line]


@pytest.mark.parametrize("block", FRAGMENTS, ids=lambda block: block.where)
def test_a_config_is_one(block, monkeypatch):
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))  # a page registers its own model
    monkeypatch.setattr(own_attention, "REGISTERED", {})  # and another its own attention
    monkeypatch.setattr(config_checks, "REGISTERED", own_attention.REGISTERED)
    config = base_config("tiny")
    config.data.store = "runs/data"
    names = {"config": config}
    exec(block.text, names)
    runs = parse_stages(names["get_config"]() if "get_config" in names else config, inherit=False)
    assert len(runs) == max(1, len(config.stages))


@pytest.mark.parametrize("block", WITH_IMPORTS, ids=lambda block: block.where)
def test_what_is_imported_from_ringformer_is_there(block):
    names = [name for name in imports(block.text) if name.split(".")[0] == "ringformer" and "." in name]
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), f"{module} has no {attribute}"
    assert names


def imports(text: str) -> list[str]:
    """The dotted names that a program imports."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


@pytest.mark.parametrize("words", commands())
def test_a_command_is_one(words):
    program, *rest = words
    if program == "ringformer":
        check_verb(rest)
    elif program.startswith("--config."):
        load_config(ROOT / "configs" / "quickstart.py", words)
    elif program in ("bash", "sbatch"):
        check_script(rest)
    elif program in ("pip", ".venv/bin/pip"):
        check_pip(rest)
    elif program == "python":
        check_options_of_a_file(rest)
    elif program == ".venv/bin/pre-commit":
        assert rest == ["install"] and (ROOT / ".pre-commit-config.yaml").is_file()
    elif program in ("gcloud", "gcsfuse"):
        check_cloud(program, rest)
    elif program == "docker":
        check_docker(rest)
    elif program == "vllm":
        check_vllm(rest)
    elif program == "curl":
        json.loads(rest[rest.index("-d") + 1])
    elif program == "source":
        assert rest == [".venv/bin/activate"]
    else:
        assert program == "ls", f"no rule for {program}"


def check_verb(words: list[str]) -> None:
    """The verb's own parser takes the options, and what it leaves are overrides of keys that there are."""
    if words == ["--help"]:
        return
    verb = find_verb(words)
    args, overrides = make_parsers(verb)[1].parse_known_args(words[len(verb.split()) :])
    if overrides:
        assert getattr(args, "config", None), f"{overrides} are overrides of no config"
    if getattr(args, "config", None):
        load_config(ROOT / args.config, overrides)


def check_script(words: list[str]) -> None:
    """The script is there; a launch script is asked what it would execute."""
    script = next(i for i, word in enumerate(words) if not word.startswith("-"))
    path, options = ROOT / words[script], words[script + 1 :]
    assert path.is_file(), f"there is no {path}"
    if "parse_options" in path.read_text():  # of launch_options.sh, which has --dry-run
        if "..." in options:
            return
        command = ["bash", str(path), *options, "--dry-run"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
        assert done.returncode == 0 and "train" in done.stdout, done.stderr
    else:
        subprocess.run(["bash", "-n", str(path)], check=True)


def check_pip(words: list[str]) -> None:
    """What is installed is this repository, with extras that it has; or tools that CONTRIBUTING names."""
    assert words[0] == "install"
    if words[1] == "-e":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        named = re.fullmatch(r"\.(?:\[([\w,]+)\])?", words[2])
        assert named and {*(named[1] or "").split(",")} - {""} <= extras.keys(), words
    else:
        assert words[1:] == ["pre-commit"]


def check_cloud(program: str, words: list[str]) -> None:
    """It is a command that scripts/tpu_pod.sh runs, or tells its user to run."""
    script = " ".join((ROOT / "scripts" / "tpu_pod.sh").read_text().replace("\\\n", " ").split())
    expected = " ".join([program, *words]).replace(" NAME /mnt/share", "")
    assert expected in script


DOCKER_OPTIONS = {"--rm", "--init", "--gpus", "--ipc", "--stop-timeout", "--user", "--volume", "--env"}


def check_docker(words: list[str]) -> None:
    """It builds a Dockerfile of this repository, or runs a verb in an image that the pages build."""
    if words[0] == "build":
        assert words[1] == "-f" and (ROOT / words[2]).is_file() and words[3] == "-t" and words[5:] == ["."]
        return
    image = next(i for i, word in enumerate(words[1:], 1) if not word.startswith("-"))
    built = re.findall(r"^docker build .* -t (\S+)", "".join(b.text for b in BLOCKS), re.MULTILINE)
    assert words[0] == "run" and {word.split("=")[0] for word in words[1:image]} <= DOCKER_OPTIONS
    assert words[image] in built
    check_verb(words[image + 1 :])


def check_vllm(words: list[str]) -> None:
    """It serves a folder that a command of the pages exports, with options of vLLM."""
    exported = re.findall(r"^ringformer convert to-hf \S+ (\S+)", "".join(b.text for b in BLOCKS), re.MULTILINE)
    assert words[0] == "serve" and words[1] in exported
    assert set(words[2::2]) <= {"--max-model-len", "--tensor-parallel-size", "--served-model-name"}


def check_options_of_a_file(words: list[str]) -> None:
    path = ROOT / words[0]
    assert path.is_file(), f"there is no {path}"
    named = {word.split("=")[0] for word in words[1:] if word.startswith("-")}
    declared = {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and str(node.value).startswith("--")
    }
    assert named <= declared, f"{path} has no option {named - declared}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    """Links lead somewhere, and every path of a source file in the text is one: whole, or as it ends."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    generated = ("reference/config.md", "reference/api/")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    dead = [link for link in links if not (page.parent / link).exists() and not any(g in link for g in generated)]
    assert not dead
    files = [
        "/" + str(path.relative_to(ROOT))
        for folder in ("ringformer", "tests", "scripts", "experiments", "benchmarks", "configs")
        for path in (ROOT / folder).rglob("*.*")
    ]
    paths = re.findall(r"`((?:[\w.]+/)*\w+\.(?:py|sh))`", text) + re.findall(r"`(tests/[\w/]+/?)`", text)
    missing = [path for path in paths if not any(f.endswith("/" + path) or f.startswith(f"/{path}") for f in files)]
    assert not missing


def test_the_design_names_every_room_and_each_says_what_it_is_for():
    text = (ROOT / "docs" / "design.md").read_text()
    rooms = [path.parent for path in (ROOT / "ringformer").rglob("__init__.py")]
    assert [str(room) for room in rooms if not ast.get_docstring(ast.parse((room / "__init__.py").read_text()))] == []
    top = [room.name for room in rooms if room.parent == ROOT / "ringformer"]
    assert len(top) > 12 and [room for room in top if f"{room}/" not in text] == []
