"""The pictures: what they say is what the numbers say, and the committed ones say it too."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.paper_page.figures import (
    Contexts,
    draw_longest_contexts,
    draw_overlap,
    draw_training_cost,
    flops_ratio,
)
from benchmarks.paper_page.mfu_figure import COLORS, Bar, Shares, draw_training_mfu
from benchmarks.paper_page.ring_figures import causal_work, draw_layouts, draw_ring, draw_states
from ringformer.ops.layouts import VISIBLE
from ringformer.paper.training_mfu import cells

ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"


def words(path: Path) -> list[str]:
    """The texts of an SVG, in the order in which they are drawn."""
    return ["".join(e.itertext()).strip() for e in ElementTree.parse(path).iter() if e.tag.endswith("}text")]


def test_contiguous_work_is_uneven_and_the_others_are_even():
    for n in (2, 4, 8):
        work = causal_work("contiguous", n)
        assert work[-1] / work[0] == pytest.approx(2 * n - 1, rel=0.01) and work.mean() == pytest.approx(1)
        assert max(np.ptp(causal_work(layout, n)) for layout in VISIBLE if layout != "contiguous") < 2e-3 * n


def test_longest_contexts_say_their_multiples(tmp_path):
    rows = [Contexts("8xA100-80", "3B", 2**19, (2**21, 2**21, 2**22)), Contexts("v3", "7B", 2**20, (2**20, None, None))]
    draw_longest_contexts(rows, path=tmp_path / "a.svg")
    found = words(tmp_path / "a.svg")
    assert [word for word in found if word.endswith("×")] == ["4×", "8×", "1×"]  # two regimes share the first
    assert {"paper", "float32", "bf16", "bf16 + offload", "v3    7B"} <= {*found}


def test_overlap_stands_beside_its_closed_form(tmp_path):
    covers = {"forward_cover_over_link": 1.5, "backward_cover_over_link": 0.9}
    rows = [{"target": "v5e:4x2", "local": n} | covers for n in (8192, 16384)]
    smallest = {("v5e:4x2", name): 9000.0 for name in ("forward", "backward")}
    draw_overlap(rows, smallest, path=tmp_path / "a.svg")
    found = words(tmp_path / "a.svg")
    assert found.count("v5e") == found.count("hop exposed") == 2 and {"8K", "16K"} <= {*found}


@pytest.mark.parametrize("draw", [draw_ring, draw_layouts, draw_states, draw_training_cost])
def test_a_drawing_is_the_same_every_time_and_the_committed_one(draw, tmp_path):
    for name in ("a.svg", "b.svg"):
        draw(path=tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    committed = FIGURES / f"{draw.__name__.removeprefix('draw_')}.svg"
    assert words(tmp_path / "a.svg") == words(committed), "paper_page.ring_figures.write_drawings('docs/figures')"


@pytest.mark.parametrize("n", [2, 3])
def test_a_ring_of_another_size_is_drawn(n, tmp_path):
    draw_ring(n, path=tmp_path / "a.svg")
    found = words(tmp_path / "a.svg")
    assert sum(word == f"k{n - 1} v{n - 1}" for word in found) == 1 + n  # at home, and once a step


@pytest.mark.parametrize(
    ("hidden_size", "context", "ratio"),
    [(4096, 2**15, 2.00), (4096, 2**17, 5.43), (4096, 2**20, 37.4), (8192, 2**20, 20.6)],
)
def test_flops_of_a_dataset_are_those_of_figure_5(hidden_size, context, ratio):
    assert flops_ratio(hidden_size, context) == pytest.approx(ratio, rel=3e-3)


def test_the_committed_figure_of_longest_contexts_has_the_multiples_of_the_table():
    page = (ROOT / "docs" / "tables.md").read_text().partition("### m as in the paper")[2]
    table = []
    for line in page.partition("### m = 1")[0].splitlines():
        cells = line.split("|")[5:11:2]
        if line.startswith("| ") and "×)" in cells[0]:
            lengths = [cell.split("(")[0] for cell in cells]
            times = [re.search(r"\((.*)\)", cell)[1] for cell in cells]
            table += [times[i] for i in range(3) if lengths[i] not in lengths[i + 1 :]]
    assert len(table) > 30
    found = words(FIGURES / "longest_contexts.svg")
    assert [word for word in found if word.endswith("×")] == table
    marked = re.findall(r"⚠ ([\d.]+ days)", page.partition("### m = 1")[0])
    assert [word for word in found if word.endswith(" days")] == marked and len(marked) == 12


def test_mfu_is_drawn_as_far_as_it_is_known(tmp_path):
    """The ring's with its number, once for each convention; a configuration is named once."""
    whole, unknown = Shares(0.3, 0.25, 0.26), Shares(0.4, None, None)
    rows = [
        Bar("v4  65B", "float32, XLA", whole, Shares(0.2, 0.14, 0.15)),
        Bar("v4  65B", "bf16, XLA", unknown, unknown),
    ]
    draw_training_mfu(rows, (0.3, 0.35), path=tmp_path / "a.svg")
    found = words(tmp_path / "a.svg")
    assert [word for word in found if re.fullmatch(r"\d\d%", word) and word not in ("25%", "50%", "75%")] == [
        "26%",
        "15%",
    ]
    assert found.count("v4  65B") == 1 and {"paper", *COLORS} <= {*found}


def test_the_committed_figure_of_mfu_has_the_rings_of_the_table():
    page = (ROOT / "docs" / "tables.md").read_text().partition("## Table 4")[2].partition("### The executables")[0]
    rows = [line.split(" | ") for line in page.splitlines() if "→" in line]
    assert len(rows) == len(cells())
    printed = [float(row[column].split("%")[0]) for column in (6, 10) for row in rows]
    found = [word for word in words(FIGURES / "training_mfu.svg") if re.fullmatch(r"\d+%", word)]
    drawn = sorted(float(word[:-1]) for word in found)
    ticks = [25.0, 50.0, 75.0, 100.0] * 2
    assert drawn == pytest.approx(sorted([*printed, *ticks]), abs=0.51)


def test_the_committed_figure_of_the_overlap_names_its_targets():
    rows = json.loads((ROOT / "results" / "overlap.json").read_text())["rows"]
    targets = [row["target"].split(":")[0] for row in rows]
    assert {*targets} == {word for word in words(FIGURES / "overlap.svg") if re.fullmatch(r"v\d\w?", word)}


def test_pictures_are_small():
    sizes = {path.name: path.stat().st_size for path in FIGURES.iterdir()}
    assert len(sizes) == 13 and max(sizes.values()) < 120_000, sizes
