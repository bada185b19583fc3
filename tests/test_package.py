"""The package as it is built and installed: what it needs is declared and locked, what it ships is inside."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ringformer.ops.kernels.chunk_sizes import TABLES

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCKS = {
    "train": ["train", "plot"],
    "cuda": ["train", "plot", "cuda"],
    "test": ["test"],
    "docs": ["docs"],
    "dev": ["dev"],
}
"""The lock files of scripts/lock.sh, with the extras that they hold; docs.txt holds that extra alone."""

UNLOCKED = {"torch"}
"""The machine decides which build it gets."""

ENDS = {"3.11": "0.10.2", "3.12": "0.12.0.1"}
"""Python, and the JAX that is tested with it."""

MODULES = {"absl-py": "absl", "beautifulsoup4": "bs4", "orbax-checkpoint": "orbax", "ringformer": "ringformer"}
"""Of distributions whose module has another name."""


def requirements(extra, *, base=True):
    """What an extra asks for, extras of ringformer itself resolved, and the base with it."""
    found, todo, seen = [Requirement(r) for r in PROJECT["dependencies"] if base], [extra], set()
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            for wanted in map(Requirement, EXTRAS[name]):
                if wanted.name == "ringformer":
                    todo += sorted(wanted.extras)
                else:
                    found.append(wanted)
    return found


def pins(lock, python):
    """The versions that pip would take from a lock file on linux x86_64."""
    machine = {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found = {}
    for line in (ROOT / f"requirements/{lock}.txt").read_text().splitlines():
        if line[:1].isalnum():
            pin = Requirement(line.rstrip(" \\"))
            if pin.marker is None or pin.marker.evaluate(machine):
                ((operator, version),) = [(s.operator, s.version) for s in pin.specifier]
                assert operator == "==" and pin.name not in found, line
                found[pin.name] = version
    return found


@pytest.mark.parametrize("python", ENDS)
@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_file_holds_what_its_extras_ask_for(lock, python):
    found = pins(lock, python)
    own = lock == "docs"
    wanted = [r for extra in LOCKS[lock] for r in requirements(extra, base=not own) if r.name not in UNLOCKED]
    missing = [str(r) for r in wanted if not r.specifier.contains(found.get(canonicalize_name(r.name), "0"))]
    assert not missing, "bash scripts/lock.sh"
    assert own or (found["jax"] == found["jaxlib"] == ENDS[python] and "setuptools" in found)
    assert ("jax" in found) != own, "the site is made from sources"


@pytest.mark.parametrize("lock", LOCKS)
def test_everything_locked_has_hashes_and_only_cuda_is_of_gigabytes(lock):
    text = (ROOT / f"requirements/{lock}.txt").read_text()
    entries = re.split(r"\n(?=[a-z])", text[text.index("\n", text.index("lock.sh")) :].strip())
    assert len(entries) > 20 and all("--hash=sha256:" in entry for entry in entries)
    of_gigabytes = re.findall(r"^(nvidia|cuda|triton|torch|jax-cuda)", text, re.MULTILINE)
    assert set(of_gigabytes) == ({"nvidia", "jax-cuda"} if lock == "cuda" else set())
    assert "://" not in text and "file:" not in text, "any index will do: the hashes say which files"


def test_lock_files_agree():
    for python in ENDS:
        everything = pins("dev", python)
        for lock in LOCKS:
            gpu = {name for name in pins(lock, python) if re.match("nvidia-|jax-cuda", name)}
            assert {name: v for name, v in pins(lock, python).items() if name not in gpu}.items() <= everything.items()
            assert bool(gpu) == (lock == "cuda")


def test_both_ends_of_the_range_are_allowed():
    (jax,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "jax"]
    assert all(version in jax.specifier for version in ENDS.values()) and "0.13.0" not in jax.specifier


def test_the_page_of_what_is_supported_names_both_ends():
    page = (ROOT / "docs" / "support.md").read_text()
    classified = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r"Python :: \d\.\d", c)}
    assert classified == set(ENDS)
    for python, jax in ENDS.items():
        assert f"{jax} on Python {python}" in page and f"{pins('test', python)['flax']} on Python {python}" in page
    assert f"{min(ENDS)} or newer" in page and PROJECT["requires-python"] == f">={min(ENDS)}"


def imported(path):
    """The top-level names that a file imports from outside the standard library."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        yield from {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def modules(wanted):
    return {MODULES.get(r.name, r.name.replace("-", "_")) for r in wanted} | {"ringformer"}


def test_the_op_and_the_model_need_the_base_alone():
    base = modules(map(Requirement, PROJECT["dependencies"]))
    for room in ("ops", "models"):
        files = list((ROOT / "ringformer" / room).rglob("*.py"))
        assert files
        assert {name for path in files for name in imported(path)} <= base | {"jaxlib"}
    assert not base & {"datasets", "pyarrow", "matplotlib", "torch", "transformers"}


