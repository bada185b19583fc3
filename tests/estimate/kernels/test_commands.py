"""`ringformer tune`: what it writes is what the kernels read."""

import json

import pytest

from ringformer.cli import main
from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.kernels import chunk_search
from ringformer.ops.kernels.chunk_sizes import read_chunk_sizes
from tests.estimate.kernels.test_chunk_search import count
from tests.hlo import on_tpu


@on_tpu
def test_the_table_is_read_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        chunk_search.search, "__defaults__", (count(lambda pair: pair.head_dim < 256 or pair.k_chunk < 1024),)
    )
    out = tmp_path / "v6e.json"
    assert main(["tune", "--target=v6e-64", f"--out={out}"]) == 0
    said = capsys.readouterr().out
    assert "v6e, heads of 256: 1024 x 1024: too large for the chip's VMEM" in said
    assert "v6e, heads of 128: best chunks 1024 x 1024" in said and said.endswith(f"written to {out}\n")
    table = json.loads(out.read_text())
    assert "libtpu" in table["compiled_by"] and all(len(row["candidates"]) >= 4 for row in table["sizes"])
    sizes = read_chunk_sizes(out, "v6e")
    assert list(sizes) == [64, 100, 128, 256] and sizes[128] == (1024, 1024) and sizes[256][1] == 512
    with pytest.raises(ValueError, match="is a table for v6e, not for v5e; ringformer tune --target=v5e writes one"):
        read_chunk_sizes(out, "v5e")


@pytest.mark.parametrize("target", ["v7", "v3-512", "8xH100"])
def test_an_unknown_target_is_answered_with_the_list(target, capsys):
    assert main(["tune", f"--target={target}"]) == 2
    said = capsys.readouterr().err
    assert said == f"ringformer tune: unknown target {target!r}; kernels are judged for v4, v5e, v5p, v6e, tpu7x\n"


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("{}/none/v5e.json", "there is no folder"),
        ("{}", "is a folder; name a file in it"),
        ("", "--out= names no place"),
        ("/proc/v5e.json", "/proc keeps no files"),
    ],
)
def test_a_file_that_cannot_be_written_is_said_before_hours_of_work(out, message, tmp_path, monkeypatch, capsys):
    def search(*_):
        raise AssertionError("it searches")

    monkeypatch.setattr(chunk_search, "search", search)
    assert main(["tune", "--target=v5e", f"--out={out.format(tmp_path)}"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@on_tpu
def test_a_compiler_that_breaks_down_leaves_no_table(tmp_path, monkeypatch, capsys):
    def breaks(generation, kind, pair):
        raise CompilerFailure("JaxRuntimeError: INTERNAL: so it is")

    monkeypatch.setattr(chunk_search.search, "__defaults__", (breaks,))
    assert main(["tune", "--target=v4", f"--out={tmp_path}/v4.json"]) == 1
    assert "heads of 64: the compiler broke down: JaxRuntimeError: INTERNAL: so it is" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
