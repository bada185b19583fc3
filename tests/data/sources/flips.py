"""Readings of files with flipped bytes in another process: `python -m tests.data.sources.flips STEP FILE ...`."""

import sys
from pathlib import Path

from ringformer.data.sources.malformed import Malformed
from ringformer.data.sources.records import read_rows
from ringformer.data.stores.token_rows import TokenEncoder
from ringformer.data.tokenizers.load import load_tokenizer

FLIPS = (1, 0x80, 0xFF)
LIMIT = 2**20


def read(path):
    """Read a file as records and, if it is a table, as rows of tokens. Returns the error, if it has one."""
    kind = path.suffix.lstrip(".")
    if kind in ("gz", "zst"):
        kind = "jsonl"
    try:
        for _ in read_rows(f"{kind}:{path}", max_bytes=LIMIT):
            pass
        if "tokens" in path.name:
            encoder = TokenEncoder(f"{kind}:{path}", "train", load_tokenizer("bytes"), True, Malformed(True), LIMIT)
            for _, batch in encoder:
                encoder.encode([batch])
    except ValueError as error:
        return str(error)
    return ""


def flip_all(path, step: int = 1) -> None:
    """Flip bytes one after the other; each reading ends, and its error has one line with the file's name."""
    whole = path.read_bytes()
    for place in range(0, len(whole), step):
        for flip in FLIPS:
            content = bytearray(whole)
            content[place] ^= flip
            path.write_bytes(content)
            try:
                error = read(path)
            except BaseException:
                print(f"byte {place} of {len(whole)}, flipped by {flip:#x}", file=sys.stderr)
                raise
            if error and (str(path) not in error or "\n" in error.split(" still to be read")[0]):
                raise AssertionError(f"byte {place} of {len(whole)}, flipped by {flip:#x}: {error}")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        assert not read(Path(name)), read(Path(name))
        flip_all(Path(name), int(sys.argv[1]))
