"""Shares of a chip's peaks that programs reach: measured, counted in machine code, a vendor's, or assumed.

The shares and their sources are in `chips.toml`.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from itertools import pairwise
from typing import Any

KINDS = ("measured", "machine code", "vendor's", "assumed")


@dataclass(frozen=True)
class Shares:
    """Shares of the peaks of one chip."""

    kind: str
    """One of `KINDS`."""
    source: str
    """File and date, or what is assumed."""
    attention: float
    """Share of the peak FLOP/s in the chunk pairs of XLA's blocks. It is chosen so that attention takes the same time
    as by its machine code, exponentials included."""
    products: float
    """Share of the peak FLOP/s in all other products."""
    cudnn_forward: Mapping[int, float] = field(default_factory=dict)
    """Share of the peak FLOP/s in cuDNN's attention, forward, by head size."""
    cudnn_backward: Mapping[int, float] = field(default_factory=dict)
    memory: float = 1.0
    """Share of the rate of HBM in what is bound by it."""
    int8_cache: float = 1.0
    """Share of the rate of HBM in attention to an int8 cache."""
    host_wait: float = 0.0
    """Seconds that a GPU waits for its host in one turn of a loop of unknown length."""
    token: float = 0.0
    """Seconds of a decoded token that its bytes do not explain."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.source}"

    def cudnn(self, head_dim: int) -> tuple[float, float]:
        """Return the shares of cuDNN's attention, (forward, backward), for heads of `head_dim` features. They are
        interpolated between head sizes. Below the smallest, a head takes as long as the smallest."""
        return _at(self.cudnn_forward, head_dim), _at(self.cudnn_backward, head_dim)


def _at(shares: Mapping[int, float], head_dim: int) -> float:
    """Interpolate shares by head size."""
    sizes = sorted(shares)
    if head_dim <= sizes[0]:
        return shares[sizes[0]] * head_dim / sizes[0]
    for below, above in pairwise(sizes):
        if head_dim <= above:
            place = (head_dim - below) / (above - below)
            return shares[below] + place * (shares[above] - shares[below])
    return shares[sizes[-1]]


def _read_shares() -> dict[str, Shares]:
    """Read the shares of `chips.toml`. An entry that is like another has that one's numbers, but its own source."""
    text = (resources.files(__package__) / "chips.toml").read_text()
    entries: dict[str, dict[str, Any]] = tomllib.loads(text)["shares"]
    shares = {}
    for name, entry in entries.items():
        numbers = entries[entry["like"]] if "like" in entry else entry
        shares[name] = Shares(
            kind=entry["kind"],
            source=entry["source"],
            attention=numbers["attention"],
            products=numbers["products"],
            cudnn_forward=_by_head_size(numbers.get("cudnn_forward", {})),
            cudnn_backward=_by_head_size(numbers.get("cudnn_backward", {})),
            memory=numbers.get("memory", 1.0),
            int8_cache=numbers.get("int8_cache", 1.0),
            host_wait=numbers.get("host_wait_us", 0.0) * 1e-6,
            token=numbers.get("token_ms", 0.0) * 1e-3,
        )
    return shares


def _by_head_size(shares: Mapping[str, float]) -> dict[int, float]:
    return {int(size): share for size, share in shares.items()}


SHARES = _read_shares()
"""Shares by the name of a TPU generation or GPU, a key of `CHIPS`."""
