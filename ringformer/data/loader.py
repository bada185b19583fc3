"""Loader of batches in the ring's layout: each batch is a function of (seed, step), and each host reads its part.

Row r of step s is packed sequence s*batch_size + r, with columns in the order of the layout. A host reads only those
blocks of the store that contain its devices' part of a batch, so a sequence may be too long for any single host. A run
resumes at any step, on any mesh, without loader state.
"""

import itertools
import math
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import numpy as np

from ringformer.data.packing.buckets import LengthBuckets
from ringformer.data.packing.document_lengths import DocumentLengths, document_lengths
from ringformer.data.packing.mixture import Mixture, sequences_for_tokens
from ringformer.data.packing.options import PackingOptions
from ringformer.data.packing.ring_work import Chunk, WorkByRings, in_rings, mean, overall
from ringformer.data.packing.sequences import Batch, StoreSequences, join_fields
from ringformer.data.packing.stream import DocumentStream
from ringformer.data.packing.whole_documents import WholeDocuments
from ringformer.data.stores.token_store import TokenStore
from ringformer.models.interface import Features
from ringformer.ops.layouts import Layout, permutation

UNBALANCED = 1.5
SAMPLED_STEPS = 12
MOST_RANKS = 256
MOST_TOKENS = 2**20
"""Duration of attention over its ideal of which a run should know; steps on rings of each size of which a sequence is
counted; and ranks and tokens of the largest sequence that is counted, which every host then reads."""

Parts = Sequence[tuple[TokenStore, int]]
"""Stores, each with its integer share of the sequences."""


