"""Best chunks of the TPU kernels for each generation and head size, from tables that `ringformer tune` writes."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from ringformer.files.json_text import parse_json
from ringformer.hardware import CHIPS

TABLES = Path(__file__).parent / "chunk_tables"
"""Folder with a file GENERATION.json for each tuned generation."""

STRETCH = 32768
"""Tokens of the shard for which chunks were evaluated: a 7B model's shard at a context of 8,388,608 tokens on 256
chips."""


def chunk_sizes(generation: str, head_dim: int) -> tuple[int, int] | None:
    """Return the tokens of a chunk of queries and of a chunk of keys for heads of `head_dim` features, as tuned for the
    next larger head size; None if the generation, or a head that large, was not tuned. Raises ValueError for an invalid
    table."""
    if generation not in {path.stem for path in TABLES.glob("*.json")}:
        return None
    sizes = _read(TABLES / f"{generation}.json", generation)
    return next((sizes[tuned] for tuned in sorted(sizes) if tuned >= head_dim), None)


def read_chunk_sizes(path: Path, generation: str) -> dict[int, tuple[int, int]]:
    """Read a table's chunks by head size. Raises ValueError if the table is invalid, or belongs to another
    generation."""
    renew = f"ringformer tune --target={generation} writes one"
    try:
        table = parse_json(path.read_text())
        sizes = {row["head_dim"]: (row["q_chunk"], row["k_chunk"]) for row in table["sizes"]}
        chip = table["generation"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a table of chunk sizes ({error!r}); {renew}") from error
    if chip != generation:
        raise ValueError(f"{path} is a table for {chip}, not for {generation}; {renew}")
    if not sizes or any(type(n) is not int or n <= 0 for head_dim, pair in sizes.items() for n in (head_dim, *pair)):
        raise ValueError(f"{path} has sizes that are not positive integers; {renew}")
    return sizes


def tuned_share(generation: str, head_dim: int) -> float | None:
    """Return the share of a core's peak matrix FLOPs that a train step's attention reaches in the chunk pairs that it
    computes, with the tuned chunks and with segment ids; None if the generation, or a head that large, was not
    tuned."""
    if chunk_sizes(generation, head_dim) is None:
        return None
    row = min(
        (row for row in _rows(TABLES / f"{generation}.json") if row["head_dim"] >= head_dim),
        key=lambda row: row["head_dim"],
    )
    cores = CHIPS[generation].tensor_cores
    assert cores is not None, "tables are for TPUs"
    needed = row["share_of_ideal"] * cores.filled(row["head_dim"])  # of a causal stretch, without masked-out work
    computed = 1 + max(row["q_chunk"], row["k_chunk"]) / STRETCH
    return needed * computed * head_dim / row["head_dim"]  # smaller heads take as long


@lru_cache
def _rows(path: Path) -> list[dict[str, Any]]:
    return parse_json(path.read_text())["sizes"]


_read = lru_cache(read_chunk_sizes)
