"""Kernels compile in the chunks that `auto` chooses: what is committed is of today's, and a sample compiles again."""

import json
from pathlib import Path

import pytest

from benchmarks import kernel_matrix
from benchmarks.kernel_matrix import (
    IN_WINDOW,
    PLACE,
    Cell,
    cells,
    kernel_code,
    program,
    read,
    trace_cell,
    try_cell,
    try_cells,
    write,
)
from ringformer.estimate.kernels.pair_kernels import TARGETS
from ringformer.estimate.workloads.targets import only_compilers
from tests.hlo import on_tpu

COMMITTED = Path(__file__).parent.parent / "results" / "kernel_matrix.json"
AGAIN = f"python {Path(kernel_matrix.__file__).parent.name}/kernel_matrix.py compiles them"


def test_every_kernel_that_auto_chooses_compiled():
    """A changed preset, table, choice of chunks or kernel demands it anew."""
    assert json.loads(COMMITTED.read_text())["kernel_code"] == kernel_code(), f"the kernels are others: {AGAIN}"
    wanted, known = {cell for generation in TARGETS for cell in cells(generation)}, read(COMMITTED)
    assert wanted == known.keys(), AGAIN
    assert [str(cell) for cell, row in known.items() if not row["compiled"]] == []


def test_a_cell_is_kept_if_its_program_is_the_same(tmp_path, monkeypatch):
    """Whatever changed in the code; nothing is traced while the code is the same."""
    path = tmp_path / "matrix.json"
    kept, changed = [cell for cell in cells("v5e") if cell.kind == "backward"][:2]
    programs = {kept: "a", changed: "b"}
    traced = []
    monkeypatch.setattr(kernel_matrix, "program", lambda cell: traced.append(cell) or programs[cell])
    write(path, {cell: cell._asdict() | {"program": programs[cell], "compiled": True} for cell in programs})
    assert read(path).keys() == {kept, changed} and not traced
    monkeypatch.setattr(kernel_matrix, "kernel_code", lambda: "another")
    programs[changed] = "c"
    assert read(path).keys() == {kept} and traced == [kept, changed]


@on_tpu
def test_programs_differ_where_kernels_do():
    """In masks, chunks and direction; not in the place of a line."""
    only_compilers()
    cell = SAMPLE[3]
    assert program(cell) == program(cell)
    changes = [{"masks": "ids"}, {"adds": True}, {"k_chunk": 256}, {"kind": "forward"}]
    programs = {program(cell._replace(**change)) for change in [{}, *changes]}
    assert len(programs) == 1 + len(changes)
    assert ".py:" not in PLACE.sub("", str(trace_cell(cell).jaxpr))


def test_the_cells_are_of_every_shape_mask_and_direction():
    """The heads of the presets: two of 32 a key head (tiny), one of 100 (3B), ..., sixteen of 128 (405B)."""
    for generation in TARGETS:
        found = {c for c in cells(generation) if c.masks != IN_WINDOW}
        windowed = {(c.heads, c.head_dim, c.kind) for c in set(cells(generation)) - found}
        of_windows = {(4, 128), (1, 128), (5, 128), (2, 128)} | ({(4, 256), (2, 256)} if wide(generation) else set())
        assert windowed == {(*heads, kind) for heads in of_windows for kind in ("forward", "backward")}
        usual = {
            (2, 32),
            (1, 64),
            (4, 64),
            (7, 64),
            (1, 100),
            *((heads, 128) for heads in (1, 2, 3, 4, 5, 6, 7, 8, 10, 16)),
        }
        assert {c[1:3] for c in found} == usual | ({(4, 256), (2, 256)} if wide(generation) else set())
        for c in found:
            each = {(o.masks, o.kind) for o in found if o[:7] == c[:7] and o.key_heads == c.key_heads}
            assert len(each) in (4, 6), "two masks or three, forward and backward"
            assert len(each) == 6 or c.generation == "v4", "a bias fits elsewhere"
    assert {c.q_chunk for c in cells("v5e")} == {512, 1024, 2048}


def wide(generation: str) -> bool:
    """Return True if `auto` chooses the kernel for heads of 256."""
    return any(c.head_dim == 256 for c in cells(generation))


SAMPLE = [
    Cell("v6e", 4, 64, 1024, 1024, 8192, 2, "none", "backward"),  # once asked for half of the memory that it needs
    Cell("v4", 16, 128, 256, 512, 4096, 2, "ids and bias", "backward"),
    Cell("v5p", 16, 128, 512, 512, 4096, 2, "ids", "forward"),
    Cell("v5e", 1, 128, 512, 512, 4096, 2, "ids and bias", "backward", adds=False),
]


@on_tpu
@pytest.mark.parametrize("cell", [SAMPLE[0], *(pytest.param(c, marks=pytest.mark.slow) for c in SAMPLE[1:])], ids=str)
def test_a_sample_compiles(cell):
    only_compilers()
    assert try_cell(cell)["why"] == ""


@on_tpu
def test_a_kernel_that_is_too_large_is_a_cell_that_did_not_compile():
    only_compilers()
    answer = try_cell(Cell("v4", 16, 128, 512, 512, 4096, 2, "none", "backward"))
    assert not answer["compiled"] and "vmem" in answer["why"]


def test_a_compiler_that_dies_takes_one_cell_with_it(monkeypatch):
    """Every process here is one that answers for a cell and dies of the second."""
    answer = json.dumps({"compiled": True, "why": "", "cpu_seconds": 0.1})
    command = f"echo '{answer}'; exit 7"
    real = kernel_matrix.subprocess.Popen
    monkeypatch.setattr(kernel_matrix.subprocess, "Popen", lambda _, **how: real(command, shell=True, **how))
    found = dict(try_cells(SAMPLE[:3].copy()))
    assert [found[cell]["compiled"] for cell in SAMPLE[:3]] == [True, False, True]
    assert found[SAMPLE[1]]["why"] == "the compiler's process ended with 7"
