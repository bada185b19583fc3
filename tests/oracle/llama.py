"""LLaMA in float64 PyTorch, dense and plain: the summed cross-entropy of a batch and its gradients, by autograd."""

from typing import NamedTuple

import numpy as np
import torch


class Architecture(NamedTuple):
    """What the shapes of the parameters do not say."""

    rope_theta: float
    norm_eps: float
    window: int = 0
    """Keys that a query sees at most; 0: all."""


def loss_and_gradients(params: dict, batch, architecture: Architecture) -> tuple[float, dict]:
    """The summed loss in nats, and its gradient by every parameter: float64 arrays in a tree like `params`.

    Args:
      params: the package's nested dict of numpy arrays, layers stacked [L, ...]; without "head" the embedding is tied.
      batch: tokens, targets, positions, segment_ids (or None), mask, [B, T] in natural order.
    """
    leaves = _leaves(params, requires_grad=True)
    total = token_losses(leaves, batch, architecture).sum()
    total.backward()
    return total.item(), _map(lambda x: x.grad.numpy(), leaves)


def losses(params: dict, batch, architecture: Architecture) -> np.ndarray:
    """float64 [B, T]: -log p(target) of each token, 0 where it is masked."""
    with torch.no_grad():
        return token_losses(_leaves(params, requires_grad=False), batch, architecture).numpy()


def token_losses(params: dict, batch, architecture: Architecture) -> torch.Tensor:
    tokens, targets, positions, mask = (
        torch.tensor(np.asarray(x)) for x in (batch.tokens, batch.targets, batch.positions, batch.mask)
    )
    visible = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()[None]
    if architecture.window:
        visible = visible.triu(1 - architecture.window)
    if batch.segment_ids is not None:
        ids = torch.tensor(np.asarray(batch.segment_ids))
        visible = visible & (ids[:, :, None] == ids[:, None, :])
    layers, eps = params["layers"], architecture.norm_eps
    angles = _angles(positions, layers["attention"]["wq"].shape[-1], architecture.rope_theta)
    x = params["embed"][tokens.long()]
    for i in range(len(layers["attention_norm"]["scale"])):
        layer = _map(lambda w, i=i: w[i], layers)
        x = x + _attention(_rms_norm(x, layer["attention_norm"]["scale"], eps), layer["attention"], angles, visible)
        x = x + _swiglu(_rms_norm(x, layer["feedforward_norm"]["scale"], eps), layer["feedforward"])
    head = params["head"] if "head" in params else params["embed"].T
    log_p = torch.log_softmax(_rms_norm(x, params["norm"]["scale"], eps) @ head, dim=-1)
    picked = log_p.gather(-1, targets.long()[..., None])[..., 0]
    return torch.where(mask, -picked, torch.zeros_like(picked))


def _rms_norm(x, scale, eps):
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * scale


def _angles(positions, d, theta):
    """[B, T, d/2]: position times theta^(-2i/d)."""
    return positions.double()[..., None] * theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)


def _rotate(x, angles):
    """x [B, T, H, d]: the pairs (i, i + d/2) turned, as complex numbers."""
    a, b = x.chunk(2, dim=-1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)[:, :, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def _attention(x, weights, angles, visible):
    q, k, v = (torch.einsum("btD,Dhd->bthd", x, weights[name]) for name in ("wq", "wk", "wv"))
    q, k = _rotate(q, angles), _rotate(k, angles)
    k, v = (a.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for a in (k, v))
    logits = torch.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    p = torch.softmax(logits.masked_fill(~visible[:, None], float("-inf")), dim=-1)
    return torch.einsum("bhts,bshd,hdD->btD", p, v, weights["wo"])


def _swiglu(x, weights):
    return (torch.nn.functional.silu(x @ weights["w_gate"]) * (x @ weights["w_up"])) @ weights["w_down"]


def _leaves(params, requires_grad):
    return _map(lambda x: torch.tensor(np.asarray(x, np.float64), requires_grad=requires_grad), params)


def _map(function, tree):
    return {key: _map(function, x) for key, x in tree.items()} if isinstance(tree, dict) else function(tree)
