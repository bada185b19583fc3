"""The chunks that suit the TPU kernels best, by generation and head size: what `ringformer tune` found and wrote."""

import json
from functools import lru_cache
from pathlib import Path

TABLES = Path(__file__).parent / "chunk_tables"
"""A file GENERATION.json for each generation that was tuned."""


def chunk_sizes(generation: str, head_dim: int) -> tuple[int, int] | None:
    """Tokens of a chunk of queries and of keys for heads of so many features, those of the next larger size that was
    tuned; None if the generation, or so large a head, was not. Raises ValueError for a table that cannot be used."""
    if generation not in {path.stem for path in TABLES.glob("*.json")}:
        return None
    sizes = _read(TABLES / f"{generation}.json", generation)
    return next((sizes[tuned] for tuned in sorted(sizes) if tuned >= head_dim), None)


def read_chunk_sizes(path: Path, generation: str) -> dict[int, tuple[int, int]]:
    """The chunks of a table by head size. Raises ValueError if it is another generation's, or no table."""
    renew = f"ringformer tune --target={generation} writes one"
    try:
        table = json.loads(path.read_text())
        sizes = {row["head_dim"]: (row["q_chunk"], row["k_chunk"]) for row in table["sizes"]}
        chip = table["generation"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no table of chunk sizes ({error!r}); {renew}") from error
    if chip != generation:
        raise ValueError(f"{path} is a table of {chip}, and not of {generation}; {renew}")
    if not sizes or any(type(n) is not int or n <= 0 for head_dim, pair in sizes.items() for n in (head_dim, *pair)):
        raise ValueError(f"{path} has sizes that are no positive integers; {renew}")
    return sizes


_read = lru_cache(read_chunk_sizes)
