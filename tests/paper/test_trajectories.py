"""The memory half of Table 5: its cells, and what its rows say."""

from collections import defaultdict
from dataclasses import replace

import pytest

from ringformer.estimate.choices import memory_settings
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.paper.attempts import read
from ringformer.paper.cells import cells as cells_of_table_3
from ringformer.paper.max_context import fill
from ringformer.paper.trajectories import MODEL, TRAJECTORY, cells, most_rows, paper_rows, setups
from tests.estimate.search.test_longest_context import estimate_of


def test_the_agent_has_the_papers_sizes():
    """24 layers of 1024 features with 16 heads, counted by hand."""
    config = LlamaConfig(**preset(MODEL))
    assert (config.num_layers, config.hidden_size, config.num_heads, config.head_dim) == (24, 1024, 16, 64)
    layer = 4 * 1024**2 + 3 * 1024 * 2816 + 2 * 1024
    assert config.num_params == 24 * layer + 2 * 1024 * 1024 + 1024


def test_cells_are_eight_sequences_or_a_ring_of_eight():
    assert len({cell.name for cell in cells()} | {cell.name for cell in cells_of_table_3()}) == 24 + len(
        cells_of_table_3()
    )
    for cell in cells():
        workload = cell.workload(32 * TRAJECTORY)
        ring = cell.attention == "ring"
        assert (workload.mesh_dim, workload.batch_size) == (("1,1,1,8", 1) if ring else ("1,8,1,1", 8))
        assert workload.target.num_devices == 8 and workload.model.attention == cell.attention
        assert replace(workload.model, attention="ring", compute_dtype="float32") == replace(
            LlamaConfig(**preset(MODEL)), attention="ring", kernel="xla", compute_dtype="float32"
        )


@pytest.mark.parametrize(
    ("attention", "lengths"), [("blockwise", [32, 128, 64]), ("ring", [128, 256, 512, 1024, 2048])]
)
def test_the_papers_cells_are_compiled_whatever_the_search_finds(attention, lengths, tmp_path, monkeypatch):
    """A compiler that fits 64 trajectories without a ring, and 1,024 with one."""
    most = {"blockwise": 64, "ring": 1024}
    monkeypatch.setattr(
        memory_settings,
        "compile_apart",
        lambda w, generate_code: estimate_of(w, fits=w.seq_len <= most[w.model.attention] * TRAJECTORY),
    )
    cell = setups()["v4-16", "float32"][attention]
    fill(tmp_path / "t.json", [cell], lambda line: None)
    results = read(tmp_path / "t.json")
    assert [a["seq_len"] // TRAJECTORY for a in results[cell.name]] == lengths
    assert '"command": "ringformer tables --only=table5"' in (tmp_path / "t.json").read_text()
    column = {"blockwise": 3, "ring": 4}[attention]
    (row,) = (row for row in most_rows(results) if row.startswith("| v4-16 | float32 "))
    assert [text.strip() for text in row.split("|")[1:-1]][column + 1] == str(most[attention])


def attempt(trajectories, fits, GiB=1.0):
    return {"seq_len": trajectories * TRAJECTORY, "fits": fits, "peak_bytes": GiB * 2**30}


def test_rows_say_what_was_compiled():
    results = defaultdict(list)
    of_v4 = setups()["v4-16", "float32"]
    results[of_v4["vanilla"].name] = [attempt(0.25, False)]
    results[of_v4["memory_efficient"].name] = [attempt(32, True, 22.27), attempt(64, False)]
    results[of_v4["blockwise"].name] = [attempt(32, True, 17.3), attempt(128, False, 67.14)]
    results[of_v4["ring"].name] = [attempt(128, True, 9.32)]
    assert most_rows(results)[0] == "| v4-16 | float32 | none | 32 | ≥ 32 | ≥ 128 |"
    assert paper_rows(results)[0] == (
        "| v4-16 | float32 | 30.75 | fits, 22.27 | fits, 17.30 | no, 67.14 | fits, 9.32 |"
    )
    assert most_rows(results)[1] == "| v5e-8 | float32 |  |  |  |  |"
