"""A restore decodes exactly the bytes that it compared with the manifest: files that change between a check and the
read are noticed, and so are chunks with valid checksums of their own in the wrong place."""

import itertools
import shutil

import numpy as np
import pytest
import tensorstore as ts

from ringformer.checkpoints import verify
from ringformer.checkpoints.array_folder import is_chunk
from ringformer.checkpoints.verify import checkpoint_faults, tree_folder
from ringformer.convert.block_streams import open_streams
from ringformer.files import atomic
from ringformer.files.chunks import has_valid_crc32c
from ringformer.files.manifest import DamagedFiles, chunk_entry_of, verify_content
from tests.checkpoints.formats import to_zarr2
from tests.commit import generator_of_this_commit
from tests.damage import delete, flip, truncate
from tests.train.states import CONFIG, assert_same_bits, logical_state, opened, save

STATES = {step: logical_state(seed=step)._replace(step=np.asarray(step, np.int32)) for step in (10, 20)}
RNG = generator_of_this_commit()


@pytest.fixture(scope="module", params=["zarr 3", pytest.param("zarr 2", marks=pytest.mark.slow)])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(folder, "1,2,1,4", *STATES.values())
    if request.param == "zarr 2":
        for step in STATES:
            to_zarr2(tree_folder(folder, step))
    return folder


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def chunks(run):
    folder = tree_folder(run, 20)
    return sorted(path for path in folder.glob("*/*") if is_chunk(str(path.relative_to(folder))))


def swap(one, other):
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])


def trials(run, of_each):
    """Ways to damage step 20, so many of each: swapped chunks, chunks of step 10, flips in chunks and in metadata."""
    files = chunks(run)
    pairs = [(a, b) for a, b in itertools.combinations(files, 2) if a.stat().st_size == b.stat().st_size]
    some = [pairs[i] for i in RNG.choice(len(pairs), of_each, replace=False)]
    yield from ((pair, lambda pair=pair: swap(*pair)) for pair in some)
    stale = {file: tree_folder(run, 10) / file.relative_to(tree_folder(run, 20)) for file in files}
    changed = [file for file in files if file.read_bytes() != stale[file].read_bytes()]
    changed = sorted(changed, key=lambda file: file.stat().st_size != stale[file].stat().st_size)[:of_each]
    yield from (((file,), lambda file=file: shutil.copyfile(stale[file], file)) for file in changed)
    metadata = sorted(path for kind in ("zarr.json", ".zarray") for path in tree_folder(run, 20).glob(f"*/{kind}"))
    for file in (*RNG.choice(files, of_each, replace=False), *RNG.choice(metadata, of_each, replace=False)):
        yield (file,), lambda file=file: flip(file, RNG)


def change_after_check(monkeypatch, damage):
    """Damage step 20 once it was checked, before it is read."""
    original = verify.checkpoint_faults

    def checked(run_dir, step, *args, **kwargs):
        faults = original(run_dir, step, *args, **kwargs)
        if step == 20:
            monkeypatch.setattr(verify, "checkpoint_faults", original)
            damage()
        return faults

    monkeypatch.setattr(verify, "checkpoint_faults", checked)


@pytest.mark.usual("zarr 3-True-2")
@pytest.mark.parametrize("of_each", [2, 6])
@pytest.mark.parametrize("between", [False, True])
def test_no_trial_is_silent(run, monkeypatch, between, of_each):
    tried = 0
    for files, damage in trials(run, of_each):
        contents = {file: file.read_bytes() for file in files}
        if between:
            change_after_check(monkeypatch, damage)
        else:
            damage()
        try:
            step, state, (line,) = opened(run, "1,1,1,2").restore_newest()
        except Exception as error:
            pytest.fail(f"not restored from the checkpoint before: {error!r}")
        assert step == 10 and any(str(file) in line for file in files)
        assert_same_bits(state, STATES[10])
        (run / "damaged" / "20").rename(run / "checkpoints" / "20")
        assert any(str(file) in fault for fault in checkpoint_faults(run, 20) for file in files)
        for file, content in contents.items():
            file.write_bytes(content)
        tried += 1
    assert tried == 4 * of_each
    step, state, lines = opened(run).restore_newest()
    assert (step, lines) == (20, [])
    assert_same_bits(state, STATES[20])


