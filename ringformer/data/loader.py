"""The loader: batches in the ring's layout; each batch is a function of (seed, step) and is read where it is needed.

Row r of step s is packed sequence s*batch_size + r, with columns in the order of the layout. A host reads only those
blocks of the store that contain its devices' part of a batch, so a sequence may be too long for any single host. A run
resumes at any step, on any mesh, without loader state.
"""

import itertools
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ringformer.data.packing.document_lengths import DocumentLengths, document_lengths
from ringformer.data.packing.mixture import Mixture
from ringformer.data.packing.options import PackingOptions
from ringformer.data.packing.sequences import Batch, StoreSequences
from ringformer.data.packing.stream import DocumentStream
from ringformer.data.packing.whole_documents import WholeDocuments
from ringformer.data.stores.token_store import TokenStore
from ringformer.ops.layouts import Layout, permutation

Parts = Sequence[tuple[TokenStore, int]]
"""Stores and their integer shares of the sequences."""


class Loader:
    """Batches of `batch_size` sequences of `seq_len` tokens (both global), for a ring of `ring_size` in `layout`.

    Evaluation uses steps 0 to k-1 of the held-out store, always with the same seed; no sequence repeats if k is at most
    `sequences.per_epoch // batch_size`.

    Args:
      store: a store, or several with their shares.
      packing: the choice of documents, and the way they are packed: as a `DocumentStream` or as `WholeDocuments`.

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
    ):
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} is not a number of sequences; it must be at least 1")

        def packed(store: TokenStore, rows: int) -> StoreSequences:
            if packing.packing == "stream":
                return DocumentStream(store, seq_len, seed, packing)
            return WholeDocuments(store, seq_len, seed, packing, batch_size=rows)

        self.batch_size, self.seq_len = batch_size, seq_len
        self.stores = [store] if isinstance(store, TokenStore) else [part for part, _ in store]
        self.sequences: StoreSequences | Mixture
        if isinstance(store, TokenStore):
            self.sequences = packed(store, batch_size)
        else:
            stores, shares = zip(*store, strict=True)
            rows = [max(round(batch_size * share / sum(shares)), 1) for share in shares]
            self.sequences = Mixture(list(map(packed, stores, rows)), shares, seed)
        self._order = permutation(layout, seq_len, ring_size)

    def document_lengths(self) -> list[DocumentLengths]:
        """Return the lengths of each store's documents; `too_short` turns them into a warning for training."""
        parts = self.sequences.parts if isinstance(self.sequences, Mixture) else [self.sequences]
        return [document_lengths(part) for part in parts]

    def passes(self, steps: int) -> dict[str, float]:
        """Count the passes that `steps` make through each store's selected documents, by the store's folder."""
        sequences = steps * self.batch_size
        if not isinstance(self.sequences, Mixture):
            return {str(self.stores[0].path): sequences / self.sequences.per_epoch}
        share = sequences / sum(self.sequences.shares)
        parts = zip(self.stores, self.sequences.parts, self.sequences.shares, strict=True)
        return {str(store.path): share * own / part.per_epoch for store, part, own in parts}

    def read(self, step: int, rows: slice = slice(None), columns: slice | np.ndarray = slice(None)) -> Batch:
        """Read part of a step's batch as numpy arrays; columns are in layout order."""
        positions = self._order[columns]
        first = step * self.batch_size
        sequences = [self.sequences.read(first + row, positions) for row in range(self.batch_size)[rows]]
        return Batch(*(None if field[0] is None else np.stack(field) for field in zip(*sequences, strict=True)))

    def contents(self, step: int) -> list[dict[str, Any]]:
        """Describe the rows of a step's batch: for each row, the number of its sequence, the store and the
        documents."""
        rows, sequences = range(step * self.batch_size, (step + 1) * self.batch_size), self.sequences
        places = [sequences.source(i) if isinstance(sequences, Mixture) else (0, i) for i in rows]
        parts = sequences.parts if isinstance(sequences, Mixture) else [sequences]
        return [
            {"sequence": i, "store": str(parts[p].store.path), "documents": parts[p].documents_of(at).tolist()}
            for i, (p, at) in zip(rows, places, strict=True)
        ]

    def batch(self, step: int, sharding: jax.sharding.Sharding) -> Batch:
        """Return a step's batch as global jax Arrays [batch_size, seq_len], in one process or in each of several."""
        self._raise_if_damaged()
        shape = self.batch_size, len(self._order)
        wanted: dict[tuple[int, int], set[tuple[int, int]]] = {}  # the columns of this process's devices, by their rows
        for index in sharding.addressable_devices_indices_map(shape).values():
            rows, columns = (bounds(part, size) for part, size in zip(index or (slice(None),) * 2, shape, strict=True))
            wanted.setdefault(rows, set()).add(columns)
        parts: dict[tuple[int, int, int, int], Batch] = {}
        for rows, held in wanted.items():  # one read, because a ring's columns are neighbours in the store
            read = self.read(step, slice(*rows), np.concatenate([np.arange(*columns) for columns in sorted(held)]))
            at = 0
            for columns in sorted(held):
                size = columns[1] - columns[0]
                cut = (slice(None), slice(at, at + size))
                parts[(*rows, *columns)] = Batch(*(None if field is None else field[cut] for field in read))
                at += size

        def part(index: Any, field: int) -> np.ndarray:
            rows, columns = (bounds(part, size) for part, size in zip(index, shape, strict=True))
            return parts[(*rows, *columns)][field]

        def array(field: int) -> jax.Array | None:
            if Batch._fields[field] == "segment_ids" and not self.sequences.has_segments:
                return None
            return jax.make_array_from_callback(shape, sharding, lambda index: part(index, field))

        return Batch(*map(array, range(len(Batch._fields))))

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
