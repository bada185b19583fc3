"""Figure of the paper's Table 4."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ringformer.plotting import FAINT, INK, RULE, drawn, label

COLORS = {"float32, XLA": "#3b75af", "bf16, XLA": "#c2570c", "bf16, Pallas": "#2c8a57", "bf16, cuDNN": "#7a5195"}
"""Colours of the variants by name."""


class Shares(NamedTuple):
    """MFU values by one convention; None if the run does not fit or is not known."""

    blockwise: float | None
    expected: float | None
    ring: float | None


class Bar(NamedTuple):
    """A configuration in one variant."""

    configuration: str
    variant: str
    palm: Shares
    causal: Shares


@drawn
def draw_training_mfu(plt, rows: Sequence[Bar], paper: tuple[float, float]) -> Any:
    """Draw Table 4 as dots: the baseline's MFU (open dot), the MFU that the baseline predicts for the ring (line), and
    the ring's MFU (filled dot).

    Args:
      rows: rows from top to bottom.
      paper: range of the paper's numbers, drawn as a band for its own convention.
    """
    figure, both = plt.subplots(1, 2, figsize=(8.6, 0.34 * len(rows) + 1.6), sharey=True, layout="constrained")
    names = ("counting all pairs (PaLM), as in the paper", "counting half of attention (causal)")
    for axes, name, field in zip(both, names, ("palm", "causal"), strict=True):
        for y, row in enumerate(rows):
            _row(axes, y, getattr(row, field), COLORS[row.variant])
            if y and row.configuration != rows[y - 1].configuration:
                axes.axhline(y - 0.5, color=RULE, linewidth=0.8)
        axes.set_title(name, fontsize=9.5)
        axes.set_xlim(0, 1)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"], fontsize=8.5)
        axes.grid(axis="x", color=RULE, linewidth=0.6)
        axes.tick_params(length=0)
        axes.spines["left"].set_visible(False)
    both[0].axvspan(*paper, color="#f0d9a8", alpha=0.6, linewidth=0, zorder=0)
    label(both[0], "paper", (sum(paper) / 2, -0.75), ha="center", fontsize=8.5, color=FAINT)
    labels = []
    before = ""
    for row in rows:
        labels.append("" if row.configuration == before else row.configuration)
        before = row.configuration
    both[0].set_yticks(range(len(rows)), labels, color=INK, fontsize=9)
    both[0].set_ylim(len(rows) - 0.4, -1.2)
    for i, (variant, color) in enumerate(COLORS.items()):
        label(both[1], variant, (0.26 * i, -0.75), ha="left", fontsize=7.8, color=color)
    figure.supxlabel(
        "modelled MFU   (open dot: blockwise, line: expected for the ring, filled dot: ring)", fontsize=9.5
    )
    return figure


def _row(axes, y: int, shares: Shares, color: str) -> None:
    blockwise, expected, ring = np.array(shares, float)  # None becomes NaN, which is not drawn
    axes.plot(blockwise, y, "o", markersize=7, color="white", markeredgecolor=color, markeredgewidth=1.5)
    axes.plot([expected] * 2, [y - 0.3, y + 0.3], color=color, linewidth=2)
    axes.plot(ring, y, "o", markersize=7, color=color, zorder=3)
    if not np.isnan(ring):
        ours = [ring, expected]
        place = np.nanmax(ours)
        shift = 7
        side = "left"
        if ring <= blockwise:  # the number stands on the side without the baseline's dot
            place = np.nanmin(ours)
            shift = -7
            side = "right"
        label(axes, f"{ring:.0%}", (place, y), (shift, 0), ha=side, fontsize=8, color=color)