def test_every_import_is_declared():
    """In the base or an extra; `data` needs no more than base and its own."""
    known = {name for extra in EXTRAS for name in modules(requirements(extra))}
    found = {name for path in (ROOT / "ringformer").rglob("*.py") for name in imported(path)}
    assert found <= known and {"optax", "absl", "bs4", "tensorstore", "ml_dtypes"} <= found
    data = {name for path in (ROOT / "ringformer/data").rglob("*.py") for name in imported(path)}
    assert data <= modules(requirements("data"))


LEFT_BY_TOOLS = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info")


def not_source(folder, names: list[str]) -> set[str]:
    """The names in a folder that are not sources; at the top, also the folder of runs, which the quickstart makes."""
    return LEFT_BY_TOOLS(folder, names) | ({"runs"} & set(names) if Path(folder) == ROOT else set())


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the sources, since setuptools leaves its folders beside setup.py."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("tree") / "ringformer", ignore=not_source))


def build(tree, what, **environment):
    """`build_wheel` or another of PEP 517, in the copy; the path of what it made."""
    code = f"from setuptools.build_meta import {what} as make; print('made', make('.'))"
    command, environment = [sys.executable, "-c", code], {**os.environ, **environment}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tree / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tree):
    with zipfile.ZipFile(build(tree, "build_wheel")) as opened:
        yield opened


def test_an_sdist_has_all_that_a_clone_has(tree):
    with tarfile.open(build(tree, "build_sdist")) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    files = {str(path.relative_to(ROOT)) for path in ROOT.iterdir() if path.is_file()}
    for folder in (path for path in ROOT.iterdir() if path.is_dir() and not not_source(ROOT, [path.name])):
        files |= {str(path.relative_to(ROOT)) for path in folder.rglob("*") if path.is_file()}
    files = {name for name in files if not not_source("", name.split("/"))}
    assert {"tests/test_package.py", "docs/design.md", "docs/figures/ring.svg", "scripts/docs.sh"} <= files
    assert files <= packed and all(name in files or "egg-info" in name for name in packed - {"PKG-INFO", "setup.cfg"})


def test_an_editable_package_is_a_path_that_type_checkers_read(tree):
    with zipfile.ZipFile(build(tree, "build_editable")) as opened:
        (path,) = [name for name in opened.namelist() if name.endswith(".pth")]
        assert Path(opened.read(path).decode().strip()) == tree
        assert not [name for name in opened.namelist() if name.endswith(".py")]


FILES = "https://example.org/raw/v1/"


@pytest.mark.parametrize("address", ["", FILES])
def test_an_index_page_has_no_dead_picture(tree, address):
    folder = build(tree, "prepare_metadata_for_build_wheel", README_FILES=address)
    page = Parser().parsestr((folder / "METADATA").read_text()).get_payload()
    links = re.findall(r"!?\[[^\]]*\]\(([^)]*)\)", page)
    assert links and all("://" in link for link in links)
    pictures = [FILES + path for path in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", (ROOT / "README.md").read_text())]
    assert len(pictures) >= 3 and set(pictures) & set(links) == (set(pictures) if address else set())
    assert "Queries stay on their device" in page


def test_a_wheel_ships_the_configs_and_the_scripts_that_need_no_clone(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "ringformer").rglob("*.py")}
    configs = {f"ringformer/configs/{path.name}" for path in ROOT.glob("configs/*.py")}
    parts = ("gpu_node.sh", "launch_options.sh", "option_values.sh", "slurm.sh")
    scripts = {f"ringformer/scripts/{name}" for name in parts}
    chunks = {f"ringformer/ops/kernels/chunk_tables/{path.name}" for path in TABLES.glob("*.json")}
    assert len(configs) >= 8 and chunks
    data = {"py.typed", "hardware/chips.toml", "evals/texts/moby_dick.txt.bz2", "train/config_keys.txt"}
    assert names == modules | configs | scripts | chunks | {f"ringformer/{name}" for name in data}


def test_a_wheel_s_metadata(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert (metadata["Name"], metadata["Version"]) == ("ringformer", PROJECT["version"])
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra")) == set(EXTRAS)
    (entry,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert b"ringformer = ringformer.cli:main" in wheel.read(entry)


def test_the_version_stands_once():
    pattern = re.compile(rf"['\"]{re.escape(PROJECT['version'])}['\"]")
    files = [ROOT / "setup.py", *(ROOT / "ringformer").rglob("*.py"), *ROOT.glob("docs/*.md")]
    assert [str(path) for path in files if pattern.search(path.read_text())] == []
