"""Sizes of the programs of a session. There are few sizes, because each size needs its own compiled program."""

import math
from typing import NamedTuple

from ringformer.inference.cached_attention import Travels, cheaper_to_move
from ringformer.models.decoder_config import DecoderConfig
from ringformer.ops.layouts import PARTS, Layout

SIZES = 64
"""Maximum number of sizes of long chunks. Sizes grow in steps of 1/SIZES of the longest chunk."""
SHORTEST = 256
"""Minimum number of slots of a rank that a program reads. Reading fewer would not save enough time to repay another
compilation."""


def granule(layout: Layout, tp: int, sp: int) -> int:
    """Return the number of tokens that a chunk's length must be a multiple of."""
    return sp * math.lcm(PARTS[layout], tp)


class ProgramSizes(NamedTuple):
    """Sizes of the programs for rows of at most `max_length` tokens on a ring of `ranks` devices."""

    ranks: int
    granule: int
    max_length: int
    prefill_chunk: int | None = None
    """Number of tokens of a row to read at a time; None: all of them."""

    @property
    def most(self) -> int:
        """Number of tokens of the longest chunk."""
        return round_up(min(self.prefill_chunk or self.max_length, self.max_length), self.granule)

    @property
    def step(self) -> int:
        """Tokens between the sizes of long chunks."""
        return self.granule * max(1, self.max_length // SIZES // self.granule)

    @property
    def capacity(self) -> int:
        """Number of slots of a rank: its share of max_length, plus at most a 64th for the padding of chunks."""
        return round_up(self.max_length, self.step) // self.ranks

    def read(self, top: int) -> int:
        """Return the number of slots that a program reads if the slots below `top` may be in use. It is all slots, half
        of them, a quarter, and so on."""
        read = self.capacity
        while read % 2 == 0 and read // 2 >= max(top, SHORTEST):
            read //= 2
        return read

    def chunk(self, longest: int, room: int) -> int:
        """Return the number of tokens to pad a chunk to, if its longest row has `longest` tokens and the cache has room
        for `room`."""
        size = self.granule
        while size < longest <= self.step:
            size *= 2
        size = min(size, self.step) if longest <= self.step else round_up(longest, self.step)
        size = min(size, self.most)
        return size if size <= room else round_up(longest, self.granule)

    def cached(self, config: DecoderConfig, tokens: int, top: int) -> tuple[int, Travels]:
        """Return the number of a rank's slots that a chunk of `tokens` attends to, and which arrays travel for it."""
        cached = min(round_up(top, tokens // self.ranks), self.capacity)
        travels = cheaper_to_move(config, tokens, top * self.ranks) if self.ranks > 1 else "queries"
        return self.read(top) if cached and travels == "queries" else cached, travels


def round_up(n: int, step: int) -> int:
    """Round up to a multiple of `step`."""
    return -(-n // step) * step
