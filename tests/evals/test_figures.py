"""The pictures of evaluations: read from the axes, and written as PNG."""

from itertools import count

import numpy as np
import pytest

from ringformer.evals import figures
from ringformer.evals.intervals import bootstrap
from ringformer.evals.perplexity import Loss
from ringformer.evals.ruler.tasks import TASKS


@pytest.fixture
def drawn_axes(monkeypatch):
    """The axes of the figures that are drawn, as they are when they are written."""
    from matplotlib.figure import Figure

    seen, save = [], Figure.savefig

    def savefig(figure, *args, **options):
        figure.canvas.draw()
        seen.extend(figure.axes)
        return save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return seen


NUMBERS = count()


def row(length, score, **more):
    tokens = (length or 500) - 100
    return {"length": length, "index": next(NUMBERS), "prompt_tokens": tokens, "score": score, "num_lines": 20, **more}


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_accuracy_over_context(drawn_axes, tmp_path):
    rows = [row(1124, 1), row(1124, 1), row(4196, 0), row(4196, 1)]
    figures.draw_accuracy(rows, "lines: x", path=tmp_path / "a.png")
    (axes,) = drawn_axes
    assert is_png(tmp_path / "a.png")
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "tokens of the prompt" and axes.get_ylim() == (0, 1)
    line = axes.lines[0]
    assert line.get_xdata().tolist() == [1024, 4096] and line.get_ydata().tolist() == [1, 0.5]
    assert [text.get_text() for text in axes.texts] == ["100%", "50%"]
    (bars,) = axes.collections
    ends = [[round(float(y), 3) for y in segment[:, 1]] for segment in bars.get_segments()]
    assert ends == [[0.342, 1], [0.095, 0.905]], "Wilson's of 2 of 2 and 1 of 2"
    assert [t.get_text() for t in axes.get_xticklabels()] == ["1K", "2K", "4K"] and axes.get_xlim() == (
        1024 / 1.25,
        5120,
    )


def test_intervals_of_questions_about_documents_are_drawn(drawn_axes, tmp_path):
    rows = [
        row(1124, score, index=i, question=j)
        for i, of in enumerate([[1, 1], [1, 0], [0, 0]])
        for j, score in enumerate(of)
    ]
    figures.draw_accuracy(rows, "lines: x", path=tmp_path / "a.png")
    (bars,) = drawn_axes[0].collections
    assert bars.get_segments()[0][:, 1].tolist() == list(bootstrap([2, 1, 0], [2, 2, 2])) == [0, 1]


def test_a_single_context_is_drawn(drawn_axes, tmp_path):
    figures.draw_accuracy([row(None, 1)], "lines: x", path=tmp_path / "a.png")
    assert is_png(tmp_path / "a.png") and drawn_axes[0].lines[0].get_xdata().tolist() == [400]


def test_a_heat_map_has_a_cell_for_each_length_and_depth(drawn_axes, tmp_path):
    rows = [row(4096, 1, depth=0.0), row(4096, 0, depth=0.0), row(4096, 1, depth=50.0), row(8192, 0, depth=50.0)]
    figures.draw_heat_map(rows, "needle: x", path=tmp_path / "n.png")
    axes = drawn_axes[0]
    assert is_png(tmp_path / "n.png")
    cells = axes.images[0].get_array()
    assert np.ma.filled(cells, -1).tolist() == [[0.5, -1], [1, 0]]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["4K", "8K"]
    assert [t.get_text() for t in axes.get_yticklabels()] == ["0%", "50%"]
    assert sorted(t.get_text() for t in axes.texts) == ["0", "100", "50"]


def test_tasks_have_a_line_each(drawn_axes, tmp_path):
    rows = [row(n, s, task=t) for t, s in (("vt", 0.25), ("cwe", 1)) for n in (1024, 2048)]
    figures.draw_tasks(rows, "ruler: x", path=tmp_path / "r.png")
    (axes,) = drawn_axes
    assert is_png(tmp_path / "r.png")
    assert {line.get_label(): line.get_ydata().tolist() for line in axes.lines} == {"cwe": [1, 1], "vt": [0.25, 0.25]}


def test_all_of_ruler_s_tasks_are_drawn_and_told_apart(drawn_axes, tmp_path):
    figures.draw_tasks([row(1024, 1, task=task) for task in TASKS], "ruler: x", path=tmp_path / "r.png")
    lines = drawn_axes[0].lines
    assert {line.get_label() for line in lines} == set(TASKS) and len(TASKS) == 13
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 13


def test_a_name_with_dollars_is_no_formula(drawn_axes, tmp_path):
    title = r"lines: cost$_{x}$\nope $\frac{1}"
    figures.draw_accuracy([row(1124, 1)], title, path=tmp_path / "a.png")
    assert is_png(tmp_path / "a.png") and drawn_axes[0].get_title(loc="left") == title


def test_losses_by_context_and_position(drawn_axes, tmp_path):
    context = {64: Loss(3.0, 10, 2.0), 128: Loss(2.5, 10, 1.5)}
    figures.draw_losses(context, {1: Loss(5.0, 1, 2.0), 2: Loss(4.0, 2, 1.0)}, "x", path=tmp_path / "p.png")
    left, right = drawn_axes
    assert is_png(tmp_path / "p.png")
    assert left.lines[0].get_ydata().tolist() == [3, 2.5] and right.lines[0].get_xdata().tolist() == [1, 2]
