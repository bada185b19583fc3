"""Search for the chunks with which the TPU kernels take the fewest cycles, counted in machine code, without the TPU.

It compares attention over a causal stretch of a shard, computed as in a train step with full rematerialisation: twice
forward and once backward. Segment ids are included, so that the chunks also fit for packed documents. The score relates
the query-key pairs that are needed to the cycles of all chunk pairs, including the cycles that are wasted in pairs cut
by the mask.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ringformer.estimate.kernels.pair_kernels import Kind, Pair, TooLarge, count_kernel, hbm_bytes_per_cycle
from ringformer.estimate.kernels.slot_use import SlotUse
from ringformer.ops.kernels.chunk_sizes import STRETCH
from ringformer.ops.work_list import cut_axis, visible_pairs

HEAD_DIMS = 64, 100, 128, 256
"""Head sizes that are tuned; a size in between uses the next larger one."""

SIZES = 512, 1024, 2048
TIMES: dict[Kind, int] = {"forward": 2, "backward": 1}


class Candidate(NamedTuple):
    """A pair of chunk sizes that was tried."""

    q_chunk: int
    k_chunk: int
    share_of_ideal: float | None
    """Ideal cycles of the needed matrix products, divided by the actual cycles; None if not computed."""
    why: str = ""
    """Reason why the share is None: the chunks are too large for the chip, or their forward pass alone makes them
    slower than another candidate."""


Count = Callable[[str, Kind, Pair], dict[str, SlotUse]]


def search(generation: str, head_dim: int, count: Count = count_kernel) -> Iterator[Candidate]:
    """Yield every candidate as soon as it is judged. The search starts in the middle. It tries chunks with twice or
    half as many queries or keys as the best so far, until none of them is better. Two things are not compiled: chunks
    larger than chunks that were too large, and backward passes that cannot win. A backward pass cannot win if the
    forward pass plus an ideal backward pass is already slower than the best.

    Raises CompilerFailure and MissingCompiler.
    """
    tried: set[tuple[int, int]] = set()
    too_large: list[tuple[int, int]] = []

    def judge(q_chunk: int, k_chunk: int, best: float) -> Candidate:
        if any(q_chunk >= q and k_chunk >= k for q, k in too_large):
            return Candidate(q_chunk, k_chunk, None, "larger than one that is too large")
        try:
            return _judge(generation, Pair(q_chunk, k_chunk, head_dim, packed=1), best, count)
        except TooLarge:
            too_large.append((q_chunk, k_chunk))
            return Candidate(q_chunk, k_chunk, None, "too large for the chip's VMEM")

    best = 0.0
    waiting = [(1024, 1024), (512, 512)]
    while waiting:
        chunks = waiting.pop(0)
        if chunks in tried:
            continue
        tried.add(chunks)
        yield (candidate := judge(*chunks, best))
        share = candidate.share_of_ideal or 0.0
        if share > best:
            best = share
            waiting = _neighbours(*chunks)


def _neighbours(q: int, k: int) -> list[tuple[int, int]]:
    """Return chunks with twice or half as many queries, keys, or both."""
    near = (2 * q, k), (q, 2 * k), (2 * q, 2 * k), (q // 2, k), (q, k // 2), (q // 2, k // 2)
    return [chunks for chunks in near if chunks[0] in SIZES and chunks[1] in SIZES]


def _judge(generation: str, pair: Pair, best: float, count: Count) -> Candidate:
    forward = ideal_cycles(generation, "forward", pair.head_dim)
    backward = ideal_cycles(generation, "backward", pair.head_dim)
    ideal = forward + backward
    cycles = TIMES["forward"] * stretch_cycles("forward", pair, count(generation, "forward", pair), generation)
    if ideal / (cycles + backward) <= best:
        return Candidate(pair.q_chunk, pair.k_chunk, None, "slower than the best by its forward alone")
    cycles += TIMES["backward"] * stretch_cycles("backward", pair, count(generation, "backward", pair), generation)
    return Candidate(pair.q_chunk, pair.k_chunk, ideal / cycles)


def best_of(candidates: list[Candidate]) -> Candidate:
    """Return the candidate with the largest share of the ideal. Raises ValueError if no candidate has a share."""
    judged = [candidate for candidate in candidates if candidate.share_of_ideal is not None]
    if not judged:
        reasons = [f"{c.q_chunk} x {c.k_chunk}: {c.why}" for c in candidates]
        raise ValueError(f"no candidate fits: {'; '.join(reasons)}")
    return max(judged, key=lambda candidate: candidate.share_of_ideal or 0.0)


def stretch_cycles(kind: Kind, pair: Pair, uses: dict[str, SlotUse], generation: str) -> float:
    """Cycles of a kernel over a causal stretch. Each part takes the longer of its cycles and the transfer of its HBM
    bytes. In the forward, a visit is to a chunk of queries; in the backward, to a chunk of keys."""
    q = cut_axis(STRETCH, 1, pair.q_chunk)
    k = cut_axis(STRETCH, 1, pair.k_chunk)
    whole, masked = visible_pairs("contiguous", "own", True, q, k)
    visited = q if kind == "forward" else k
    rate = hbm_bytes_per_cycle(generation)
    cycles = {part: max(use.cycles, use.hbm_bytes / rate) for part, use in uses.items()}
    steps = len(whole.q) * cycles["whole"] + len(masked.q) * cycles["masked"]
    return steps + len(visited.start) * cycles["visit"]


def ideal_cycles(generation: str, kind: Kind, head_dim: int) -> float:
    """Ideal cycles of the products that a stretch needs, counted as often as a step computes them."""
    needed = Pair(STRETCH, STRETCH, head_dim).ideal_cycles(generation, kind) * (STRETCH + 1) / (2 * STRETCH)
    return TIMES[kind] * needed
