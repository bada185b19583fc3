"""Figures of evaluations."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from ringformer.evals.case_file import Row
from ringformer.evals.perplexity.losses import Loss
from ringformer.evals.tables import accuracy_interval, contexts, grouped, mean, mean_scores, mean_tokens, score_interval
from ringformer.plotting import INK, RULE, drawn, label

COLOR = "#3b75af"
TASK_COLORS = ("#3b75af", "#c2570c", "#2c8a57", "#a06cc0", "#8c6d31", "#6e7781", "#b5446e")
TASK_LINES = ("o-", "s--")
"""Line styles; the second is for tasks beyond the number of colors, which then repeat."""
PERCENT = "{x:.0%}"
"""Format of shares on an axis."""
Interval = Callable[[Sequence[Row]], tuple[float, float]]
"""Function that returns the 95% interval of the mean score of some rows."""
CURVE: Any = {"linewidth": 2, "markersize": 5, "clip_on": False, "zorder": 3}
"""Style of every curve."""


@drawn
def draw_accuracy(plt, rows: Sequence[Row], title: str) -> Any:
    """Plot the accuracy of line retrieval over prompt tokens, as in the paper's Figure 3, with 95% intervals."""
    return _curve(plt, list(contexts(rows).values()), accuracy_interval, "accuracy", title)


@drawn
def draw_scores(plt, rows: Sequence[Row], title: str) -> Any:
    """Plot the mean score over prompt tokens, with 95% intervals."""
    return _curve(plt, list(grouped(rows, "length").values()), score_interval, "mean score", title)


def _curve(plt, groups: Sequence[Sequence[Row]], interval: Interval, what: str, title: str) -> Any:
    """Plot the mean score of each group over its prompt tokens."""
    tokens = np.array(list(map(mean_tokens, groups)))
    scores = np.array(list(map(mean, groups)))
    low, high = np.transpose(list(map(interval, groups)))
    figure, axes = plt.subplots(figsize=(7.4, 3.8), layout="constrained")
    errors = np.maximum((scores - low, high - scores), 0)
    axes.errorbar(tokens, scores, errors, color=COLOR, marker="o", elinewidth=1, capsize=2, **CURVE)
    for x, y in zip(tokens, scores, strict=True):
        label(axes, f"{y:.0%}", (x, y), (5, 5 if y < 0.9 else -13), va="baseline", color=COLOR)
    _context_axis(axes, tokens)
    _percent_axis(axes)
    axes.set(xlabel="tokens of the prompt", ylabel=f"{what}, 95% interval", title=title)
    return figure


@drawn
def draw_heat_map(plt, rows: Sequence[Row], title: str) -> Any:
    """Plot the score of needles over context and depth; cells that were not evaluated are empty."""
    lengths = grouped(rows, "length")
    depths = grouped(rows, "depth")
    cells = np.array([mean_scores(group, lengths) for group in depths.values()])
    size = (max(4.6, 0.75 * len(lengths) + 2.4), max(2.6, 0.42 * len(depths) + 1.6))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    image = axes.imshow(cells, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for i, j in np.argwhere(~np.isnan(cells)):
        color = INK if cells[i, j] > 0.6 else "white"
        axes.text(j, i, f"{100 * cells[i, j]:.0f}", ha="center", va="center", fontsize=9, color=color)
    axes.set_xticks(range(len(lengths)), map(_tokens, lengths))
    axes.set_yticks(range(len(depths)), map("{:g}%".format, depths))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set(xlabel="tokens of the context", ylabel="depth of the needle", title=title)
    bar = figure.colorbar(image, ax=axes, ticks=[0, 0.5, 1], pad=0.02, shrink=0.9, format=PERCENT)
    bar.outline.set_visible(False)
    return figure


@drawn
def draw_tasks(plt, rows: Sequence[Row], title: str) -> Any:
    """Plot the score of each of RULER's tasks over the context."""
    figure, axes = plt.subplots(figsize=(7.8, 3.8), layout="constrained")
    looks = product(TASK_LINES, TASK_COLORS)
    for (task, group), (line, color) in zip(grouped(rows, "task").items(), looks, strict=False):
        lengths = list(grouped(group, "length"))
        axes.plot(lengths, mean_scores(group, lengths), line, color=color, label=task, **CURVE)
    _context_axis(axes, list(grouped(rows, "length")))
    _percent_axis(axes)
    axes.set(xlabel="tokens of the context", ylabel="recall of the references", title=title)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9, handlelength=3)
    return figure


@drawn
def draw_losses(plt, panels: Mapping[str, Mapping[int, Loss]], title: str) -> Any:
    """Plot losses over a number of tokens, with their 95% intervals: a panel for each title."""
    size = max(6.2, 4.3 * len(panels)), 3.6
    figure, axes_of_all = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axes, (name, losses) in zip(axes_of_all[0], panels.items(), strict=True):
        nats = []
        spreads = []
        for loss in losses.values():
            low, high = loss.interval or (loss.nats, loss.nats)
            nats.append(loss.nats)
            spreads.append((loss.nats - low, high - loss.nats))
        if losses:
            errors = np.maximum(np.transpose(spreads), 0)
            axes.errorbar(list(losses), nats, errors, color=COLOR, marker="o", elinewidth=1, capsize=2, **CURVE)
            _context_axis(axes, list(losses))
        axes.grid(axis="y", color=RULE, linewidth=0.6)
        axes.tick_params(length=0)
        axes.set_xlabel(name, fontsize=9)
    axes_of_all[0, 0].set_ylabel("nats per token, 95% interval")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _tokens(count: float) -> str:
    """Format a number of tokens in powers of 1024: 300, 1.5K, 2K, 1M."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"


def _context_axis(axes, tokens: Sequence[float] | np.ndarray) -> None:
    """Set up a log axis of tokens with a tick at most every factor of two."""
    low = min(tokens)
    high = max(tokens)
    ticks = 2 ** np.arange(np.floor(np.log2(low)), np.ceil(np.log2(high)) + 1)
    ticks = ticks[:: -(-len(ticks) // 9)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, map(_tokens, ticks))
    axes.set_xlim(low / 1.25, high * 1.25)
    axes.minorticks_off()


def _percent_axis(axes) -> None:
    axes.set(ylim=(0, 1), yticks=[0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PERCENT)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.tick_params(length=0)
