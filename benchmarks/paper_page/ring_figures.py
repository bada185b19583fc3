"""Figures that need no results: the ring and its layouts, for README and docs, and the paper's Figure 5.

The layouts are computed by `ringformer.ops.layouts`.
"""

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper_page.figures import RANK_COLORS, draw_training_cost
from ringformer.ops.layouts import VISIBLE, Layout, permutation, places
from ringformer.plotting import FAINT, INK, RULE, drawn, label


@drawn
def draw_ring(plt, n: int = 4) -> Any:
    """Draw the ring of n devices, on which queries stay and keys and values travel, and the block that each device
    computes at each step."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.5), width_ratios=(1, 1.35), layout="constrained")
    places = []
    for rank in range(n):
        angle = math.pi / 2 - 2 * math.pi * rank / n
        places.append((math.cos(angle), math.sin(angle)))
    arrow = {"arrowstyle": "-|>", "color": FAINT, "linewidth": 1.6, "shrinkA": 44, "shrinkB": 44}
    arrow |= {"connectionstyle": "arc3,rad=-0.28", "mutation_scale": 14}
    for rank, (x, y) in enumerate(places):
        color = RANK_COLORS[rank]
        _box(left, (x, y), (0.72, 0.5), "", "white", color)
        label(left, f"device {rank}", (x, y + 0.11), ha="center", fontsize=8.5, fontweight="bold")
        _box(left, (x - 0.18, y - 0.095), (0.24, 0.17), f"q{rank}", "white", color, fontsize=8)
        _box(left, (x + 0.145, y - 0.095), (0.31, 0.17), f"k{rank} v{rank}", color, color, fontsize=8, color="white")
        left.annotate("", places[(rank + 1) % n], (x, y), arrowprops=arrow)
    label(left, "keys and values\ntravel", (0, 0), ha="center", color=FAINT)
    left.set(xlim=(-1.45, 1.45), ylim=(-1.35, 1.35), aspect="equal")
    left.axis("off")
    for rank, step in product(range(n), range(n)):
        owner = (rank - step) % n
        after = (rank + 1) % n
        color = RANK_COLORS[owner]
        block = f"k{owner} v{owner}"
        _box(right, (step + 0.45, rank + 0.45), (0.7, 0.66), block, color, color, fontsize=10, color="white")
        if step < n - 1:
            hop = (step + 0.81, step + 1.09), (rank + 0.45, after + 0.45)
            right.plot(*hop, color=RULE if after < rank else color, linewidth=1.4, zorder=0)
    for i in range(n):
        step_name = f"step {i}" if i else "step 0 (own)"
        label(right, step_name, (i + 0.5, -0.18), ha="center", va="baseline")
        label(right, f"device {i}\nwith q{i}", (-0.05, i + 0.45), ha="right", fontsize=8.5)
    caption = f"{n - 1} hops, each hidden under a block; after them every q has met every k"
    label(right, caption, (n / 2, n + 0.18), ha="center", va="top", fontsize=8.5, color=FAINT)
    right.set(xlim=(-0.75, n), ylim=(n + 0.4, -0.4))
    right.axis("off")
    return figure


def causal_work(layout: Layout, ring_size: int, local: int = 1024) -> np.ndarray:
    """Return the query-key pairs that a causal mask leaves to each rank, relative to their mean, float64
    [ring_size]."""
    tokens = permutation(layout, ring_size * local, ring_size).reshape(ring_size, -1)
    work = (tokens + 1).sum(axis=1)
    return work / work.mean()


@drawn
def draw_layouts(plt, n: int = 4, local: int = 8) -> Any:
    """Draw the tokens of each rank, the part of each visiting block that its queries see, and the resulting causal
    work."""
    figure, grid = plt.subplots(3, len(VISIBLE), figsize=(8.6, 4.5), height_ratios=(0.2, 3, 0.95), layout="constrained")
    ranks = [f"rank {i}" for i in range(n)]
    for (strip, masks, bars), layout in zip(grid.T, VISIBLE, strict=True):
        tokens = permutation(layout, n * local, n).reshape(n, local)
        for rank, mine in enumerate(tokens):
            strip.bar(mine, 1, width=1, align="edge", color=RANK_COLORS[rank])
        strip.set(xlim=(0, n * local), ylim=(0, 1), title=layout)
        strip.axis("off")
        for rank, step in product(range(n), range(n)):
            seen = tokens[rank][:, None] >= tokens[(rank - step) % n]
            x = step * 1.12
            y = rank * 1.12
            masks.add_patch(plt.Rectangle((x, y), 1, 1, facecolor="#f3f5f7", edgecolor=RULE, linewidth=0.8))
            hidden = 1 - seen.mean(axis=0)  # a key is seen by the last queries, by all, or by none
            edges = x + np.arange(local + 1) / local
            masks.stairs(y + hidden, edges, baseline=y + 1, fill=True, color=RANK_COLORS[rank])
        side = n * 1.12
        middles = 1.12 * np.arange(n) + 0.5
        masks.set(xlim=(-0.02, side), ylim=(side, -0.02), aspect="equal")
        masks.set_xticks(middles, [f"step {i}" for i in range(n)], fontsize=8)
        masks.set_yticks(middles, ranks, fontsize=8)
        masks.tick_params(length=0, pad=2)
        work = causal_work(layout, n)
        patches = bars.bar(range(n), work, color=RANK_COLORS[:n], width=0.72)
        bars.bar_label(patches, fmt="{:.2f}", padding=2, fontsize=8.5, color=INK)
        bars.set(ylim=(0, 2.1), yticks=[])
        bars.set_xticks(range(n), ranks, fontsize=8)
        bars.tick_params(length=0, pad=1)
        for axes in (masks, bars):
            axes.spines[:].set_visible(False)
    label(grid[0, 0], "tokens", (-1.2, 0.5), ha="right", fontsize=8.5, color=FAINT)
    grid[1, 0].set_ylabel("queries × visiting keys", fontsize=8.5, color=FAINT)
    grid[2, 0].set_ylabel("causal work\n(mean 1)", fontsize=8.5, color=FAINT)
    return figure


@drawn
def draw_states(plt, n: int = 4) -> Any:
    """Draw the pieces of a zigzag sequence, the map of a state that each of them is, and the states that ranks need."""
    figure, axes = plt.subplots(figsize=(8.6, 3.6), layout="constrained")
    line = places("zigzag", n)
    label(axes, "sequence", (-0.75, 0), ha="right", fontweight="bold")
    for piece, (rank, _) in enumerate(line):
        color = RANK_COLORS[rank]
        _box(axes, (piece, 0), (0.66, 0.6), f"M{piece} U{piece}", color, color, fontsize=8.5, color="white")
        if piece:
            axes.annotate("", (piece - 0.33, 0), (piece - 0.67, 0), arrowprops={"arrowstyle": "-|>", "color": FAINT})
            label(axes, f"S{piece}", (piece - 0.5, -0.28), ha="center", fontsize=8.5, color=FAINT)
    for rank in range(n):
        y = rank * 0.75 + 1.1
        color = RANK_COLORS[rank]
        label(axes, f"rank {rank} needs", (-0.75, y), ha="right", fontsize=8.5)
        pieces = [piece for piece, (owner, _) in enumerate(line) if owner == rank]
        axes.plot((-0.4, pieces[-1] - 0.3), (y, y), color=RULE, linewidth=1.4, zorder=0)
        for piece in pieces:
            _box(axes, (piece, y), (0.5, 0.46), f"S{piece}" if piece else "0", "white", color, fontsize=8.5)
    caption = f"S' = M S + U for each piece: {2 * n} maps in order give every rank its two states; no token moves"
    label(axes, caption, (n - 0.5, n * 0.75 + 0.95), ha="center", fontsize=8.5, color=FAINT)
    axes.set(xlim=(-2.1, 2 * n - 0.5), ylim=(n * 0.75 + 1.15, -0.5))
    axes.axis("off")
    return figure


def write_drawings(folder: Path | str) -> None:
    """Write the figures that need no results into `folder`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    drawings = {"ring": draw_ring, "layouts": draw_layouts, "states": draw_states, "training_cost": draw_training_cost}
    for name, draw in drawings.items():
        draw(path=Path(folder) / f"{name}.svg")


def _box(axes, center, size, text: str, face: str, edge: str, **style: Any) -> None:
    """Draw a box with rounded corners and a text in its middle."""
    from matplotlib.patches import FancyBboxPatch

    x, y = center
    width, height = size
    shape: Any = {"boxstyle": "round,pad=0,rounding_size=0.05", "linewidth": 1.5, "zorder": 2}
    corner = (x - width / 2, y - height / 2)
    axes.add_patch(FancyBboxPatch(corner, width, height, facecolor=face, edgecolor=edge, **shape))
    label(axes, text, center, ha="center", **style)
