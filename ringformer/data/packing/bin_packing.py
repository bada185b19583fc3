"""Bin packing by length: assigns pieces of documents to sequences, and sequences to batches.

If each piece attends only to itself (packed attention "document"), the attention work of a sequence is the sum of the
squared lengths of its pieces. If pieces also attend to all previous pieces ("sequence"), it is the square of the summed
lengths. A step takes as long as its heaviest sequence, so the sequences of a batch should have equal work. Therefore
sequences are sorted by work and cut into batches, and pieces trade places within batches that are still uneven.
"""

from bisect import bisect_left, insort
from heapq import heapreplace

import numpy as np

from ringformer.data.packing.options import PackedAttention

POOL = 2**14
"""Number of pieces to pack together: enough to fill sequences as well as millions of pieces would, and few enough to
keep the sorted lists short.
"""

JITTER = 0.02
"""Relative noise on the lengths by which pieces are sorted, longest first. It gives a piece other neighbours in every
epoch."""

BALANCED = 0.7
"""Share of the tokens, those in the longest pieces, that is assigned by work before the other pieces fill the gaps."""

PRICE = 1.02
"""Most bins that assignment by work may use, relative to best-fit. It would use more for pieces that are about as long
as a bin."""

TOLERANCE = 0.05
"""Largest spread of work, (max - min) / mean, of a batch that counts as even."""

TRADES = 8
"""Largest number of trades per sequence of a batch."""


def pack(
    lengths: np.ndarray, capacity: int, rng: np.random.Generator, packed_attention: PackedAttention = "document"
) -> np.ndarray:
    """Assign pieces to full bins, int64 [N], numbered from 0 without gaps.

    Random pools of pieces are packed by best-fit decreasing. The longest pieces are first assigned to the bins with the
    least work, so that all bins have equal work, unless this takes many more bins (`PRICE`). With "sequence" attention,
    all full bins have equal work anyway, so the fewest bins are best.

    Args:
      lengths: int64 [N], each at most `capacity`.
    """
    bins = np.empty(len(lengths), np.int64)
    used = 0
    price = 1.0
    if packed_attention == "document":
        price = PRICE
    shuffled = rng.permutation(len(lengths))
    blur = 1 + JITTER * rng.random(len(lengths))
    for first in range(0, len(lengths), POOL):
        pool = shuffled[first : first + POOL]
        pool = pool[np.argsort(-lengths[pool] * blur[pool], kind="stable")]
        fullest = _fill(lengths[pool], capacity, 0.0)
        evenest = _fill(lengths[pool], capacity, BALANCED)
        chosen = fullest
        if evenest.max() + 1 <= price * (fullest.max() + 1):
            chosen = evenest
        bins[pool] = used + chosen
        used += chosen.max() + 1
    return bins


