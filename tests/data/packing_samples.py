"""Stores of documents of known lengths, and what their packed sequences must hold, counted token by token."""

import itertools

import numpy as np

from ringformer.data import Batch, ByteTokenizer, Document, TokenStore, build_stores
from ringformer.data.stores.token_store import StoreWriter

LENGTHS = (*([1, 2, 3, 4, 6, 8, 12, 41] * 3), 200, 15, 16, 17)
"""Tokens of each document with its end token: 1 is an end token alone."""

SEED = 7
MODES = ["document", "sequence"]
LAYOUTS = [("contiguous", 1), ("contiguous", 4), ("striped", 4), ("zigzag", 4), ("zigzag", 2)]


class Lengths(ByteTokenizer):
    """Makes text "n" n random tokens."""

    def encode_batch(self, texts):
        rng = np.random.default_rng(0)
        return [rng.integers(0, 256, int(text)) for text in texts]


def build(path, lengths, masked=False):
    documents = [Document(str(n - 1), "d") for n in lengths]
    store, _ = build_stores(path, documents, Lengths(), held_out=0)
    return with_mask(store, np.random.default_rng(1).integers(0, 2, len(store.tokens))) if masked else store


def with_mask(store, trained):
    """A store beside `store` of the same documents, of which only the tokens `trained` are trained on."""
    writer = StoreWriter(store.path.with_name("masked"), Lengths(), {})
    for a, b in itertools.pairwise(store.offsets):
        writer.add(store.tokens[a:b], trained[a:b] != 0, int(b - a), b"")
    writer.finish(skipped_empty=0, settings={})
    return TokenStore(store.path.with_name("masked"))


def stream_reference(store, seq_len, epoch, seed=SEED, packed_attention="document"):
    """All sequences of an epoch, token by token, from whole documents put end to end, cut and permuted."""
    rng = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    stream = []
    for document in rng.permutation(len(store.offsets) - 1):
        for place in range(store.offsets[document], store.offsets[document + 1]):
            stream.append((document, int(store.tokens[place]), store.mask is None or bool(store.mask[place])))
    sequences = []
    while len(stream) >= seq_len + 1:
        rows, position, segment = [], 0, 1
        for (document, token, _), (next_document, target, trained) in itertools.pairwise(stream[: seq_len + 1]):
            ends = next_document != document
            rows.append((token, target, position, segment, not ends and trained, ends))
            position, segment = (0, segment + 1) if ends else (position + 1, segment)
        sequence = Batch(*map(np.array, zip(*rows, strict=True)))
        if packed_attention == "sequence":
            sequence = sequence._replace(positions=np.array(range(seq_len)), segment_ids=None)
        sequences.append(sequence)
        stream = stream[seq_len:]
    return [sequences[piece] for piece in rng.permutation(len(sequences))]


def whole_reference(store, pieces, seq_len, packed_attention="document"):
    """One sequence, token by token, from (first place in the store, length) of each of its pieces."""
    one_segment = packed_attention == "sequence"
    ends = set(store.offsets[1:].tolist())
    rows = []
    for segment, (begin, length) in enumerate(pieces, start=1):
        for position in range(length):
            place = begin + position
            predicted = place + 1 not in ends
            target = int(store.tokens[place + 1]) if predicted else 0
            trained = predicted and (store.mask is None or bool(store.mask[place + 1]))
            where = (len(rows), 1) if one_segment else (position, segment)
            rows.append((int(store.tokens[place]), target, *where, trained, not predicted))
    for number in itertools.count(2 if one_segment else len(pieces) + 1):
        if len(rows) == seq_len:
            return [np.array(column) for column in zip(*rows, strict=True)]
        rows.append((0, 0, 0, number, False, True))


def pieces_of(packed, index):
    return [(int(packed._begins[piece]), int(packed._lengths[piece])) for piece in packed.pieces(index)]


def lengths_of(packed, index):
    """The number of tokens of each piece of a sequence."""
    return packed._lengths[packed.pieces(index)]


def at(batch, index):
    """The elements at `index` of every field."""
    return [None if field is None else field[index] for field in batch]


def assert_equal(actual, expected):
    for field, a, b in zip(Batch._fields, Batch(*actual), Batch(*expected), strict=True):
        assert (a is None) == (b is None), field
        np.testing.assert_array_equal(a, b, err_msg=field)


class Watched:
    """An array in memory for that of a store's file, which counts the elements taken from it."""

    def __init__(self, array):
        self.array, self.itemsize, self.taken = np.asarray(array), array.itemsize, 0

    def __len__(self):
        return len(self.array)

    def __getitem__(self, index):
        return self.array[index]

    def join(self, begins, ends):
        found = np.concatenate([self.array[begin:end] for begin, end in zip(begins, ends, strict=True)])
        self.taken += found.size
        return found
