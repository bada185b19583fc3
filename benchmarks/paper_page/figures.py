"""Drawings of the paper's figures from our numbers.

Each function takes its data and the path to write; the suffix selects SVG or PNG.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from ringformer.plotting import FAINT, INK, RULE, drawn, label, log_tokens

RANK_COLORS = ("#3b75af", "#e1872f", "#4f9a5b", "#a06cc0")
REGIMES = {"float32": "#3b75af", "bf16": "#c2570c", "bf16 + offload": "#2c8a57"}
"""Label and colour of each regime of Table 3, in the order of `Contexts.ours`."""


class Contexts(NamedTuple):
    """Longest contexts of one row of Table 3, in tokens."""

    hardware: str
    model: str
    paper: int
    ours: tuple[int | None, ...]
    """Our contexts, in the order of `REGIMES`; None if unknown."""
    days: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Modelled days of one step at these contexts."""

    @property
    def longest(self) -> int:
        """The longest context, the paper's or ours."""
        return max([self.paper, *filter(None, self.ours)])


@drawn
def draw_longest_contexts(plt, rows: Sequence[Contexts]) -> Any:
    """Draw Table 3 as dots on a log axis: the paper's context, ours, and our multiples of the paper's."""
    figure, axes = plt.subplots(figsize=(8.6, 0.42 * len(rows) + 1.4), layout="constrained")
    for y, row in enumerate(rows):
        axes.plot([row.paper, row.longest], [y, y], color=RULE, linewidth=2, zorder=1)
        size = 15 if row.paper in row.ours else 7  # if both are equal, the paper's dot is a ring around ours
        axes.plot(row.paper, y, "o", markersize=size, color="white", markeredgecolor=FAINT, markeredgewidth=1.5)
        for i, (length, color, days) in enumerate(zip(row.ours, REGIMES.values(), row.days, strict=True)):
            if not length:
                continue
            # If two regimes reach the same context, one is a ring around the other's dot, and only the last is
            # labelled.
            before = row.ours[:i].count(length)
            after = row.ours[i + 1 :].count(length)
            axes.plot(length, y, "o", markersize=11 - 4 * before, color=color, zorder=3)
            if not after:
                label(axes, f"{length / row.paper:g}×", (length, y), (8, 0), color=color, fontweight="bold")
            if days > 1:
                side = "center"
                shift = 0
                if before:
                    side = "left"
                    shift = 3
                if after:
                    side = "right"
                    shift = -3
                style = {"ha": side, "va": "baseline", "fontsize": 7, "color": color}
                label(axes, f"{days:.1f} days", (length, y), (shift, -13), **style)
            if y == 0:
                side, shift = ("left", -6) if i == len(REGIMES) - 1 else ("center", 0)
                style = {"ha": side, "va": "baseline", "color": color}
                label(axes, [*REGIMES][i], (length, 0), (shift, 11 + 12 * after), **style)
        if y and row.hardware != rows[y - 1].hardware:
            axes.axhline(y - 0.5, color=RULE, linewidth=0.8)
    label(axes, "paper", (rows[0].paper, 0), (0, 11), ha="center", va="baseline", color=FAINT)
    axes.set_yticks(range(len(rows)), [f"{row.hardware}   {row.model:>3}" for row in rows], color=INK)
    axes.set_ylim(len(rows) - 0.4, -1.3)
    log_tokens(axes, min(row.paper for row in rows), max(row.longest for row in rows))
    axes.set_xlabel(
        "longest context that trains, in tokens (compiled; × the paper's context; float32 is like for like)\n"
        "days: modelled duration of one step, if it exceeds a day"
    )
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    return figure


@drawn
def draw_training_cost(plt) -> Any:
    """Draw Figure 5: FLOPs of a pass over the same tokens at a longer context, relative to a context of 4096."""
    figure, axes = plt.subplots(figsize=(7.4, 4), layout="constrained")
    lengths = [4096 * 2**i for i in range(12)]
    widths = {"7B": 4096, "13B": 5120, "33B": 6656, "65B": 8192, "175B": 12288, "1T": 36864}
    height = math.inf
    for name, color in zip(widths, plt.get_cmap("viridis")(np.linspace(0, 0.8, len(widths))), strict=True):
        ratios = [flops_ratio(widths[name], length) for length in lengths]
        height = min(ratios[-1], 0.75 * height)  # below the previous label
        axes.plot(lengths, ratios, color=color, linewidth=2)
        label(axes, f"{name}: {ratios[-1]:.0f}×", (lengths[-1], height), (6, 0), color=color, fontsize=9.5)
    log_tokens(axes, lengths[0], lengths[-1], pad=1.06)
    axes.set_yscale("log")
    axes.set_yticks([1, 10, 100], ["1×", "10×", "100×"])
    axes.minorticks_off()
    title = "FLOPs of a pass over the same data, relative to a context of 4K; at 8M:"
    axes.set(xlabel="context in tokens", title=title)
    return figure