def _fill(lengths: np.ndarray, capacity: int, balanced: float) -> np.ndarray:
    """Assign the pieces of one pool, longest first, to bins; `balanced`: the share of tokens assigned by work."""
    ends = np.cumsum(lengths)
    dealt = int(np.searchsorted(ends, balanced * ends[-1]))
    bins = [0] * len(lengths)
    rooms = list[int]()
    late = list[int]()
    used = 0
    if dealt:
        used = -(-int(ends[-1]) // capacity)
        # The remaining pieces will fill the room in a bin: their work is predicted as `rate` per token.
        rest = lengths[dealt:].astype(np.float64)
        rate = (rest**2).sum() / rest.sum()
        lightest = [(rate * capacity, b, capacity) for b in range(used)]
        for i, length in enumerate(lengths[:dealt].tolist()):
            work, b, room = lightest[0]
            if length <= room:
                heapreplace(lightest, (work + length * (length - rate), b, room - length))
                bins[i] = b
            else:
                late.append(i)
        rooms = sorted(room * POOL + b for _, b, room in lightest)
    sizes = lengths.tolist()
    for i in (*late, *range(dealt, len(sizes))):
        at = bisect_left(rooms, sizes[i] * POOL)
        if at < len(rooms):
            room, bins[i] = divmod(rooms.pop(at), POOL)
        else:
            room = capacity
            bins[i] = used
            used += 1
        if room > sizes[i]:
            insort(rooms, (room - sizes[i]) * POOL + bins[i])
    return np.array(bins)


def order_by_batch(
    lengths: np.ndarray,
    bins: np.ndarray,
    capacity: int,
    size: int,
    phase: int,
    rng: np.random.Generator,
    packed_attention: PackedAttention = "document",
) -> tuple[np.ndarray, np.ndarray]:
    """Order the bins so that each batch has bins of nearly equal work; the order of batches is random.

    Args:
      lengths, bins: int64 [N]: the pieces, and their bins from `pack`.
      size: bins per batch.
      phase: number of bins that the first batch has from the previous epoch. The bins that complete the first batch and
        the bins of the last, unfinished batch have medium work, so that the two kinds fit together across epochs.

    Returns:
      The bin of each piece after the trades, int64 [N], and the order of the bins.
    """
    by_work = np.argsort(attention_work(lengths, bins, packed_attention), kind="stable")
    head = min(-phase % size, len(by_work))
    count, tail = divmod(len(by_work) - head, size)
    broken = slice(count // 2 * size, count // 2 * size + head + tail)
    partial = rng.permutation(by_work[broken])
    batches = np.delete(by_work, broken).reshape(count, size)
    bins = _even_out(lengths, bins, batches, capacity, packed_attention)
    batches = rng.permuted(batches[rng.permutation(count)], axis=1)
    return bins, np.concatenate([partial[:head], batches.reshape(-1), partial[head:]])


def attention_work(lengths: np.ndarray, bins: np.ndarray, packed_attention: PackedAttention = "document") -> np.ndarray:
    """Compute the attention work of each bin, float64 [bins]: the sum of squared lengths, or the square of the summed
    lengths."""
    load, power = _load(lengths, packed_attention)
    return np.bincount(bins, load) ** power


def _load(lengths: np.ndarray, packed_attention: PackedAttention) -> tuple[np.ndarray, int]:
    """Return the load that each piece adds to its bin, float64, and the exponent that turns load into work."""
    lengths = lengths.astype(np.float64)
    if packed_attention == "document":
        return lengths**2, 1
    return lengths, 2


def spread(work: np.ndarray) -> np.ndarray:
    """Compute the spread (max - min) / mean along the last axis."""
    return np.ptp(work, axis=-1) / work.mean(axis=-1)


def _even_out(
    lengths: np.ndarray, bins: np.ndarray, batches: np.ndarray, capacity: int, packed_attention: PackedAttention
) -> np.ndarray:
    """Trade pieces within the batches [n, size] whose spread exceeds TOLERANCE; return the new bins."""
    bins = bins.copy()
    uneven = batches[spread(attention_work(lengths, bins, packed_attention)[batches]) > TOLERANCE]
    by_bin = np.argsort(bins, kind="stable")
    counts = np.bincount(bins)
    ends = np.cumsum(counts)
    for batch in uneven:
        pieces = np.concatenate([by_bin[ends[b] - counts[b] : ends[b]] for b in batch])
        places = np.repeat(np.arange(len(batch)), counts[batch])
        bins[pieces] = batch[_trade(lengths[pieces], places, len(batch), capacity, packed_attention)]
    return bins


def _trade(
    lengths: np.ndarray, places: np.ndarray, size: int, capacity: int, packed_attention: PackedAttention
) -> np.ndarray:
    """Swap pairs of pieces as long as a swap lightens the heaviest of `size` bins or, if none does, adds to the
    lightest."""
    n = len(lengths)
    lengths = np.append(lengths, np.zeros(size, np.int64))  # an empty piece in each bin: swapping with it is a move
    places = np.append(places, np.arange(size))
    loads, power = _load(lengths, packed_attention)
    for _ in range(TRADES * size):
        load = np.bincount(places, loads)
        room = capacity - np.bincount(places, lengths)
        if spread(load**power) <= TOLERANCE:
            break
        for extreme, sign in ((load.argmax(), 1), (load.argmin(), -1)):
            inside = np.flatnonzero(places == extreme)
            outside = np.flatnonzero(places != extreme)
            other = places[outside]
            leaving = sign * (loads[inside, None] - loads[outside])  # load that the heavier bin loses
            gap = sign * (load[extreme] - load[other])
            growth = sign * (lengths[inside, None] - lengths[outside])
            growing = other if sign > 0 else extreme
            useful = (leaving > 0) & (leaving < gap) & (growth <= room[growing])
            if useful.any():
                # Choose the swap after which the extreme bin and its partner are least extreme.
                reach = np.maximum(load[extreme] * sign - leaving, load[other] * sign + leaving)
                i, j = np.unravel_index(np.where(useful, reach, np.inf).argmin(), reach.shape)
                a = inside[i]
                b = outside[j]
                places[a], places[b] = places[b], places[a]
                places[n:] = np.arange(size)
                break
        else:
            break
    return places[:n]
