"""Hashes of files, by which a changed bit is noticed: xxh3_128, as fast as memory and no protection against intent."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

BLOCK = 2**22
"""Bytes read at once."""


def hash_file(path: str | Path) -> str:
    """The xxh3_128 of a file's content, in hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with Path(path).open("rb", buffering=0) as file:
        block = memoryview(bytearray(min(BLOCK, os.fstat(file.fileno()).st_size + 1)))
        while size := file.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


def hash_bytes(content: bytes) -> str:
    """The xxh3_128 of bytes, in hexadecimal digits."""
    return xxhash.xxh3_128(content).hexdigest()


def hash_object(values: Mapping[str, Any]) -> str:
    """The xxh3_128 of a JSON object, however it is laid out."""
    return hash_bytes(json.dumps(values, sort_keys=True).encode())
