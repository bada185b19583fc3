"""AdamW and its schedule in numpy float64 (Loshchilov & Hutter, Decoupled weight decay regularization, algorithm 2)."""

import math
from typing import NamedTuple

import numpy as np


class AdamW(NamedTuple):
    learning_rate: float
    warmup_steps: int
    total_steps: int
    schedule: str
    final_fraction: float
    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip_norm: float

    def rate(self, step: int) -> float:
        """Return the rate of a step, from 1. The last step of a warm-up has the peak; the cosine ends a step later."""
        done = step - 1
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        along = (done - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        share = (1 + math.cos(math.pi * along)) / 2
        return self.learning_rate * (self.final_fraction + (1 - self.final_fraction) * share)

    def init(self, params: dict) -> tuple[dict, dict]:
        """The moments, as dicts of arrays like `params`."""
        return tuple({name: np.zeros_like(x) for name, x in params.items()} for _ in "mv")

    def update(self, step: int, params: dict, moments: tuple[dict, dict], gradients: dict) -> tuple[dict, tuple]:
        """The parameters and moments after a step; dicts of float64 arrays. Norm vectors are not decayed."""
        norm = global_norm(gradients)
        new, m, v = {}, {}, {}
        for name, x in params.items():
            g = gradients[name] * min(1.0, self.clip_norm / norm)
            m[name] = self.b1 * moments[0][name] + (1 - self.b1) * g
            v[name] = self.b2 * moments[1][name] + (1 - self.b2) * g**2
            step_taken = m[name] / (1 - self.b1**step) / (np.sqrt(v[name] / (1 - self.b2**step)) + self.eps)
            decay = 0.0 if name.endswith("norm.scale") else self.weight_decay
            new[name] = x - self.rate(step) * (step_taken + decay * x)
        return new, (m, v)


def global_norm(gradients: dict) -> float:
    return math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
