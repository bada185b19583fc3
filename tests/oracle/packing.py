"""The sequences that packing "stream" makes of a store, from its files, token by token (docs/data.md)."""

import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Rows(NamedTuple):
    """[B, T] in natural order."""

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    mask: np.ndarray
    ends: np.ndarray


class Store(NamedTuple):
    documents: list[np.ndarray]
    trained: list[np.ndarray]
    """bool, of each token: does the mask let it be trained on."""

    @property
    def bytes_per_token(self) -> float:
        """Of a store of the tokenizer "bytes": its tokens below 256 that are trained on, over all that are."""
        text = sum(int((ids < 256)[kept].sum()) for ids, kept in zip(self.documents, self.trained, strict=True))
        return text / sum(int(kept.sum()) for kept in self.trained)


@lru_cache
def read_store(folder: Path) -> Store:
    tokens = np.fromfile(folder / "tokens.bin", json.loads((folder / "store.json").read_text())["dtype"])
    masked = (folder / "mask.bin").exists()
    trained = np.fromfile(folder / "mask.bin", np.uint8) if masked else np.ones(len(tokens), np.uint8)
    edges = np.load(folder / "offsets.npy")[1:-1]
    return Store(np.split(tokens.astype(np.int64), edges), np.split(trained == 1, edges))


def batch(folder: Path, step: int, batch_size: int, seq_len: int, seed: int) -> Rows:
    """The batch of a step, counted from 0, of the store in `folder`."""
    rows = [sequence(folder, step * batch_size + row, seq_len, seed) for row in range(batch_size)]
    return Rows(*(np.stack(field) for field in zip(*rows, strict=True)))


def sequence(folder: Path, index: int, seq_len: int, seed: int) -> Rows:
    """One row."""
    per_epoch = (sum(map(len, read_store(folder).documents)) - 1) // seq_len
    epoch, row = divmod(index, per_epoch)
    stream, pieces = _stream(folder, seed, epoch, per_epoch)
    first = pieces[row] * seq_len
    found = []
    position = segment = 0
    for i in range(first, first + seq_len):
        (token, _, document, after), (target, trained, _, _) = stream[i : i + 2]
        new = i == first or document != stream[i - 1][2]
        position, segment = (0, segment + 1) if new else (position + 1, segment)
        found.append((token, target, position, segment, trained and after > 0, after == 0))
    return Rows(*(np.array(column) for column in zip(*found, strict=True)))


@lru_cache
def _stream(folder: Path, seed: int, epoch: int, per_epoch: int) -> tuple[list, np.ndarray]:
    """An epoch's tokens: the id, whether it is trained on, the document, how many of it come after. And the order of
    the sequences that are cut from them."""
    store, rng = read_store(folder), np.random.Generator(np.random.Philox(key=np.array([seed, epoch], np.uint64)))
    stream = []
    for document in rng.permutation(len(store.documents)):
        ids, trained = store.documents[document], store.trained[document]
        stream += [(ids[i], trained[i], document, len(ids) - 1 - i) for i in range(len(ids))]
    return stream, rng.permutation(per_epoch)
