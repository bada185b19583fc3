"""Tables are read in batches of bounded size, with the row's number in every name."""

from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringformer.data.sources.records import read_rows
from ringformer.data.sources.row_sizes import Wanted
from ringformer.data.sources.tables import pinned, read_tables

ROWS = [{"text": f"row {i}", "n": i, "deep": [{"a": None}, {"a": i}]} for i in range(2500)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, folder / "a.parquet", row_group_size=1000)
    with pa.ipc.new_file(folder / "file.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=700)
    with pa.ipc.new_stream(folder / "stream.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=1700)
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
    return {
        "parquet": f"parquet:{folder}/*.parquet",
        "file": f"arrow:{folder}/file.arrow",
        "stream": f"arrow:{folder}/stream.arrow",
        "datasets": f"datasets:{folder}/saved",
        "cache": f"arrow:{folder}/saved/*.arrow",
    }


@pytest.mark.parametrize("kind", ["parquet", "file", "stream", "datasets", "cache"])
def test_rows_are_all_there_in_order(sources, kind):
    rows = list(read_rows(sources[kind]))
    assert [row.record for row in rows] == ROWS
    assert [row.name.rpartition(":")[2] for row in rows] == [str(i) for i in range(len(ROWS))]
    assert [row.record for row in read_rows(sources[kind], only=("n", "other"))] == [{"n": row["n"]} for row in ROWS]
    batches = list(read_tables(sources[kind], split="train", wanted=Wanted(batch_bytes=20_000)))
    assert [r for batch in batches for r in batch.columns.to_pylist()] == ROWS
    assert max(len(batch.columns) for batch in batches) < 200, "batches of large rows have few"


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_damaged_table_is_named(tmp_path, sources, kind):
    source = sources["parquet" if kind == "parquet" else "stream"].partition(":")[2]
    whole = Path(source.replace("*", "a")).read_bytes()
    ends = [whole.rindex(b"\xff\xff\xff\xff")] if kind == "arrow" else []  # whole batches, but not all of them
    for content in (whole[:-1000], b"", b"x" * 1000, *(whole[:end] for end in ends)):
        (tmp_path / "t").write_bytes(content)
        with pytest.raises(ValueError, match=rf"^{tmp_path}/t is not an? (parquet|Arrow) file, or it is damaged: "):
            list(read_rows(f"{kind}:{tmp_path}/t"))


def test_a_damaged_file_of_a_saved_dataset_is_named(tmp_path):
    """`datasets` would map it into memory, where wrong offsets end the process."""
    datasets.Dataset.from_list(ROWS[:3]).save_to_disk(str(tmp_path / "saved"))
    (path,) = (tmp_path / "saved").glob("*.arrow")
    offsets = b"".join(size.to_bytes(4, "little") for size in (0, 5, 10, 15))
    content = path.read_bytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, offsets[:4] + (-5).to_bytes(4, "little", signed=True) + offsets[8:]))
    with pytest.raises(ValueError, match=rf"^{path} is not an Arrow file, or it is damaged: .*offset"):
        list(read_rows(f"datasets:{tmp_path}/saved"))


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_texts_of_every_encoding_are_read(tmp_path, encoding):
    """Some cannot be read as numbers of a dictionary's values, and a large dictionary is not."""
    texts = [f"text {i}" for i in range(300)] + ["a" * 2**20] * 3
    turns = [[{"role": "user", "content": text}] for text in texts]
    table = pa.table({"text": texts, "turns": turns})
    leaves = {"text": encoding, "turns.list.element.content": encoding}
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, column_encoding=leaves)
    assert [row.record for row in read_rows(f"parquet:{tmp_path}/a.parquet")] == table.to_pylist()
    large = pa.table({"text": [f"{i}" * 2**20 for i in range(10)]})
    pq.write_table(large, tmp_path / "b.parquet")
    assert [row.record for row in read_rows(f"parquet:{tmp_path}/b.parquet")] == large.to_pylist()


def test_only_datasets_of_the_hub_have_a_commit(sources):
    assert {pinned(source) for source in ("stdlib", "jsonl:a/b", "text:a/b", *sources.values())} == {None}


def test_a_dataset_that_cannot_be_read_is_one_line(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.jsonl").write_text('{"text": "a"}\n{"text"')
    with pytest.raises(ValueError, match=rf"^dataset {tmp_path}/broken cannot be read: [^\n]*$"):
        list(read_rows(f"datasets:{tmp_path}/broken"))
    with pytest.raises(ValueError, match="there is no folder nosuch; a dataset of the hub is hf://ORGANISATION/NAME"):
        list(read_rows("datasets:nosuch"))
