"""Encoding of rows that are tokens already, in the columns that transformers' data collators read.

    input_ids        token ids
    labels           the same ids; -100 where a token is not trained on
    assistant_masks, completion_mask or loss_mask   without labels: 0 where a token is not trained on
    attention_mask   0 for padding, which is left out

Each row is a document. It gets the tokenizer's end token if it does not end with it.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ringformer.data.sources.malformed import Malformed, MalformedRecord
from ringformer.data.sources.row_sizes import Wanted
from ringformer.data.sources.source_files import KINDS
from ringformer.data.sources.tables import TABLES, Batch, read_tables
from ringformer.data.stores.encoding import Encoded
from ringformer.data.tokenizers.base import Tokenizer

IDS = "input_ids"
LABELS = "labels"
PADDING = "attention_mask"
MASKS = ("assistant_masks", "completion_mask", "loss_mask")
MASKED = -100
"""Label of a token that is not trained on."""


@dataclass
class TokenEncoder:
    """Encoder of the rows of a table of tokens.

    Raises ValueError for a source that is no table, a row without tokens (unless `skip_empty`), and columns of another
    type. Rows of another length, and labels that are neither the tokens themselves nor -100, go to `malformed`.
    """

    source: str
    split: str
    tokenizer: Tokenizer
    skip_empty: bool
    malformed: Malformed
    max_bytes: int | None = None
    """Most bytes of a row of the columns that are read; None: no limit."""

    def __post_init__(self) -> None:
        if self.source.partition(":")[0] not in TABLES:
            kinds = ", ".join(kind for kind in KINDS if kind.partition(":")[0] in TABLES)
            raise ValueError(f"format tokens reads tables, {kinds}, not {self.source!r}")
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        """Yield batches of rows, each with its number of values."""
        columns = (IDS, LABELS, PADDING, *MASKS)
        batches = read_tables(self.source, split=self.split, wanted=Wanted(columns, self.max_bytes, number_bytes=0))
        for batch in batches:
            names = batch.columns.schema.names
            if IDS not in names:
                raise ValueError(self._without_ids(batch))
            yield batch.columns.nbytes, batch

    def _without_ids(self, batch: Batch) -> str:
        """Return the error for a table without a column of tokens, with the formats that can read it."""
        message = f"{batch.file} has no column {IDS!r}; it has: {', '.join(batch.columns.schema.names)}"
        if len(batch.columns):
            first = batch.columns.slice(0, 1).to_pylist()[0]
            advice = self.malformed.suggest(first)
            if advice:
                message += f". {advice}"
        return message

    @property
    def left_out(self) -> Counter[str]:
        return self._counts + self.malformed.counts

    def encode(self, group: Sequence[Batch]) -> list[Encoded]:
        documents = []
        for batch in group:
            documents += self._readable_rows(batch)
        return documents

    def _readable_rows(self, batch: Batch) -> list[Encoded]:
        """Return the documents of a batch. If a row of it is malformed, rows are read one by one to find all such."""
        try:
            return list(self._rows(batch))
        except MalformedRecord as fault:
            if len(batch.columns) == 1 or not self.malformed.skip:
                self.malformed(str(fault), fault.reason)
                return []
        documents = []
        for row in range(len(batch.columns)):
            alone = Batch(batch.columns.slice(row, 1), batch.file, batch.first + row)
            documents += self._readable_rows(alone)
        return documents

    def _rows(self, batch: Batch) -> Iterator[Encoded]:
        """Yield the documents of a batch. All columns of a batch are read at once."""
        ids, lengths = _values(batch, IDS)
        trained = self._trained(batch, ids, lengths)
        if PADDING in batch.columns.schema.names:
            kept = _values(batch, PADDING, lengths)[0] != 0
            ends = np.cumsum(lengths)
            lengths = np.diff(np.append(0, np.append(0, np.cumsum(kept))[ends]))
            ids = ids[kept]
            if trained is not None:
                trained = trained[kept]
        text_bytes = self.tokenizer.byte_lengths
        if ids.size and not 0 <= ids.min() <= ids.max() < len(text_bytes):
            outside = np.flatnonzero((ids < 0) | (ids >= len(text_bytes)))
            row = _row_of(outside[0], lengths)
            raise MalformedRecord(
                f"{batch.name(row)} has a token beyond the {len(text_bytes)} of tokenizer {self.tokenizer.name}: name "
                "the one that made it with --tokenizer (for a run: --config.data.tokenizer)",
                "a token that the tokenizer lacks",
            )
        sizes = text_bytes[ids]
        if trained is not None:
            sizes = sizes * trained
        in_bytes = np.append(0, np.cumsum(sizes))
        end = np.int32(self.tokenizer.eos_id)
        start = 0
        counts = Counter[str]()
        for row, stop in enumerate(np.cumsum(lengths).tolist()):
            document = ids[start:stop]
            mask = None if trained is None else trained[start:stop]
            size = int(in_bytes[stop] - in_bytes[start])
            start = stop
            if not len(document):
                if not self.skip_empty:
                    raise ValueError(
                        f"{batch.name(row)} has no token; --skip_empty (for a run: --config.data.skip_empty=True) "
                        "skips and counts such rows"
                    )
                counts["empty documents skipped"] += 1
                continue
            if document[-1] != end:
                counts["end tokens added to rows without one"] += 1
                document = np.append(document, end)
                if mask is not None:
                    mask = np.append(mask, mask[-1])
            digest = hashlib.blake2b(document.tobytes(), digest_size=8).digest()  # decides whether it is held out
            masked = hashlib.blake2b(digest_size=8, key=digest)
            if mask is not None:
                masked.update(mask.tobytes())
            yield Encoded(document, mask, size, digest + masked.digest())
        with self._lock:
            self._counts += counts

    def _trained(self, batch: Batch, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
        """Return the mask of the tokens that are trained on; None without a column for it."""
        names = batch.columns.schema.names
        if LABELS in names:
            labels, _ = _values(batch, LABELS, lengths)
            trained = labels != MASKED
            differ = np.flatnonzero(trained & (labels != ids))
            if differ.size:
                row = _row_of(differ[0], lengths)
                raise MalformedRecord(
                    f"{LABELS} of {batch.name(row)} are neither its {IDS} nor {MASKED}; they must not be "
                    "shifted, because training shifts them",
                    "labels that are not the tokens",
                )
            return trained
        masks = [name for name in MASKS if name in names]
        if len(masks) > 1:
            raise ValueError(f"{batch.file} has {' and '.join(masks)}: keep the column that says what is trained on")
        if not masks:
            return None
        mask, _ = _values(batch, masks[0], lengths)
        return mask != 0


def _row_of(place: int, lengths: np.ndarray) -> int:
    """Return the row that has the value at a place of all values, one row after the other."""
    return int(np.searchsorted(np.cumsum(lengths), place, "right"))


def _values(batch: Batch, name: str, lengths: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of a column of lists, one row after the other, int32, and the length of each row.

    Raises ValueError for a column of another type, and MalformedRecord for missing values, or lengths that are not
    `lengths`.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    column = batch.columns.column(name)
    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not lists or not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
        raise ValueError(f"column {name!r} of {batch.file} holds {kind}, not lists of whole numbers")
    values = column.flatten()
    if column.null_count or values.null_count:
        has_missing = [value is None or None in value for value in column.to_pylist()]
        row = has_missing.index(True)
        raise MalformedRecord(f"column {name!r} of {batch.name(row)} has missing values", "missing values")
    try:
        flat = values.cast(pa.int32()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        place = f"column {name!r} of {batch.file}, from row {batch.first}"
        raise MalformedRecord(f"{place}: {error}", "a number that is no token") from None
    own = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    if lengths is not None and (own != lengths).any():
        row = int(np.flatnonzero(own != lengths)[0])
        raise MalformedRecord(
            f"{batch.name(row)} has {lengths[row]} {IDS} and {own[row]} {name}", "columns of other lengths"
        )
    return flat, own
