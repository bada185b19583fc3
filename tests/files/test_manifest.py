"""The manifest of a folder: what is shared between processes, and what is no manifest."""

import pytest

from ringformer.files import manifest as file_manifest
from ringformer.files.manifest import (
    MANIFEST,
    DamagedFiles,
    entry_of,
    find_faults,
    read_manifest,
    read_verified,
    write_manifest,
    write_part,
)


@pytest.fixture
def folder(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}").write_text("x" * number)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text("a")
    write_manifest(tmp_path)
    return tmp_path


def test_processes_share_the_files(folder, monkeypatch):
    read = []

    def counted(folder, name, hashes):
        read.append(name)
        return read_verified(folder, name, hashes)

    monkeypatch.setattr(file_manifest, "read_verified", counted)
    hashes = read_manifest(folder)
    (folder / "in" / "a").write_text("b")
    shares = []
    for process in range(3):
        read.clear()
        faults = find_faults(folder, hashes, share=(process, 3))
        shares.append((set(read), faults))
    assert sum(len(files) for files, _ in shares) == 11 == len(set.union(*(files for files, _ in shares)))
    found = [fault for _, faults in shares for fault in faults]
    assert found == [f"{folder}/in/a is not what was written: its hash differs"]


def test_parts_of_processes_become_one(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text(name)
    for process, name in enumerate("ab"):
        write_part(tmp_path, process, {name: entry_of((tmp_path / name).read_bytes())})
    (tmp_path / "a").write_text("z")  # after its process hashed it: what it wrote counts
    write_manifest(tmp_path, parts=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a", "b", "c", MANIFEST]
    assert find_faults(tmp_path, read_manifest(tmp_path)) == [f"{tmp_path}/a is not what was written: its hash differs"]


def test_a_process_that_left_no_hashes_is_an_error(tmp_path):
    write_part(tmp_path, 0, {})
    with pytest.raises(FileNotFoundError, match=r"manifest\.1\.json"):
        write_manifest(tmp_path, parts=2)
    assert not (tmp_path / MANIFEST).exists()


@pytest.mark.parametrize("content", ["", "[", "[]", '{"a": 1}', '{"../a": [1, "x"]}', '{"/a": [1, "x"]}', "[" * 10**5])
def test_what_is_no_manifest(tmp_path, content):
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(DamagedFiles, match=r"manifest\.json is not what was written"):
        read_manifest(tmp_path)