class Loader:
    """Batches of `batch_size` sequences of `seq_len` tokens (both global), for a ring of `ring_size` ranks in
    `layout`.

    Evaluation uses steps 0 to k-1 of the held-out store, always with the same seed; no sequence repeats if k is at most
    `sequences.per_epoch // batch_size`.

    Args:
      store: a store, or several with their shares.
      packing: the selection of documents, and how they are packed: as a `DocumentStream`, as `WholeDocuments` or in
        `LengthBuckets`.
      features: arrays of batches beside the tokens.

    Attributes:
      stores: the stores; `batch` and `iterate` raise ValueError once the check of any store has failed.
    """

    def __init__(
        self,
        store: TokenStore | Parts,
        *,
        batch_size: int,
        seq_len: int,
        seed: int,
        layout: Layout,
        ring_size: int,
        packing: PackingOptions = PackingOptions(),
        features: Features | None = None,
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is not a number of sequences; it must be at least 1")

        parts: Parts = [(store, 1)] if isinstance(store, TokenStore) else store
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.stores: list[TokenStore] = [part for part, _ in parts]
        shares = [share for _, share in parts]
        self.sequences: Mixture | LengthBuckets
        if packing.buckets:
            if len(parts) > 1:
                raise ValueError(f"data.buckets={packing.buckets} needs one store; the mixture has {len(parts)}")
            self.sequences = LengthBuckets(parts[0][0], seq_len, seed, packing, batch_size=batch_size)
        else:
            packed: list[StoreSequences] = []
            for part, _ in parts:
                if packing.packing == "stream":
                    packed.append(DocumentStream(part, seq_len, seed, packing))
                else:
                    packed.append(WholeDocuments(part, seq_len, seed, packing, batch_size=batch_size))
            if packing.mixture_by == "tokens":
                shares = sequences_for_tokens(shares, packed)
            for sequences, share in zip(packed, shares, strict=True):
                if isinstance(sequences, WholeDocuments):
                    sequences.batch_size = max(round(batch_size * share / sum(shares)), 1)
            self.sequences = Mixture(packed, shares, seed)
        self._packing = packing
        self._has_segments = packing.has_segments
        self._features = features
        self._ring_size = ring_size
        self._layout = layout
        self._orders: dict[int, np.ndarray] = {}
        for k in range(packing.buckets + 1):
            rings = math.gcd(2**k, ring_size)
            if rings not in self._orders:
                self._orders[rings] = permutation(layout, seq_len, ring_size, rings)

    def document_lengths(self) -> list[DocumentLengths]:
        """Return the lengths of each store's documents; `too_short` turns them into a warning for training."""
        return list(map(document_lengths, self.sequences.selections))

    def passes(self, steps: int) -> dict[str, float]:
        """Count the passes that `steps` make through each store's selected documents, by the store's folder."""
        return self.sequences.passes(steps * self.batch_size)

    def rings(self, step: int) -> int:
        """Return into how many rings the ranks are cut for a step's batch: as many as its sequences have pieces, if
        they divide the ranks."""
        return math.gcd(2 ** self.sequences.halvings(step), self._ring_size)

    def share_by_rings(self) -> dict[int, float]:
        """Return the share of the batches on so many rings, the largest rings first."""
        shares: dict[int, float] = {}
        for k, share in sorted(self.sequences.share_by_halvings.items()):
            rings = math.gcd(2**k, self._ring_size)
            shares[rings] = shares.get(rings, 0.0) + share
        return shares

    def describe_buckets(self) -> str:
        """Return a line with the share of the batches on rings of each size."""
        parts = []
        for rings, share in self.share_by_rings().items():
            plural = "s" * (rings > 1)
            parts.append(f"{share:.0%} on {rings} ring{plural} of {self._ring_size // rings}")
        return f"buckets: batches are {', '.join(parts)}"

    def work_by_rings(self, chunk: Chunk, rows: int = 1, gathered: bool = False) -> WorkByRings | None:
        """Count attention's work for sequences of some batches; None for sequences or rings that would take long to
        count, and if every token sees all before it.

        Args:
          rows: sequences that a device computes at once. chunk, gathered: as in `ring_work`.
        """
        if self._ring_size > MOST_RANKS or self.seq_len > MOST_TOKENS or not self._has_segments:
            return None
        counted = {}
        rng = np.random.default_rng(0)
        columns = np.arange(self.seq_len)
        for rings, share in self.share_by_rings().items():
            works = []
            for step in itertools.islice(self._steps_on(rings), SAMPLED_STEPS):
                first = step * self.batch_size + int(rng.integers(self.batch_size // rows)) * rows  # of any store
                ids = [self.sequences.read(first + row, columns).segment_ids for row in range(rows)]
                works.append(in_rings(np.stack(ids), self._layout, self._ring_size, rings, chunk, gathered=gathered))
            counted[rings] = share, mean(works)
        return counted

    def _steps_on(self, rings: int) -> Iterator[int]:
        """Yield the steps whose batch is on so many rings."""
        for step in itertools.count():
            if self.rings(step) == rings:
                yield step

    def describe_balance(self, chunk: Chunk, rows: int = 1, gathered: bool = False) -> str | None:
        """Return a line if the documents of the first batches leave a ring unbalanced: if attention takes `UNBALANCED`
        times its ideal. None for a sequence or a ring that would take long to count; arguments as in `work_by_rings`.
        """
        if self._ring_size <= 1:
            return None
        by_rings = self.work_by_rings(chunk, rows, gathered)
        if by_rings is None:
            return None
        work = overall(by_rings)
        if work.product < UNBALANCED:
            return None
        command = f"data inspect {self.stores[0].path.parent} --ring_size={self._ring_size} --seq_len={self.seq_len}"
        limits = {"min_length": self._packing.min_length, "max_length": self._packing.max_length}
        for name, tokens in limits.items():
            if tokens:
                command += f" --{name}={tokens}"
        return (
            f"documents make attention take {work.product:.1f} times its ideal on this ring (slowest rank over mean "
            f"{work.balance:.1f}, computed over visible pairs {work.excess:.1f}): `ringformer {command}` counts other "
            "layouts, chunks and buckets"
        )

    def read(self, step: int, rows: slice = slice(None), columns: slice | np.ndarray = slice(None)) -> Batch:
        """Read part of a step's batch as numpy arrays; `columns`, a slice or a mask, are in layout order."""
        positions = self._orders[self.rings(step)][columns]
        first = step * self.batch_size
        sequences = [self.sequences.read(first + row, positions) for row in range(self.batch_size)[rows]]
        batch = join_fields(sequences, np.stack)
        if self._features is None:
            return batch
        features = self._features.read(batch)
        self._features.check(features, batch.tokens.shape)
        arrays = {name: np.asarray(x) for name, x in features.items()}
        return batch._replace(features=arrays)

    def contents(self, step: int) -> list[dict[str, Any]]:
        """Return, for each row of a step's batch, the number of its sequence, its store's folder and its documents."""
        contents = []
        for sequence in range(step * self.batch_size, (step + 1) * self.batch_size):
            store, documents = self.sequences.documents_of(sequence)
            contents.append({"sequence": sequence, "store": str(store.path), "documents": documents.tolist()})
        return contents

    def batch(self, step: int, sharding: jax.sharding.Sharding) -> Batch:
        """Return a step's batch as global jax Arrays [batch_size, seq_len], in one process or in each of several."""
        self._raise_if_damaged()
        shape = self.batch_size, self.seq_len
        # The columns of this process's devices, by rows. They are read together, because those of a ring are neighbours
        # in the store.
        held: dict[tuple[int, int], np.ndarray] = {}
        for index in sharding.addressable_devices_indices_map(shape).values():
            rows, columns = index or (slice(None), slice(None))
            held.setdefault(bounds(rows, self.batch_size), np.zeros(self.seq_len, bool))[columns] = True
        fields: dict[tuple[int, int], list[np.ndarray]] = {}
        for bounds_of_rows, mask in held.items():
            read = self.read(step, slice(*bounds_of_rows), mask)
            fields[bounds_of_rows], structure = jax.tree.flatten(read)

        def part(index: Any, field: int) -> np.ndarray:
            rows = bounds(index[0], self.batch_size)
            begin, end = bounds(index[1], self.seq_len)
            first = np.count_nonzero(held[rows][:begin])
            return fields[rows][field][:, first : first + end - begin]

        arrays = []
        for number, field in enumerate(next(iter(fields.values()))):
            global_shape = *shape, *field.shape[2:]
            of_field = partial(part, field=number)
            arrays.append(jax.make_array_from_callback(global_shape, sharding, of_field))
        return jax.tree.unflatten(structure, arrays)

    def iterate(self, start_step: int, sharding: jax.sharding.Sharding) -> Generator[Batch, None, None]:
        """Yield batches from `start_step` on, endlessly; a thread prepares the next batch while one is in use.

        An error in the thread is raised when its batch is requested. Close the generator to end the thread.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as thread:
            coming = thread.submit(self.batch, start_step, sharding)
            for step in itertools.count(start_step + 1):
                batch = coming.result()
                coming = thread.submit(self.batch, step, sharding)
                self._raise_if_damaged()
                yield batch

    def _raise_if_damaged(self) -> None:
        for store in self.stores:
            store.check.raise_if_failed()


def bounds(part: slice, size: int) -> tuple[int, int]:
    """Return the begin and end of a slice with step 1 of an axis of `size` elements."""
    return part.indices(size)[:2]
