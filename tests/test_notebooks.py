"""The notebooks run, cell by cell, in one fresh interpreter, and are committed as they ran."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu_flags import cpu_environment

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
ROW = re.compile(r"seed (\d+) +((?:\d+% *)+)$", re.MULTILINE)
ERROR = re.compile(r"^relative error .*?(\d\S*)$", re.MULTILINE)


def check_ring_attention(text: str) -> None:
    errors = [float(x) for x in ERROR.findall(text)]
    assert len(errors) == 3 and max(errors) < 1e-5


def check_long_context_retrieval(text: str) -> None:
    """The table has every accuracy of the results."""
    runs = json.loads((NOTEBOOKS[0].parents[1] / "results" / "retrieval.json").read_text())["runs"]
    found = [(int(seed), shares.split()) for seed, shares in ROW.findall(text)]
    assert found == [(run["seed"], [f"{row['accuracy']:.0%}" for row in run["accuracy"]]) for run in runs]


def check_in_context_rl(text: str) -> None:
    """It prints every return of the results, and the episode of the first case."""
    results = json.loads((NOTEBOOKS[0].parents[1] / "results" / "experience.json").read_text())
    rows = [row for row in results["summary"] if row["model"] == "run"]
    assert len(rows) == 5
    for row in rows:
        shares = (
            f"{row['return']:.1%} of the optimal return, {row['goal_in_context']:.1%} of the contexts show the goal"
        )
        assert f"n = {row['n']:>3}: {shares}" in text
        assert results["episodes"]["seed 1"][f"run, n = {row['n']}"]["actions"].split()[0] in text


CHECKS = {
    "ring_attention": check_ring_attention,
    "long_context_retrieval": check_long_context_retrieval,
    "in_context_rl": check_in_context_rl,
}


def code(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.usual("long_context_retrieval")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path):
    """From its own folder, as a Jupyter would."""
    source = "\n".join("".join(cell["source"]) for cell in code(path))
    environment = cpu_environment(MPLBACKEND="Agg", PYTHONPATH=str(path.parents[1]))
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    CHECKS[path.stem](done.stdout)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_what_a_notebook_imports_is_there(path):
    imports: list[ast.stmt] = []
    for cell in code(path):
        statements = ast.parse("".join(cell["source"])).body
        imports += [statement for statement in statements if isinstance(statement, ast.Import | ast.ImportFrom)]
    assert imports
    exec(compile(ast.Module(imports, type_ignores=[]), path.name, "exec"), {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_committed_as_it_ran(path):
    """From top to bottom, with its figures, and small."""
    cells = code(path)
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    text = "".join("".join(output["text"]) for output in outputs if output["output_type"] == "stream")
    CHECKS[path.stem](text)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert path.stat().st_size < 100_000
