"""Style and output of every figure: SVG or PNG by the suffix of its file.

Text in an SVG stays text, and the background is white, so that figures look the same on light and dark pages.
"""

import importlib.util
import io
import math
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from ringformer.files.atomic import write_whole

INK = "#24292f"
FAINT = "#6e7781"
RULE = "#d8dee4"

STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ringformer",
    "font.family": "sans-serif",
    "font.size": 10,
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial", "sans-serif"],
    "figure.facecolor": "white",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": RULE,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "text.parse_math": False,  # names may contain $
}


def check_matplotlib() -> None:
    """Raise ValueError if matplotlib is missing; called before a figure's data are computed for hours."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("figures need matplotlib: pip install 'ringformer[plot]'")


def drawn(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Turn `draw(plt, *data) -> figure` into a function of (*data, path) that writes the figure reproducibly."""

    @wraps(draw)
    def write(*data, path: Path | str) -> None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        with plt.rc_context(STYLE):
            figure = draw(plt, *data)
            metadata = {"Date": None} if Path(path).suffix == ".svg" else None
            image = io.BytesIO()
            kind = Path(path).suffix.removeprefix(".")
            figure.savefig(image, format=kind or None, dpi=120, metadata=metadata, bbox_inches="tight", pad_inches=0.1)
            plt.close(figure)
        write_whole(Path(path), image.getvalue())

    return write


def label(axes: Any, text: str, point: tuple[float, float], offset: tuple[float, float] = (0, 0), **style: Any) -> None:
    """Write a text at a point of the data, moved by an offset in points; the point may lie outside the axes."""
    style = {"fontsize": 9, "va": "center", "annotation_clip": False} | style
    axes.annotate(text, point, offset, textcoords="offset points", **style)


def _tokens(count: int) -> str:
    if count < 2**10:
        return str(count)
    return f"{count // 2**10}K" if count < 2**20 else f"{count // 2**20}M"


def log_tokens(axes: Any, low: float, high: float, ticks: Sequence[int] | None = None, pad: float = 1.7) -> None:
    """Make a log axis of tokens from low to high, labelled 4K, 1M, ..."""
    axes.set_xscale("log", base=2)
    ticks = ticks or [2**i for i in range(math.ceil(math.log2(low)), int(math.log2(high)) + 1, 2)]
    axes.set_xlim(low / pad ** (0.8 if pad < 1.5 else 0.6), high * pad)
    axes.set_xticks(ticks, [_tokens(t) for t in ticks])
    axes.minorticks_off()
    axes.grid(axis="x", color=RULE, linewidth=0.6)
