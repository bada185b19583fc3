"""Whether the TPU kernels compile, in the chunks that `auto` chooses, for every shape of head of the presets.

    python benchmarks/kernel_matrix.py [--target=v6e] [--out=results/kernel_matrix.json]

A cell is one kernel, forward or backward, compiled to machine code for one chip; nothing is run. There is a cell for
each chip (v4, v5e, v5p, v6e, tpu7x), each (query heads a key head, features) of the presets, each pair of chunks that
4K to 64K tokens on a rank lead to, alone or on a ring, and each mask: none, segment ids, and, where it fits the chip's
VMEM, segment ids with a bias of keys, which no preset has. That is all that a kernel's program depends on, so presets
that agree in it share a cell; and a cell stands for all lengths with its chunks:

- A length changes the chunks, and which arrays the compiler keeps on the chip beside the kernel. A cell has the
  shortest length of its chunks and two key heads, with which it keeps most; heads of 128 with one query head have,
  besides, the longest and 16 key heads, with which it keeps fewest. Causal or not is data of the grid: both bodies are
  in each kernel.
- A window adds comparisons to masked pairs: a cell with a window of 4,096 keys for heads of 128, four to a key head,
  and for each preset with windows, in the chunks of its layers with windows.
- A backward adds to gradients that arrived, as on a ring. One that does not, as on one device, lacks a copy: one a
  chip.

The compiler takes 0.3 to 20 CPU-seconds a cell, about an hour of CPU in all. The file is written after each cell, and
the same command goes on where it ended; it compiles anew what failed, what another compiler compiled, and what another
program is. The programs are traced if the kernels' code is another (its comments aside), 0.1 CPU-seconds each.
"""

import argparse
import ast
import hashlib
import io
import json
import re
import subprocess
import sys
import time
import tokenize
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from benchmarks.result_files import made, write_results
from ringformer.cli.parser import output_argument
from ringformer.estimate.kernels.pair_kernels import KEY_HEADS, TARGETS, Kind, Pair, find_generation, trace_kernel
from ringformer.estimate.workloads.targets import compiled_by, find_target, only_compilers
from ringformer.files.hashes import content_hash
from ringformer.models.attention_options import attention_options
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.kernel_choice import with_kernel
from ringformer.models.layer_kinds import LayerKind
from ringformer.models.registry import FAMILIES, preset_config
from ringformer.ops.kernels import flash_backward, flash_forward, kernel_tools, pair_call, pair_table

LENGTHS = tuple(1024 * n for n in (4, 8, 16, 32, 64))
"""Tokens of a rank."""
RANKS = 1, 8
"""Ranks of a ring, of which an eighth of the sequence is an eighth of a shard, or a whole one."""
MASKS = "none", "ids", "ids and bias"
IN_WINDOW, WINDOW = "ids and a window", 4096
KINDS: tuple[Kind, ...] = ("forward", "backward")
FEW_KEY_HEADS = 2
PLACE = re.compile(r" at \S+\.py:\d+")
"""A place in the source, in the text of a traced program."""


class Cell(NamedTuple):
    """A kernel to compile."""

    generation: str
    heads: int
    """Query heads of a key head."""
    head_dim: int
    q_chunk: int
    k_chunk: int
    tokens: int
    key_heads: int
    masks: str
    kind: Kind
    adds: bool = True

    def __str__(self) -> str:
        more = "" if self.adds else ", adds nothing"
        shape = f"{self.heads} heads of {self.head_dim} a key head, {self.q_chunk} x {self.k_chunk}"
        return f"{self.generation}, {shape}, {self.tokens:,} tokens, masks: {self.masks}, {self.kind}{more}"


PRESETS = [name for family in FAMILIES.values() if family.hugging_face for name in family.presets]


def shapes() -> dict[tuple[int, int], DecoderConfig]:
    """A preset for each number of query heads a key head, and of their features."""
    models = [preset_config(name, kernel="auto") for name in PRESETS]
    return {_shape(m): m for m in models[::-1]}


def _shape(model: DecoderConfig) -> tuple[int, int]:
    return model.num_heads // model.num_kv_heads, model.head_dim


def in_windows() -> list[DecoderConfig]:
    """Models with windows: the presets', and one for heads of 128, four to a key head."""
    models = [preset_config(name, kernel="auto") for name in PRESETS]
    usual = next(m for m in models if _shape(m) == (4, 128) and not m.window)
    return [m for m in models if m.window] + [replace(usual, window=WINDOW)]


def cells(generation: str) -> Iterator[Cell]:
    """Those of a generation, small chunks first."""
    chip, wanted = find_target(TARGETS[generation]).chip, set()
    for (heads, head_dim), model in shapes().items():
        lengths: dict[tuple[int, int], list[int]] = {}
        for tokens, ranks in product(LENGTHS, RANKS):
            chosen = cast(DecoderConfig, with_kernel(model, "tpu", chip, tokens, ring_size=ranks)[0])
            if chosen.kernel == "pallas":
                assert chosen.q_chunk and chosen.k_chunk
                lengths.setdefault((chosen.q_chunk, chosen.k_chunk), []).append(tokens)
        for chunks, tokens in lengths.items():
            places = [(tokens[0], FEW_KEY_HEADS)]
            places += [(tokens[-1], KEY_HEADS)] if (heads, head_dim) == (1, 128) and tokens[-1] == LENGTHS[-1] else []
            for length, key_heads in places:
                masks = MASKS if _has_room_for_bias(generation, heads, head_dim, chunks) else MASKS[:2]
                kernels = [(name, kind) for name in masks for kind in KINDS]
                wanted |= {Cell(generation, heads, head_dim, *chunks, length, key_heads, *of) for of in kernels}
    for windowed in in_windows():
        chosen = cast(DecoderConfig, with_kernel(windowed, "tpu", chip, LENGTHS[-1], ring_size=RANKS[-1])[0])
        if chosen.kernel == "pallas":
            options = attention_options(
                chosen, LayerKind(windowed.window), LENGTHS[-1], documents=True, parts=2 * RANKS[-1]
            )
            place = options["q_chunk"], options["k_chunk"], LENGTHS[-1], FEW_KEY_HEADS
            wanted |= {Cell(generation, *_shape(windowed), *place, IN_WINDOW, kind) for kind in KINDS}
    longest = max(c for c in wanted if (c.heads, c.head_dim, c.masks, c.kind) == (1, 128, MASKS[1], KINDS[-1]))
    yield from sorted({*wanted, longest._replace(adds=False)}, key=lambda c: (c.q_chunk * c.k_chunk, c))