def test_lost_and_cut_files_are_noticed_between_check_and_read(run, monkeypatch):
    file = tree_folder(run, 20) / "params.embed" / "1.0"
    for damage, message in ((delete, r"params\.embed/1\.0 is missing"), (truncate, r"1\.0 has \d+ bytes, \d+ were")):
        content = file.read_bytes()
        change_after_check(monkeypatch, lambda damage=damage: damage(file))
        with pytest.raises(DamagedFiles, match=message):
            opened(run).restore(20)
        file.write_bytes(content)


def test_an_export_compares_what_it_reads(run):
    stores = open_streams(tree_folder(run, 20), CONFIG)
    swap(*(tree_folder(run, 20) / "params.embed" / name for name in ("0.0", "1.0")))
    with pytest.raises(DamagedFiles, match=r"params\.embed/\d\.0 "):
        stores["embed",].read().result()
    np.testing.assert_array_equal(stores["head",].read().result(), STATES[20].params["head"])


def test_plain_readers_notice_flips_in_chunks(tmp_path):
    """Without the manifest: by the CRC-32C in each chunk. Orbax's own handler opens arrays in this way, too."""
    save(tmp_path, "1,1,1,1", STATES[20])
    for file in RNG.choice(chunks(tmp_path), 20, replace=False):
        content = file.read_bytes()
        flip(file, RNG)
        files = {"driver": "file", "path": f"{file.parent}/"}
        with pytest.raises(ValueError, match=r"Digest mismatch|ZSTD|Zstd"):
            ts.open({"driver": "zarr3", "kvstore": files}).result().read().result()
        file.write_bytes(content)


def test_a_chunk_is_compared_with_its_own_crc(tmp_path):
    """Both chunks have the same size, and each has a valid checksum."""
    save(tmp_path, "1,1,1,1", *STATES.values())
    one, other = ((tree_folder(tmp_path, step) / "step" / "0").read_bytes() for step in STATES)
    assert len(one) == len(other) and one != other and has_valid_crc32c(one) and has_valid_crc32c(other)
    verify_content(tmp_path, one, chunk_entry_of(one))
    with pytest.raises(DamagedFiles, match="its hash differs"):
        verify_content(tmp_path, other, chunk_entry_of(one), verify_crc=False)
    flipped = bytes([one[0] ^ 1]) + one[1:]
    with pytest.raises(DamagedFiles, match="its hash differs"):
        verify_content(tmp_path, flipped, chunk_entry_of(one))
    assert not any(map(has_valid_crc32c, (b"", b"abcd", flipped)))


def test_what_was_saved_is_read_from_the_disk(tmp_path, monkeypatch):
    """fsync, then the pages are dropped, then each chunk is read, once."""
    calls, read = [], []
    fsync, drop, real = atomic.os.fsync, atomic.os.posix_fadvise, atomic.Path.open
    monkeypatch.setattr(atomic.os, "fsync", lambda file: calls.append(("fsync", file)) or fsync(file))
    monkeypatch.setattr(atomic.os, "posix_fadvise", lambda file, *args: calls.append((args, file)) or drop(file, *args))
    monkeypatch.setattr(
        atomic.Path, "open", lambda path, *args, **kw: read.append(path.name) or real(path, *args, **kw)
    )
    path = tmp_path / "file"
    path.write_bytes(b"content")
    read.clear()
    assert atomic.read_back(path) == b"content" and read == ["file"]
    (first, file), (second, same) = calls
    assert (first, second) == ("fsync", (0, 0, atomic.os.POSIX_FADV_DONTNEED)) and file == same
