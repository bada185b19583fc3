"""An array in a file reads as the array that was written, and never as anything else."""

import os
import threading

import numpy as np
import pytest

from ringformer.data.stores.checked_array import BLOCK, CheckedArray, DamagedStore

DTYPES = [np.uint8, np.uint16, np.uint32]


def write(path, dtype, size):
    values = np.random.default_rng(size).integers(0, np.iinfo(dtype).max, size, dtype)
    values.tofile(path)
    return values, CheckedArray(path, np.dtype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 5, BLOCK // 4, 5 * BLOCK, 5 * BLOCK + 3])
def test_it_reads_as_the_array_that_was_written(tmp_path, dtype, size):
    values, array = write(tmp_path / "a", dtype, size)
    assert len(array) == size and np.array_equal(array, values) and array[:].dtype == dtype
    rng = np.random.default_rng(0)
    for start, stop in rng.integers(-1, size + 2, (20, 2)):
        assert np.array_equal(array[start:stop], values[start:stop])
    assert np.array_equal(array[::-7], values[::-7])
    for stretches in (1, 2, 30):
        begins, ends = np.sort(rng.integers(0, size + 1, (2, stretches)), axis=0)
        expected = np.concatenate([values[a:b] for a, b in zip(begins, ends, strict=True)])
        assert np.array_equal(array.join(begins, ends), expected)
    assert len(array.join(np.array([], int), np.array([], int))) == 0
    if size:
        assert (array[size // 2], array[-1]) == (values[size // 2], values[-1])
    with pytest.raises(IndexError):
        array[size]


@pytest.mark.parametrize("first", ["verified", "read"])
@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, 3 * BLOCK, 5 * BLOCK + 2])
def test_a_flipped_bit_is_named_by_who_reads_its_block_and_by_nobody_else(tmp_path, at, first):
    values, array = write(tmp_path / "a", np.uint8, 5 * BLOCK + 3)
    array.whole_hash() if first == "verified" else array[:]
    with (tmp_path / "a").open("r+b") as file:
        os.pwrite(file.fileno(), bytes([values[at] ^ 64]), at)
    block = at // BLOCK
    where = rf"a has changed since it was opened, between bytes {block * BLOCK:,} and "
    joined = np.array([0, at]), np.array([9, at + 1])
    for read in (lambda: array[at : at + 1], lambda: array[:], lambda: array.join(*joined), array.whole_hash):
        with pytest.raises(DamagedStore, match=where):
            read()
    for other in {0, 1, 3, 5} - {block}:
        assert np.array_equal(array[other * BLOCK : (other + 1) * BLOCK], values[other * BLOCK : (other + 1) * BLOCK])


def test_what_a_reader_saw_is_compared_by_the_verification(tmp_path):
    """It read what was not written, and the file is whole again when it is verified."""
    values, array = write(tmp_path / "a", np.uint8, 3 * BLOCK)
    np.roll(values, 1).tofile(tmp_path / "a")
    array[BLOCK : BLOCK + 10]
    values.tofile(tmp_path / "a")
    with pytest.raises(DamagedStore, match=f"between bytes {BLOCK:,} and {2 * BLOCK:,}"):
        array.whole_hash()


def test_a_file_that_is_cut_is_an_error_and_no_signal(tmp_path):
    values, array = write(tmp_path / "a", np.uint16, 4 * BLOCK)
    os.truncate(tmp_path / "a", BLOCK + 7)
    assert np.array_equal(array[: BLOCK // 2], values[: BLOCK // 2])
    with pytest.raises(DamagedStore, match=f"it ends after {BLOCK + 7:,} of {8 * BLOCK:,} bytes"):
        array[:]


def test_threads_agree_on_what_was_read_first(tmp_path):
    """Whoever comes first: a file that changes while all read it is never two things without an error."""
    values, array = write(tmp_path / "a", np.uint8, 64 * BLOCK)
    other, read, failed = values ^ 1, [], []

    def reader():
        try:
            for block in range(64):
                read.append((block, array[block * BLOCK : (block + 1) * BLOCK].tobytes()))
        except DamagedStore:
            failed.append(1)

    threads = [threading.Thread(target=reader) for _ in range(6)]
    for thread in threads:
        thread.start()
    other.tofile(tmp_path / "b")
    with (tmp_path / "a").open("r+b") as file:
        file.write(other.tobytes())
    for thread in threads:
        thread.join()
    seen = {}
    assert all(seen.setdefault(block, content) == content for block, content in read)
