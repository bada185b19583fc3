"""Hashes of files are those of xxHash's specification, whatever the blocks in which they are read."""

import random

import pytest

from ringformer.files.hashes import hash_bytes, hash_file


def test_known_hashes(tmp_path):
    """Of no bytes and of "a": XXH3_128bits as `xxhsum -H2` prints it."""
    for content, known in (
        (b"", "99aa06d3014798d86001c324468d497f"),
        (b"a", "a96faf705af16834e6c632b61e964e1f"),
        (b"abc", "06b05ab6733a618578af5f94892f3950"),
    ):
        (tmp_path / "file").write_bytes(content)
        assert hash_file(tmp_path / "file") == hash_bytes(content) == known


@pytest.mark.parametrize("size", [2**18 - 1, 2**18, 2**18 + 1, 3 * 2**20 + 7])
def test_blocks_change_nothing(tmp_path, size):
    """Files of less than a block, of one and of several."""
    content = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(content)
    assert hash_file(tmp_path / "file") == hash_bytes(content)


def test_a_changed_bit_changes_the_hash(tmp_path):
    path, content = tmp_path / "file", bytearray(range(256)) * 40
    path.write_bytes(content)
    whole = hash_file(path)
    for place in range(0, len(content), 1001):
        content[place] ^= 4
        path.write_bytes(content)
        assert hash_file(path) != whole
        content[place] ^= 4
