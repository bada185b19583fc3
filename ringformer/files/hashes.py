"""Hashes that detect changed bits in files: xxh3_128, which is as fast as memory but gives no protection against
intent.

xxhash comes with the extra `data`, so it is imported where it is used: help needs none of the extras.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def hash_file(path: str | Path) -> str:
    """Return the xxh3_128 of a file's content, in hexadecimal digits. The file is read in blocks."""
    import xxhash

    with Path(path).open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def hash_bytes(content: bytes) -> str:
    """Return the xxh3_128 of bytes, in hexadecimal digits."""
    import xxhash

    return xxhash.xxh3_128(content).hexdigest()


def hash_object(values: Mapping[str, Any]) -> str:
    """Return the xxh3_128 of a JSON object, which does not depend on the order of its keys or on its layout."""
    return hash_bytes(json.dumps(values, sort_keys=True).encode())