def _has_room_for_bias(generation: str, heads: int, head_dim: int, chunks: tuple[int, int]) -> bool:
    cores = find_target(TARGETS[generation]).chip.tensor_cores
    assert cores is not None, "the targets are TPUs"
    needed = max(
        of(heads, head_dim, chunks, jnp.bfloat16, True, True).bytes
        for of in (flash_forward.forward_on_chip, flash_backward.backward_on_chip)
    )
    return needed <= cores.vmem_bytes


def kernel_code() -> str:
    """A hash of the kernels' code without comments and docstrings, the same on every Python."""
    code: list[str] = []
    for module in (flash_forward, flash_backward, kernel_tools, pair_call, pair_table):
        code += _code_lines(Path(module.__file__).read_text())
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:20]


def _code_lines(text: str) -> list[str]:
    """Return the lines of a module that are neither empty nor a comment nor in a docstring."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[number - 1] = ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return [line.rstrip() for line in lines if line.strip()]


def trace_cell(cell: Cell) -> jax.stages.Traced:
    window = WINDOW if cell.masks == IN_WINDOW else 0
    pair = Pair(cell.q_chunk, cell.k_chunk, cell.head_dim, cell.heads, int(cell.masks != "none"), window)
    return trace_kernel(
        find_target(TARGETS[cell.generation]),
        cell.kind,
        pair,
        tokens=cell.tokens,
        key_heads=cell.key_heads,
        biased="bias" in cell.masks,
        adds=cell.adds,
    )


def program(cell: Cell) -> str:
    """Return a hash of a cell's program, as JAX traces it, without places in the source."""
    text = str(trace_cell(cell).jaxpr)
    return content_hash(PLACE.sub("", text).encode())


def try_cell(cell: Cell) -> dict:
    """Compile a cell in this process: whether it compiled, and what it took."""
    begin = time.process_time()
    try:
        trace_cell(cell).lower().compile()
        why = ""
    except Exception as error:
        why = " ".join(str(error).split())[:400] or type(error).__name__
    return {"compiled": not why, "why": why, "cpu_seconds": round(time.process_time() - begin, 1)}


def try_cells(wanted: list[Cell]) -> Iterator[tuple[Cell, dict]]:
    """Compile cells in processes of their own; one that dies takes its cell with it, and the next goes on."""
    while wanted:
        command = [sys.executable, __file__, "--cells", json.dumps(wanted)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield wanted.pop(0), json.loads(line)
        if wanted:
            died = f"the compiler's process ended with {process.returncode}"
            yield wanted.pop(0), {"compiled": False, "why": died, "cpu_seconds": None}


def read(path: Path) -> dict[Cell, dict]:
    """Return the rows of the cells whose program is that of today."""
    content = json.loads(path.read_text()) if path.exists() else {"kernel_code": "", "cells": []}
    known = {Cell(*(row[name] for name in Cell._fields)): row for row in content["cells"]}
    if content["kernel_code"] == kernel_code():
        return known
    return {cell: row for cell, row in known.items() if program(cell) == row["program"]}


def write(path: Path, known: dict[Cell, dict]) -> None:
    """All that is known, of the cells that there are today."""
    today = [cell for generation in TARGETS for cell in cells(generation)]
    content = {
        "what": "compiled: TPU kernels alone, to machine code, in the chunks that auto chooses; nothing was run",
        "command": "python benchmarks/kernel_matrix.py",
        "kernel_code": kernel_code(),
        "cells": [known[cell] for cell in today if cell in known],
    }
    write_results(path, content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=find_generation, help="v4, v5e, v5p, v6e or tpu7x; without: all of them")
    parser.add_argument("--out", type=output_argument, default="results/kernel_matrix.json")
    parser.add_argument("--cells", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    only_compilers()
    if args.cells is not None:
        for cell in args.cells:
            print(json.dumps(try_cell(Cell(*cell))), flush=True)
        return
    known = read(args.out)
    if known:
        write(args.out, known)  # under the hash of today's code
    for generation in TARGETS if args.target is None else [args.target]:
        by, all_cells = compiled_by(find_target(TARGETS[generation])), list(cells(generation))
        done = [c for c in all_cells if c in known and known[c]["compiled"] and known[c]["compiled_by"] == by]
        missing = [c for c in all_cells if c not in done]
        for n, (cell, answer) in enumerate(try_cells(missing.copy()), len(done) + 1):
            stamp = {"program": program(cell), "compiled_by": by, "date": made()["date"]}
            known[cell] = cell._asdict() | answer | stamp
            write(args.out, known)
            verdict = "compiled" if answer["compiled"] else f"DID NOT COMPILE: {answer['why']}"
            print(f"[{n}/{len(all_cells)}] {cell}: {verdict}, {answer['cpu_seconds']} CPU-s", flush=True)
    failed = [cell for cell, row in known.items() if not row["compiled"]]
    print(f"{len(known)} cells, {len(failed)} of them did not compile")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
