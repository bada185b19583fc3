"""Hashes of two kinds.

`content_hash` (blake2b, 16 bytes) tells apart what runs, prompts and records are made of. `hash_file`, `hash_bytes` and
`hash_object` (xxh3_128) detect changed bits in files: as fast as memory, but no protection against intent. xxhash comes
with the extra `data`, so it is imported where it is used: help needs none of the extras.

Fingerprints of stores and names of tokenizers are blake2b of other sizes, which their formats fix.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def content_digest(content: bytes) -> bytes:
    """Return the blake2b of bytes, as 16 bytes."""
    return hashlib.blake2b(content, digest_size=16).digest()


def content_hash(content: bytes) -> str:
    """Return the blake2b of bytes, as 32 hexadecimal digits."""
    return content_digest(content).hex()


def hash_sources(folder: Path) -> str:
    """Return the content hash of all Python files under a folder."""
    return content_hash(b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py"))))


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
