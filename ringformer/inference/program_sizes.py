"""Sizes of the programs of a session. There are few sizes, because each size needs its own compiled program."""

import math
from typing import NamedTuple

from ringformer.inference.cache.chunk_attention import Reads, cheaper_to_move
from ringformer.models.decoder_config import DecoderConfig
from ringformer.ops.layouts import PARTS, Layout

SIZES = 64
"""Maximum number of sizes of long chunks. Sizes grow in steps of 1/SIZES of the longest chunk."""
SHORTEST = 256
"""Minimum number of slots of a rank that a program reads. Reading fewer would not save enough time to repay another
compilation."""
PIECE = 2**14
"""Maximum number of slots of a piece of the cache. Longer pieces have fewer results to merge; shorter ones take less
memory."""


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
        """Number of tokens of the longest chunk. On each rank, it is a whole number of pieces if it is longer."""
        most = round_up(min(self.prefill_chunk or self.max_length, self.max_length), self.granule)
        return round_up(most, self.granule * -(-most // self.ranks // PIECE))

    @property
    def piece(self) -> int:
        """Number of slots of a rank that a chunk attends to at a time."""
        share = self.most // self.ranks
        piece = share // -(-share // PIECE) if share >= SHORTEST else round_up(SHORTEST, share)
        return min(piece, self.capacity)

    @property
    def step(self) -> int:
        """Tokens between the sizes of long chunks."""
        return self.granule * max(1, self.max_length // SIZES // self.granule)

    @property
    def capacity(self) -> int:
        """Number of slots of a rank: its share of max_length, plus at most a 64th for the padding of chunks."""
        return max(round_up(self.max_length, self.step), self.most) // self.ranks

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

    def unpadded(self, tokens: int) -> int:
        """Return the largest number of tokens, up to `tokens`, that a session reads into its empty cache without
        padding."""
        return tokens - tokens % self.most % self.step

    def reads(self, config: DecoderConfig, tokens: int, top: int, holes: bool = False) -> Reads | None:
        """Return how a chunk of `tokens` reads the slots below `top`; None: there are none."""
        if not top:
            return None
        travels = cheaper_to_move(config, tokens, top * self.ranks) if self.ranks > 1 else "queries"
        return Reads(self.read(top), self.piece, travels, holes)


def round_up(n: int, step: int) -> int:
    """Round up to a multiple of `step`."""
    return -(-n // step) * step
