"""Of which sizes the programs of a session are: few sizes, since each is a program that has to be compiled."""

import math
from typing import NamedTuple

from ringformer.inference.cached_attention import Travels, cheaper_to_move
from ringformer.models.llama_config import LlamaConfig
from ringformer.ops.layouts import PARTS, Layout

SIZES = 64
"""So many sizes of long chunks are compiled at most: they come in steps of this part of the longest."""
SHORTEST = 256
"""Slots of a rank, so few of which are always read: a program for fewer is not worth its compilation."""


def granule(layout: Layout, tp: int, sp: int) -> int:
    """Tokens of a chunk come in multiples of this many."""
    return sp * math.lcm(PARTS[layout], tp)


def step_of_sizes(granule: int, max_length: int) -> int:
    """Tokens between the sizes of long chunks."""
    return granule * max(1, max_length // SIZES // granule)


class ProgramSizes(NamedTuple):
    """Of the programs for rows of at most `max_length` tokens, on a ring of `ranks`."""

    ranks: int
    granule: int
    max_length: int
    prefill_chunk: int | None = None
    """Tokens of a row that are taken in at once; None: all of them."""

    @property
    def most(self) -> int:
        """Tokens of the longest chunk."""
        return round_up(min(self.prefill_chunk or self.max_length, self.max_length), self.granule)

    @property
    def step(self) -> int:
        return step_of_sizes(self.granule, self.max_length)

    @property
    def capacity(self) -> int:
        """Slots of a rank: a few more than tokens, for the padding of chunks (at most a 64th)."""
        return round_up(self.max_length, self.step) // self.ranks

    def read(self, top: int) -> int:
        """Slots that a program reads if those below `top` may hold something: all, or half of them, a quarter..."""
        read = self.capacity
        while read % 2 == 0 and read // 2 >= max(top, SHORTEST):
            read //= 2
        return read

    def chunk(self, longest: int, room: int) -> int:
        """The tokens that a chunk, whose longest row has so many, is padded to; the cache has room for so many."""
        size = self.granule
        while size < longest <= self.step:
            size *= 2
        size = min(size, self.step) if longest <= self.step else round_up(longest, self.step)
        size = min(size, self.most)
        return size if size <= room else round_up(longest, self.granule)

    def cached(self, config: LlamaConfig, tokens: int, top: int) -> tuple[int, Travels]:
        """How many slots of a rank a chunk of so many tokens attends to, and what travels for it."""
        cached = min(round_up(top, tokens // self.ranks), self.capacity)
        travels = cheaper_to_move(config, tokens, top * self.ranks) if self.ranks > 1 else "queries"
        return self.read(top) if cached and travels == "queries" else cached, travels


def round_up(n: int, step: int) -> int:
    """The next multiple of the step."""
    return -(-n // step) * step
