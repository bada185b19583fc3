"""Ways of damaging a file, and of all of a folder's."""

import numpy as np


def flip(path, rng):
    """Turn one bit."""
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b"")


def delete(path):
    path.unlink()


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


WAYS = (truncate, empty, delete, zero)


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def places(folder, count, rng):
    """Files for `count` flips: drawn by their bytes, as a disk would; those of no bytes have no bit."""
    found = [path for path in files(folder) if path.stat().st_size]
    sizes = np.array([path.stat().st_size for path in found], float)
    return [found[i] for i in rng.choice(len(found), count, p=sizes / sizes.sum())]