def flops_ratio(hidden_size: int, context: int, baseline: int = 4096) -> float:
    """Return the FLOPs of a pass over a dataset at a context, relative to the baseline: (6 h + s2) / (6 h + s1).
    Attention is not halved for the causal mask."""
    return (6 * hidden_size + context) / (6 * hidden_size + baseline)


@drawn
def draw_overlap(plt, rows: Sequence[Mapping[str, Any]], smallest: Mapping[tuple[str, str], float]) -> Any:
    """Draw how well hops are hidden: the time of the computation scheduled during a hop, relative to the hop's time on
    the link.

    Args:
      rows: rows of results/overlap.json, with target, local, forward_cover_over_link and backward_cover_over_link.
      smallest: smallest local length that hides a hop by the closed form, by (target, "forward" or "backward").
    """
    by_target = defaultdict(list)
    for row in rows:
        by_target[row["target"]].append(row)
    lengths = sorted({row["local"] for row in rows})
    figure, both = plt.subplots(1, 2, figsize=(8.6, 3.9), sharey=True, layout="constrained")
    for axes, name in zip(both, ("forward", "backward"), strict=True):
        axes.axhspan(0.25, 1, color="#fbe9e7", linewidth=0)
        for (target, mine), color in zip(by_target.items(), cycle(RANK_COLORS), strict=False):
            axes.plot(lengths, np.divide(lengths, smallest[target, name]), color=color, alpha=0.35)
            covers = [row[f"{name}_cover_over_link"] for row in mine]
            axes.plot([row["local"] for row in mine], covers, "o", color=color, markersize=6)
            name_of_chip = target.split(":")[0]
            end = (lengths[-1], covers[-1])
            label(axes, name_of_chip, end, (9, 0), fontsize=10, color=color, fontweight="bold")
        axes.text(lengths[0] * 0.85, 4.9, "hop hidden", fontsize=9, color=FAINT, va="top")
        axes.text(lengths[-1] * 1.3, 0.28, "hop exposed", fontsize=9, color="#a33a2a", ha="right", va="bottom")
        log_tokens(axes, lengths[0], lengths[-1], ticks=lengths, pad=1.35)
        axes.set(title=name, ylim=(0.25, 5.5))
        axes.set_yscale("log", base=2)
        axes.set_yticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"])
        axes.minorticks_off()
    both[0].set_ylabel("computation under a hop / its link time")
    figure.supxlabel("tokens on a device  (dots: the compiled schedule, lines: the closed form)", fontsize=10)
    return figure


@drawn
def draw_parallelism(
    plt, tokens: Sequence[int], lines: Mapping[str, Sequence[float]], points: Sequence[tuple[str, int, float]]
) -> Any:
    """Draw seconds of a step over tokens on a device, relative to the fastest way by the closed form.

    Args:
      tokens: tokens on a device, for each of the seconds of a line.
      lines: seconds of a step by way to compute attention, by the closed form.
      points: (way, tokens on a device, seconds) of compiled steps.
    """
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    fastest = np.min(list(lines.values()), axis=0)
    for (name, seconds), color in zip(lines.items(), cycle(RANK_COLORS), strict=False):
        axes.plot(tokens, np.divide(seconds, fastest), color=color, linewidth=1.8, label=name)
        compiled = []
        ratios = []
        for way, n, taken in points:
            if way == name:
                compiled.append(n)
                ratios.append(taken / fastest[list(tokens).index(n)])
        axes.plot(compiled, ratios, "o", color=color, markersize=6)
    log_tokens(axes, tokens[0], tokens[-1], ticks=tokens, pad=1.35)
    axes.legend(frameon=False)
    axes.set_ylabel("seconds of a step / fastest line")
    axes.set_xlabel("tokens on a device  (dots: compiled, lines: the closed form)")
    return figure
