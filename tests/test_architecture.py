"""The house: imports run downward only, and no file imports itself by way of others."""

import ast
import re
from pathlib import Path

import pytest

import ringformer

ROOT = Path(ringformer.__file__).parent
FLOORS = (
    ("hardware",),
    ("files",),
    ("plotting", "settings"),
    ("cli",),
    ("ops",),
    ("models",),
    ("data",),
    ("parallel",),
    ("processes",),
    ("checkpoints",),
    ("runs",),
    ("train",),
    ("inference",),
    ("convert",),
    ("evals",),
    ("estimate",),
    ("paper",),
    ("__main__",),
)
"""From the ground up: a module imports its own room and the floors below, of those on one floor none the other."""
DATA_FLOORS = (
    ("optional_packages",),
    ("sources",),
    ("tokenizers",),
    ("chats",),
    ("stores",),
    ("packing",),
    ("loader",),
    ("commands",),
)
ESTIMATE_FLOORS = (
    ("workloads",),
    ("compiled",),
    ("seconds",),
    ("closed_forms",),
    ("compiler",),
    ("kernels",),
    ("choices",),
    ("reports",),
    ("search", "inference", "training_command"),
    ("commands",),
)
PUBLIC = "__init__"


BEGINNINGS = ("ringformer.", "benchmarks.", "experiments.", "scripts.")


def modules() -> dict[str, Path]:
    paths = {".".join(("ringformer", *p.relative_to(ROOT).with_suffix("").parts)): p for p in ROOT.rglob("*.py")}
    return {name.removesuffix(f".{PUBLIC}"): path for name, path in paths.items() if name != f"ringformer.{PUBLIC}"}


def named_modules(path: Path) -> set[str]:
    """The modules of ringformer that a file imports, anywhere in it, or names in a string, for a subprocess say."""
    text = path.read_text()
    named = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named |= set(re.findall(r"(?:^|(?:\bimport|\bfrom|-m) )(ringformer(?:\.\w+)+)", node.value))
    return {name for name in named if name.startswith(BEGINNINGS)}


def floor(module: str, floors, depth: int) -> tuple[int, str]:
    room = module.split(".")[depth]
    return next(i for i, rooms in enumerate(floors) if room in rooms), room


ROOMS = [
    ("ringformer.", FLOORS, 1),
    ("ringformer.data.", DATA_FLOORS, 2),
    ("ringformer.estimate.", ESTIMATE_FLOORS, 2),
]


@pytest.mark.parametrize(("inside", "floors", "depth"), ROOMS)
def test_imports_run_downward(inside, floors, depth):
    wrong = []
    for name, path in modules().items():
        if not name.startswith(inside) or name == f"{inside}{PUBLIC}":
            continue
        for target in (t for t in named_modules(path) if t.startswith(inside)):
            (here, room), (there, other) = floor(name, floors, depth), floor(target, floors, depth)
            if there > here or (there == here and room != other):
                wrong.append(f"{name} names {target}")
    assert not wrong


def programs() -> dict[str, Path]:
    """The files of Python that stand beside the package and import one another."""
    folders = [ROOT.parent / name for name in ("benchmarks", "experiments", "scripts")]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    return {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in paths}


@pytest.mark.parametrize("files", [modules, programs])
def test_no_circle(files):
    """Of files, whatever room they stand in; imports inside of functions count."""
    known = files()
    uses = {name: {t for t in named_modules(path) if t in known} - {name} for name, path in known.items()}
    while free := {name for name, targets in uses.items() if not targets & set(uses)}:
        uses = {name: targets for name, targets in uses.items() if name not in free}
    assert not uses, "these import one another"


def test_every_file_has_its_floor():
    assert {name.split(".")[1] for name in modules()} == {room for rooms in FLOORS for room in rooms}


def test_no_hint_names_a_package_that_no_index_has():
    """ringformer is installed from a clone: `pip install -e .`. The package itself may name its extras, because pip
    takes a package that is installed, from a wheel or a clone, for the one that is named."""
    house = ROOT.parent
    files = [
        p
        for d in (ROOT, *(house / d for d in ("benchmarks", "configs", "docs", "experiments", "notebooks", "scripts")))
        for p in d.rglob("*")
        if p.suffix in (".py", ".md", ".sh", ".ipynb")
    ]
    files += [*house.glob("*.md"), house / "setup.py"]
    hint = re.compile(r"pip install (--?\w+ )*['\"]?ringformer\b(?!/)")
    assert len(files) > 80 and hint.search("pip install -U 'ringformer[tpu]'")
    extra = re.compile(r"pip install 'ringformer\[[\w{}]+\]'")
    texts = {path: path.read_text() for path in files}
    texts |= {path: extra.sub("", text) for path, text in texts.items() if path.is_relative_to(ROOT)}
    assert [str(path) for path, text in texts.items() if hint.search(text)] == []
    assert sum(len(extra.findall(path.read_text())) for path in files if path.is_relative_to(ROOT)) >= 4


def test_the_package_advises_what_works_without_a_clone():
    clone_alone = re.compile(r"pip install -e|in the clone of|setup_venv")
    assert clone_alone.search("pip install -e '.[data]' in the clone of ringformer")
    assert [name for name, path in modules().items() if clone_alone.search(path.read_text())] == []


def constants(path: Path) -> set[str]:
    return {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}


def test_names_of_a_run_s_files_are_spelt_once():
    """But for Hugging Face's own config.json, where its checkpoints are read, written or recognised."""
    names = {"config.json", "checkpoints", "metrics.jsonl", "identity.json"}
    converters = "export_hf", "hf_config", "import_hf", "verify_logits"
    hugging_face = {f"ringformer.convert.{name}" for name in converters}
    hugging_face |= {
        "ringformer.data.tokenizers.special_tokens",
        "ringformer.evals.model_folder",
        "ringformer.files.hub",
    }
    spelt = {name: constants(path) & names for name, path in modules().items()}
    places = {name for name, words in spelt.items() if words - ({"config.json"} if name in hugging_face else set())}
    assert places == {"ringformer.files.run_layout"}


@pytest.mark.parametrize("room", ["inference", "convert", "evals"])
def test_what_reads_models_knows_nothing_of_training(room):
    own = {name: path for name, path in modules().items() if name.startswith(f"ringformer.{room}")}
    assert own and [name for name, path in own.items() if any(".train" in used for used in named_modules(path))] == []


def test_no_line_is_exempt_from_the_formatter():
    exempt = "fmt: " + "skip", "fmt: " + "off"
    house = ROOT.parent
    files = [
        path
        for folder in ("ringformer", "tests", "scripts", "experiments", "benchmarks", "configs")
        for path in (house / folder).rglob("*.py")
    ]
    assert len(files) > 300 and [str(path) for path in files if any(word in path.read_text() for word in exempt)] == []
