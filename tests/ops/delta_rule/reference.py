"""The gated delta rule and its gradients, a token at a time, and a causal convolution: torch in float64."""

import numpy as np
import torch


def delta_rule(q, k, v, g, beta, ids, do) -> list[np.ndarray]:
    """Outputs [B, T, H, dv], and the gradients by q, k, v, g and beta of their product with `do`."""
    leaves = [torch.tensor(np.asarray(x, np.float64), requires_grad=True) for x in (q, k, v, g, beta)]
    shared = v.shape[2] // k.shape[2]
    q, k = (x.repeat_interleave(shared, dim=2) for x in leaves[:2])
    v, g, beta = leaves[2:]
    state = torch.zeros(*v.shape[:1], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float64)
    outputs = []
    for t in range(v.shape[1]):
        if ids is not None and t:
            goes_on = torch.tensor(ids[:, t] == ids[:, t - 1])
            state = torch.where(goes_on[:, None, None, None], state, 0)
        state = state * torch.exp(g[:, t])[..., None, None]
        stored = torch.einsum("bhd,bhde->bhe", k[:, t], state)
        written = beta[:, t, :, None] * (v[:, t] - stored)
        state = state + torch.einsum("bhd,bhe->bhde", k[:, t], written)
        outputs.append(torch.einsum("bhd,bhde->bhe", q[:, t], state) * k.shape[3] ** -0.5)
    o = torch.stack(outputs, dim=1)
    o.backward(torch.tensor(do))
    return [o.detach().numpy(), *(x.grad.numpy() for x in leaves)]


def convolution(x, weight, ids, dy) -> list[np.ndarray]:
    """Outputs [B, T, c], and the gradients by x and weight of their product with `dy`."""
    leaves = [torch.tensor(np.asarray(a, np.float64), requires_grad=True) for a in (x, weight)]
    x, weight = leaves
    (B, T, _), W = x.shape, weight.shape[1]
    rows = []
    for b in range(B):
        tokens = []
        for t in range(T):
            read = [i for i in range(max(0, t - W + 1), t + 1) if ids is None or ids[b, i] == ids[b, t]]
            tokens.append(sum(weight[:, W - 1 - (t - i)] * x[b, i] for i in read))
        rows.append(torch.stack(tokens))
    y = torch.stack(rows)
    y.backward(torch.tensor(dy))
    return [y.detach().numpy(), *(a.grad.numpy() for a in leaves)]
