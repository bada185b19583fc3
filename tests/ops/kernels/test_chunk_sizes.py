"""The table of chunk sizes that comes with the kernels, and tables that are none."""

import json
from pathlib import Path

import pytest

from ringformer.hardware import CHIPS
from ringformer.ops.kernels import chunk_sizes as module
from ringformer.ops.kernels.chunk_sizes import TABLES, chunk_sizes, read_chunk_sizes


def write(folder, generation="v5e", sizes=((64, 1024, 512), (128, 2048, 1024))):
    rows = [{"head_dim": d, "q_chunk": q, "k_chunk": k} for d, q, k in sizes]
    path = folder / "v5e.json"
    path.write_text(json.dumps({"generation": generation, "sizes": rows}))
    return path


def test_heads_between_have_the_next_larger(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setattr(module, "TABLES", tmp_path)
    assert [chunk_sizes("v5e", d) for d in (32, 64, 80, 128)] == [(1024, 512)] * 2 + [(2048, 1024)] * 2
    assert chunk_sizes("v5e", 256) is None and chunk_sizes("v4", 64) is None


def test_a_table_of_another_chip_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"v5e.json is a table for v4, not for v5e; ringformer tune --target=v5e"):
        read_chunk_sizes(write(tmp_path, generation="v4"), "v5e")


@pytest.mark.parametrize("sizes", [(), ((128, 0, 512),), ((128, 1024, 512.5),), ((128, "1024", 512),)])
def test_sizes_that_are_none_are_refused(tmp_path, sizes):
    with pytest.raises(ValueError, match="not positive integers"):
        read_chunk_sizes(write(tmp_path, sizes=sizes), "v5e")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sizes": [{}], "generation": "v5e"}'])
def test_what_is_no_table_is_refused(tmp_path, text):
    path = tmp_path / "v5e.json"
    path.write_text(text)
    with pytest.raises(
        ValueError, match=r"v5e.json is not a table of chunk sizes.*ringformer tune --target=v5e writes one"
    ):
        read_chunk_sizes(path, "v5e")


def test_the_tables_that_come_along_are_those_of_their_chips():
    for path in TABLES.glob("*.json"):
        assert path.stem in CHIPS
        for q_chunk, k_chunk in read_chunk_sizes(path, path.stem).values():
            assert q_chunk % 128 == k_chunk % 128 == 0


def test_the_page_says_what_the_tables_do():
    rows = {}
    for path in sorted(TABLES.glob("*.json")):
        for row in json.loads(path.read_text())["sizes"]:
            chunks = f"{row['q_chunk']} x {row['k_chunk']} ({row['share_of_ideal']:.1%})"
            rows.setdefault(row["head_dim"], []).append(chunks)
    page = (Path(__file__).parents[3] / "docs" / "performance.md").read_text()
    assert f"| heads of | {' | '.join(sorted(path.stem for path in TABLES.glob('*.json')))} |" in page
    for head_dim, chunks in rows.items():
        assert f"| {head_dim} | {' | '.join(chunks)} |" in page
