"""The pictures of README and docs: the ring and its layouts drawn, and the paper's figures from our own numbers.

Each function takes its data and the path to write, SVG or PNG by its suffix. Text stays text in an SVG, and the ground
is white, so that a picture reads the same on a light page and on a dark one. What the drawings show of a layout is
computed from `ringformer.ops.layouts`.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ringformer.drawing import FAINT, INK, RULE, drawn, log_tokens
from ringformer.ops.layouts import VISIBLE, Layout, permutation

RANK_COLORS = ("#3b75af", "#e1872f", "#4f9a5b", "#a06cc0")
REGIMES = {"float32": "#3b75af", "bf16": "#c2570c", "bf16 + offload": "#2c8a57"}
"""The label and colour of each regime of Table 3, in the order of `Contexts.ours`."""


class Contexts(NamedTuple):
    """The longest contexts of one row of Table 3, in tokens."""

    hardware: str
    model: str
    paper: int
    ours: tuple[int | None, int | None, int | None]
    """In the order of `REGIMES`; None: not known yet."""
    days: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Modelled days of one step there."""


@drawn
def draw_longest_contexts(plt, rows: Sequence[Contexts]) -> Any:
    """Table 3 as dots on a log axis: the paper's context, ours, and how many times the paper's ours are."""
    figure, axes = plt.subplots(figsize=(8.6, 0.42 * len(rows) + 1.4), layout="constrained")
    for y, row in enumerate(rows):
        known = [x for x in row.ours if x]
        axes.plot([row.paper, max([row.paper, *known])], [y, y], color=RULE, linewidth=2, zorder=1)
        size = 15 if row.paper in row.ours else 7  # the paper's is a ring around ours where they are the same
        axes.plot(row.paper, y, "o", markersize=size, color="white", markeredgecolor=FAINT, markeredgewidth=1.5)
        for i, (length, color) in enumerate(zip(row.ours, REGIMES.values(), strict=True)):
            if not length:
                continue
            # A context that two regimes share is a ring of the one around a dot of the other.
            axes.plot(length, y, "o", markersize=11 - 4 * row.ours[:i].count(length), color=color, zorder=3)
            if length not in row.ours[i + 1 :]:
                axes.annotate(f"{length / row.paper:g}×", (length, y), (8, 0), textcoords="offset points",
                              va="center", fontsize=9, color=color, fontweight="bold")  # fmt: skip
            if row.days[i] > 1:
                side = "right" if length in row.ours[i + 1 :] else "left" if length in row.ours[:i] else "center"
                axes.annotate(f"{row.days[i]:.1f} days", (length, y), ({"right": -3, "left": 3}.get(side, 0), -13),
                              textcoords="offset points", ha=side, fontsize=7, color=color)  # fmt: skip
    top = rows[0]
    axes.annotate("paper", (top.paper, 0), (0, 11), textcoords="offset points", ha="center", fontsize=9, color=FAINT)
    for i, (length, name) in enumerate(zip(top.ours, REGIMES, strict=True)):
        if length:
            line, last = top.ours[i + 1 :].count(length), i == len(REGIMES) - 1
            axes.annotate(name, (length, 0), (-6 if last else 0, 11 + 12 * line), textcoords="offset points",
                          ha="left" if last else "center", fontsize=9, color=REGIMES[name])  # fmt: skip
    hardware = [row.hardware for row in rows]
    for y in range(1, len(rows)):
        if hardware[y] != hardware[y - 1]:
            axes.axhline(y - 0.5, color=RULE, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{row.hardware}   {row.model:>3}" for row in rows], color=INK)
    axes.set_ylim(len(rows) - 0.4, -1.3)
    log_tokens(axes, min(row.paper for row in rows), max(max(row.paper, *(x or 0 for x in row.ours)) for row in rows))
    axes.set_xlabel("tokens of the longest context that trains (compiled; × the paper's; like for like is float32)\n"
                    "days: of one modelled step, where it takes more than one")  # fmt: skip
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    return figure


@drawn
def draw_training_cost(plt) -> Any:
    """Figure 5: FLOPs of a pass over the same tokens at a longer context, relative to a context of 4096."""
    figure, axes = plt.subplots(figsize=(7.4, 4), layout="constrained")
    lengths = [4096 * 2**i for i in range(12)]
    models = (("7B", 4096), ("13B", 5120), ("33B", 6656), ("65B", 8192), ("175B", 12288), ("1T", 36864))
    label = math.inf
    for (name, width), color in zip(models, plt.get_cmap("viridis")(np.linspace(0, 0.8, len(models))), strict=True):
        ratios = [flops_ratio(width, length) for length in lengths]
        label = min(ratios[-1], 0.75 * label)  # below the one before
        axes.plot(lengths, ratios, color=color, linewidth=2)
        axes.annotate(f"{name}: {ratios[-1]:.0f}×", (lengths[-1], label), (6, 0), textcoords="offset points",
                      va="center", color=color, fontsize=9.5)  # fmt: skip
    log_tokens(axes, lengths[0], lengths[-1], pad=1.06)
    axes.set_yscale("log")
    axes.set_yticks([1, 10, 100], ["1×", "10×", "100×"])
    axes.minorticks_off()
    title = "FLOPs of a pass over the same data, relative to a context of 4K; at 8M:"
    axes.set(xlabel="context in tokens", title=title)
    return figure


def flops_ratio(hidden_size: int, context: int, baseline: int = 4096) -> float:
    """FLOPs of a dataset at a context over those at the baseline: (6 h + s2) / (6 h + s1), attention not halved."""
    return (6 * hidden_size + context) / (6 * hidden_size + baseline)


@drawn
def draw_overlap(plt, rows: Sequence[Mapping[str, Any]], smallest: Mapping[tuple[str, str], float]) -> Any:
    """Is a hop hidden? The computation that the compiler scheduled under it over its time on the link.

    Args:
      rows: of results/overlap.json, with target, local, forward_cover_over_link and backward_cover_over_link.
      smallest: by (target, "forward" or "backward"), the closed form's smallest local length that hides a hop.
    """
    targets = list(dict.fromkeys(row["target"] for row in rows))
    lengths = sorted({row["local"] for row in rows})
    figure, both = plt.subplots(1, 2, figsize=(8.6, 3.9), sharey=True, layout="constrained")
    for axes, name in zip(both, ("forward", "backward"), strict=True):
        axes.axhspan(0.25, 1, color="#fbe9e7", linewidth=0)
        for target, color in zip(targets, cycle(RANK_COLORS), strict=False):
            mine = [row for row in rows if row["target"] == target]
            covers = [row[f"{name}_cover_over_link"] for row in mine]
            axes.plot(lengths, [x / smallest[target, name] for x in lengths], color=color, alpha=0.35)
            axes.plot([row["local"] for row in mine], covers, "o", color=color, markersize=6)
            axes.annotate(target.split(":")[0], (lengths[-1], covers[-1]), (9, 0), textcoords="offset points",
                          va="center", color=color, fontweight="bold")  # fmt: skip
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
def draw_ring(plt, n: int = 4) -> Any:
    """Queries stay, keys and values travel: the ring of n devices, and which block each of them holds at each step."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.5), width_ratios=(1, 1.35), layout="constrained")
    angles = [math.pi / 2 - 2 * math.pi * rank / n for rank in range(n)]
    places = [(math.cos(a), math.sin(a)) for a in angles]
    for rank, (x, y) in enumerate(places):
        _box(plt, left, x - 0.36, y - 0.25, 0.72, 0.5, "white", RANK_COLORS[rank])
        left.text(x, y + 0.11, f"device {rank}", ha="center", va="center", fontsize=8.5, fontweight="bold")
        _box(plt, left, x - 0.3, y - 0.18, 0.24, 0.17, "white", RANK_COLORS[rank])
        left.text(x - 0.18, y - 0.1, f"q{rank}", ha="center", va="center", fontsize=8)
        _box(plt, left, x - 0.01, y - 0.18, 0.31, 0.17, RANK_COLORS[rank], RANK_COLORS[rank])
        left.text(x + 0.145, y - 0.1, f"k{rank} v{rank}", ha="center", va="center", fontsize=8, color="white")
        after = places[(rank + 1) % n]
        left.annotate("", after, (x, y), arrowprops=dict(
            arrowstyle="-|>", color=FAINT, linewidth=1.6, shrinkA=44, shrinkB=44, connectionstyle="arc3,rad=-0.28",
            mutation_scale=14))  # fmt: skip
    left.text(0, 0, "keys and values\ntravel", ha="center", va="center", fontsize=9, color=FAINT)
    left.set(xlim=(-1.45, 1.45), ylim=(-1.35, 1.35), aspect="equal")
    left.axis("off")
    for step in range(n):
        right.text(step + 0.5, -0.18, f"step {step}" + (" (own)" if step == 0 else ""), ha="center", fontsize=9)
        for rank in range(n):
            owner = (rank - step) % n
            _box(plt, right, step + 0.1, rank + 0.12, 0.7, 0.66, RANK_COLORS[owner], RANK_COLORS[owner])
            right.text(step + 0.45, rank + 0.45, f"k{owner} v{owner}", ha="center", va="center", color="white")
            if step < n - 1:
                end = (rank + 1) % n
                color = RULE if end < rank else RANK_COLORS[owner]
                right.annotate("", (step + 1.09, end + 0.45), (step + 0.81, rank + 0.45), zorder=0,
                               arrowprops=dict(arrowstyle="-", color=color, linewidth=1.4))  # fmt: skip
    for rank in range(n):
        right.text(-0.05, rank + 0.45, f"device {rank}\nwith q{rank}", ha="right", va="center", fontsize=8.5)
    right.text(n / 2, n + 0.18, f"{n - 1} hops, each under the block computed meanwhile; then every q has met every k",
               ha="center", va="top", fontsize=8.5, color=FAINT)  # fmt: skip
    right.set(xlim=(-0.75, n), ylim=(n + 0.4, -0.4))
    right.axis("off")
    return figure


def causal_work(layout: Layout, ring_size: int, local: int = 1024) -> np.ndarray:
    """float64 [ring_size]: the pairs of a query and a key that a causal mask leaves each rank, over their mean."""
    tokens = permutation(layout, ring_size * local, ring_size).reshape(ring_size, -1)
    work = (tokens + 1).sum(axis=1)
    return work / work.mean()


@drawn
def draw_layouts(plt, n: int = 4, local: int = 8) -> Any:
    """Which tokens a rank holds, what its queries see of each visiting block, and how much causal work that makes."""
    figure, grid = plt.subplots(3, len(VISIBLE), figsize=(8.6, 4.5), height_ratios=(0.2, 3, 0.95), layout="constrained")
    for (strip, masks, bars), layout in zip(grid.T, VISIBLE, strict=True):
        tokens = permutation(layout, n * local, n).reshape(n, local)
        holder = np.empty(n * local, int)
        for rank in range(n):
            holder[tokens[rank]] = rank
        for rank in range(n):
            for first, last in _runs(holder == rank):
                strip.fill_between((first, last), 0, 1, color=RANK_COLORS[rank], linewidth=0.3)
        strip.set(xlim=(0, n * local), ylim=(0, 1), title=layout)
        strip.axis("off")
        for rank in range(n):
            for step in range(n):
                seen = tokens[rank][:, None] >= tokens[(rank - step) % n]
                x, y = step * 1.12, rank * 1.12
                masks.add_patch(plt.Rectangle((x, y), 1, 1, facecolor="#f3f5f7", edgecolor=RULE, linewidth=0.8))
                first = local - seen.sum(axis=0)  # a key is seen by the last queries of a part, or by all, or by none
                edges = x + np.arange(local + 1) / local
                masks.fill_between(edges, y + np.append(first, first[-1]) / local, y + 1, step="post",
                                   color=RANK_COLORS[rank], linewidth=0)  # fmt: skip
        side = n * 1.12
        masks.set(xlim=(-0.02, side), ylim=(side, -0.02), aspect="equal",
                  xticks=[1.12 * i + 0.5 for i in range(n)], yticks=[1.12 * i + 0.5 for i in range(n)])  # fmt: skip
        masks.set_xticklabels([f"step {i}" for i in range(n)], fontsize=8)
        masks.set_yticklabels([f"rank {i}" for i in range(n)], fontsize=8)
        masks.tick_params(length=0, pad=2)
        for spine in (*masks.spines.values(), *bars.spines.values()):
            spine.set_visible(False)
        work = causal_work(layout, n)
        bars.bar(range(n), work, color=RANK_COLORS[:n], width=0.72)
        for rank, share in enumerate(work):
            bars.text(rank, share + 0.06, f"{share:.2f}", ha="center", fontsize=8.5, color=INK)
        bars.set(ylim=(0, 2.1), xticks=range(n), yticks=[])
        bars.set_xticklabels([f"rank {i}" for i in range(n)], fontsize=8)
        bars.tick_params(length=0, pad=1)
    grid[0, 0].text(-1.2, 0.5, "tokens", ha="right", va="center", fontsize=8.5, color=FAINT)
    grid[1, 0].set_ylabel("queries × visiting keys", fontsize=8.5, color=FAINT)
    grid[2, 0].set_ylabel("causal work\n(mean 1)", fontsize=8.5, color=FAINT)
    return figure


def write_drawings(folder: Path | str) -> None:
    """Write the pictures that need no data, ring.svg, layouts.svg and training_cost.svg, into `folder`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, draw in (("ring", draw_ring), ("layouts", draw_layouts), ("training_cost", draw_training_cost)):
        draw(path=Path(folder) / f"{name}.svg")


def _runs(row: np.ndarray) -> list[tuple[int, int]]:
    """The half-open ranges of indices at which a row is True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]


def _box(plt, axes, x, y, width, height, face, edge) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.05", facecolor=face,
                                  edgecolor=edge, linewidth=1.5, zorder=2))  # fmt: skip
