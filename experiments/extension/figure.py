"""The figure of the study: losses by position, and what theta and training changed."""

from typing import Any

import numpy as np

from experiments.extension.plans import LONG, LORA, RELEASED, SHIFTED, THETA, UNSHIFTED
from experiments.extension.results import Results
from ringformer.evals.figures import CURVE
from ringformer.plotting import FAINT, RULE, drawn, log_tokens

COLORS = {
    RELEASED: FAINT,
    THETA: "#c2570c",
    SHIFTED: "#3b75af",
    UNSHIFTED: "#8c6d31",
    LORA: "#a06cc0",
    LONG: "#2c8a57",
}
NAMES = {
    RELEASED: "as released",
    THETA: "larger theta, no training",
    SHIFTED: "trained, shifted positions",
    UNSHIFTED: "trained, no shifts",
    LORA: "adapters, shifted positions",
    LONG: "trained at 16K, 32K and 64K",
}
HIGHEST = 4.0
"""Nats beyond which the curves leave the panels."""


@drawn
def draw_extension(plt, found: Results) -> Any:
    """Plot the losses by position, and their paired differences from the released model."""
    figure, (losses, differences) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for model, rows in found["losses"].items():
        _curve(losses, model, rows, {"label": NAMES[model]})
        against = found["differences"].get(f"{model} - {RELEASED}")
        if against:
            _curve(differences, model, against)
    first, last = (found["losses"][RELEASED][end]["from"] for end in (0, -1))
    for axes in (losses, differences):
        log_tokens(axes, first, 2 * last, pad=1.2)
        axes.grid(axis="y", color=RULE, linewidth=0.6)
        axes.set_xlabel("position of the predicted token")
    losses.set_ylim(0, HIGHEST)
    losses.set(ylabel="loss, nats per token", title="Held-out documents, 95% intervals")
    losses.legend(frameon=False, fontsize=9, loc="upper left")
    differences.axhline(0, color=COLORS[RELEASED], linewidth=1)
    differences.set_ylim(-HIGHEST / 2, HIGHEST / 4)
    differences.set(ylabel="nats above the released model", title="The same documents, paired")
    return figure


def _curve(axes, model: str, rows: list[Results], style: dict[str, Any] | None = None) -> None:
    """Plot the nats at the middle of each part, with their intervals."""
    middles = np.array([row["from"] for row in rows]) * np.sqrt(2)
    nats = np.array([row["nats"] for row in rows])
    intervals = [row["interval"] or [row["nats"]] * 2 for row in rows]
    low, high = np.transpose(intervals)
    curve = CURVE | {"clip_on": True} | (style or {})
    axes.plot(middles, nats, "o-", color=COLORS[model], **curve)
    axes.fill_between(middles, low, high, color=COLORS[model], alpha=0.15, linewidth=0)
