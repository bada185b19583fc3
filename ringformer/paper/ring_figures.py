"""Figures of the ring and its layouts for README and docs, and the paper's Figure 5, all of which need no results.

The layouts are computed by `ringformer.ops.layouts`.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from ringformer.ops.layouts import VISIBLE, Layout, permutation
from ringformer.paper.figures import RANK_COLORS, draw_training_cost
from ringformer.plotting import FAINT, INK, RULE, drawn


@drawn
def draw_ring(plt, n: int = 4) -> Any:
    """Draw the ring of n devices, where queries stay and keys and values travel, and the block of each device at each
    step."""
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
        left.annotate(
            "",
            after,
            (x, y),
            arrowprops=dict(
                arrowstyle="-|>",
                color=FAINT,
                linewidth=1.6,
                shrinkA=44,
                shrinkB=44,
                connectionstyle="arc3,rad=-0.28",
                mutation_scale=14,
            ),
        )
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
                right.annotate(
                    "",
                    (step + 1.09, end + 0.45),
                    (step + 0.81, rank + 0.45),
                    zorder=0,
                    arrowprops=dict(arrowstyle="-", color=color, linewidth=1.4),
                )
    for rank in range(n):
        right.text(-0.05, rank + 0.45, f"device {rank}\nwith q{rank}", ha="right", va="center", fontsize=8.5)
    right.text(
        n / 2,
        n + 0.18,
        f"{n - 1} hops, each hidden under a block; after them every q has met every k",
        ha="center",
        va="top",
        fontsize=8.5,
        color=FAINT,
    )
    right.set(xlim=(-0.75, n), ylim=(n + 0.4, -0.4))
    right.axis("off")
    return figure


def causal_work(layout: Layout, ring_size: int, local: int = 1024) -> np.ndarray:
    """Return float64 [ring_size]: query-key pairs that a causal mask leaves each rank, relative to their mean."""
    tokens = permutation(layout, ring_size * local, ring_size).reshape(ring_size, -1)
    work = (tokens + 1).sum(axis=1)
    return work / work.mean()


@drawn
def draw_layouts(plt, n: int = 4, local: int = 8) -> Any:
    """Draw the tokens of each rank, the part of each visiting block that its queries see, and the resulting causal
    work."""
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
                first = local - seen.sum(axis=0)  # a key is seen by the last queries, by all, or by none
                edges = x + np.arange(local + 1) / local
                masks.fill_between(
                    edges,
                    y + np.append(first, first[-1]) / local,
                    y + 1,
                    step="post",
                    color=RANK_COLORS[rank],
                    linewidth=0,
                )
        side = n * 1.12
        masks.set(
            xlim=(-0.02, side),
            ylim=(side, -0.02),
            aspect="equal",
            xticks=[1.12 * i + 0.5 for i in range(n)],
            yticks=[1.12 * i + 0.5 for i in range(n)],
        )
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
    """Write the figures that need no results, ring.svg, layouts.svg and training_cost.svg, into `folder`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, draw in (("ring", draw_ring), ("layouts", draw_layouts), ("training_cost", draw_training_cost)):
        draw(path=Path(folder) / f"{name}.svg")


def _runs(row: np.ndarray) -> list[tuple[int, int]]:
    """Return the half-open index ranges in which a row is True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]


def _box(plt, axes, x, y, width, height, face, edge) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.05",
            facecolor=face,
            edgecolor=edge,
            linewidth=1.5,
            zorder=2,
        )
    )
