"""Text that no tool reads: scripts, workflows, Dockerfiles and pages name modules and files that exist.

ruff and mypy read Python files, shellcheck reads scripts. Nothing reads a program in a here-document, or a name in a
comment.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="an sdist has no .github")
TEXTS = sorted(
    path
    for pattern in (
        "*.md",
        "*.cff",
        "*.in",
        "*.toml",
        "*.yml",
        "justfile",
        ".pre-commit-config.yaml",
        ".ci/*",
        ".github/**/*.yml",
        ".github/**/*.md",
        "docker/*.Dockerfile",
        "docs/**/*.md",
        "notebooks/*.ipynb",
        "results/README.md",
        "scripts/**/*.sh",
        "scripts/**/*.py",
        "benchmarks/*.py",
        "configs/*.py",
    )
    for path in ROOT.glob(pattern)
)
PROGRAMS = [path for path in TEXTS if path.suffix in (".sh", ".yml", ".Dockerfile") or path.name == "justfile"]

MODULE = re.compile(r"(?<![\w./-])ringformer(?:\.[A-Za-z_]\w*)+")
FOLDERS = (
    "benchmarks",
    "configs",
    "docker",
    "docs",
    "experiments",
    "notebooks",
    "requirements",
    "results",
    "ringformer",
    "scripts",
    "tests",
)
PATH = re.compile(rf"(?<![\w./$}}-])(?:{'|'.join(FOLDERS)}|\.github)/(?:[\w.-]+/)*[\w.-]*\w")

OF_OTHER_PLACES = {
    "configs/road_config.py": "a copy that the walk of a page makes",
    "configs/road_lora_config.py": "a copy that the walk of a page makes",
    "configs/NAME.py": "a placeholder",
    "requirements/NAME.txt": "a placeholder",
    "results/needle": "an evaluation writes it",
    "ringformer/.venv": "on a host of a pod",
    "ringformer/.venv/bin/python": "on a host of a pod",
    "ringformer/requirements/train.txt": "on a host of a pod",
    "ringformer.code": "a file on a host of a pod",
    "ringformer.log": "a file on a host of a pod",
    "ringformer.tar.gz": "a file on a host of a pod",
}
"""Names that look like modules or paths of the repository, each with what it is."""


def attributes(module: Path) -> set[str]:
    """The names that a module binds at its top level, and those of every module."""
    names = {"__file__", "__path__", "__version__"}
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def is_module(name: str) -> bool:
    """Return whether a dotted name leads to a module, or to what a module binds."""
    folder = ROOT
    parts = name.split(".")
    for i, part in enumerate(parts):
        if (folder / part).is_dir():
            folder = folder / part
            continue
        file = folder / f"{part}.py"
        if file.is_file():
            return i + 1 == len(parts) or parts[i + 1] in attributes(file)
        return part in attributes(folder / "__init__.py")
    return (folder / "__init__.py").is_file()


def stale_names(text: str) -> list[str]:
    """The names of modules and of files in a text that lead nowhere."""
    modules = [name for name in MODULE.findall(text) if not is_module(name)]
    paths = [name for name in PATH.findall(text) if not (ROOT / name).exists()]
    return sorted(name for name in {*modules, *paths} if name not in OF_OTHER_PLACES)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_text_names_modules_and_files_that_exist(path):
    stale = stale_names(path.read_text())
    assert not stale, (
        f"{path.relative_to(ROOT)} names these, which do not exist: correct them, or list them in OF_OTHER_PLACES"
    )


def test_there_are_texts_of_every_kind():
    names = {str(path.relative_to(ROOT)) for path in TEXTS}
    assert {"README.md", "docs/index.md", "scripts/release.sh", "pyproject.toml", "docker/cpu.Dockerfile"} <= names
    assert len(PROGRAMS) > 15


@pytest.mark.parametrize(
    ("text", "stale"),
    [
        ("import ringformer.models.llama", ["ringformer.models.llama"]),
        ("`ringformer.ops.layouts.permute_everything`", ["ringformer.ops.layouts.permute_everything"]),
        ("see docs/nowhere.md, and scripts/release.sh.", ["docs/nowhere.md"]),
        ("- run: bash scripts/weekly.sh", ["scripts/weekly.sh"]),
        ("from ringformer.models.families.llama import LlamaConfig", []),
        ("python -m ringformer.cli, ringformer.ops.layouts.permutation, configs/quickstart.py", []),
    ],
)
def test_a_stale_name_is_found(text, stale):
    assert stale_names(text) == stale


def test_every_exception_is_used():
    """An exception that no text needs would hide a stale name later."""
    named = {name for path in TEXTS for pattern in (MODULE, PATH) for name in pattern.findall(path.read_text())}
    unused = sorted(OF_OTHER_PLACES.keys() - named)
    assert not unused, "no text has these names: delete them from OF_OTHER_PLACES"


HERE_DOCUMENT = re.compile(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1.*\n((?:.*\n)*?)\s*\2$", re.MULTILINE)
STATEMENT = re.compile(
    r"^\s*(?:import \w|from [\w.]+ import |def \w+\(|(?:set|local|export|source|exec) )", re.MULTILINE
)
QUOTED_PROGRAM = re.compile(r"(?:python\S*|\[0\]}\"|\"\$\w+\") -c (['\"])((?:(?!\1)[^\\]|\\.)*)\1")
BLOCK_OF_WORKFLOW = re.compile(r"^( *)- (?:run|.*\n\1  run): [|>].*$", re.MULTILINE)


def embedded_programs(text: str) -> list[str]:
    """The programs of several lines that a text holds, each by its first line."""
    here = [match[3] for match in HERE_DOCUMENT.finditer(text) if STATEMENT.search(match[3])]
    quoted = [match[2] for match in QUOTED_PROGRAM.finditer(text) if "\n" in match[2]]
    blocks = [match[0] for match in BLOCK_OF_WORKFLOW.finditer(text)]
    return [program.strip().splitlines()[0] for program in (*here, *quoted, *blocks)]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_holds_no_program_of_several_lines(path):
    found = embedded_programs(path.read_text())
    assert not found, f"move these programs to files that ruff, mypy or shellcheck read (scripts/checks): {found}"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("x=$(\n    cat <<'END'\nimport re\nprint(re)\nEND\n)\n", 1),
        ("python - <<END\nfrom os import path\nEND\n", 1),
        ("python3 -c 'import sys\nprint(sys.path)'\n", 1),
        ("    \"$python\" -c 'import sys\nprint(sys.path)'\n", 1),
        ("      - run: |\n          version=1\n          echo $version\n", 1),
        ("      - name: a tag\n        run: |\n          version=1\n", 1),
        ("usage() {\n    cat <<END\nusage: bash scripts/slurm.sh\n\n  --target=NAME  the GPUs\nEND\n}\n", 0),
        ("python3 -c 'import sys; print(sys.path)'\nread -r a <<<\"$b\"\n      - run: bash .ci/run\n", 0),
    ],
)
def test_a_program_in_a_script_is_found(text, count):
    assert len(embedded_programs(text)) == count
