"""What was read of machine code stays for the next estimate, and only for the same compiler."""

import pytest

from ringformer.estimate.kernels import kernel_cycles
from ringformer.estimate.kernels.kernel_cycles import KernelCache
from ringformer.estimate.workloads.targets import find_target


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    versions = {"libtpu": "1.0"}
    monkeypatch.setattr(kernel_cycles, "compiler_versions", lambda target: versions)
    return versions


def test_what_is_added_is_read_again():
    cache = KernelCache.of(find_target("v5e-8"))
    assert cache.read() == {}
    assert cache.add({"a": 7.0, "b": None}) == {"a": 7.0, "b": None}
    assert cache.add({"b": 8.0}) == {"a": 7.0, "b": 8.0} == KernelCache.of(find_target("v5e-256")).read()


def test_another_chip_or_compiler_knows_nothing(home):
    KernelCache.of(find_target("v5e-8")).add({"a": 7.0})
    assert KernelCache.of(find_target("v6e-8")).read() == {}
    home["libtpu"] = "1.1"
    assert KernelCache.of(find_target("v5e-8")).read() == {}


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"a": "x"}', '{"a": 7'])
def test_a_broken_file_knows_nothing_and_is_written_anew(content):
    cache = KernelCache.of(find_target("v5e-8"))
    cache.add({"a": 7.0})
    cache.path.write_text(content)
    assert cache.read() == {}
    assert cache.add({"b": 1.0}) == cache.read() == {"b": 1.0}


def test_where_nothing_can_be_written_it_still_answers(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert KernelCache.of(find_target("v5e-8")).add({"a": 7.0}) == {"a": 7.0}
