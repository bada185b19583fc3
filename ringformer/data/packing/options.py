"""Options of packing: how the loader makes sequences of documents, and keys of a run's `data`."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

Packing = Literal["stream", "whole"]
PackedAttention = Literal["document", "sequence"]


@dataclass(frozen=True)
class PackingOptions:
    """The way from a store's documents to sequences: which of them, cut or uncut, and what their tokens see."""

    key_prefix: ClassVar[str] = ""
    """The text before a field\'s name in errors; a config has keys such as data.packing."""

    packing: Packing = "stream"
    """stream: documents end to end, cut every seq_len tokens. whole: uncut, with padding. See docs/data.md."""
    packed_attention: PackedAttention = "document"
    """document: a token sees its own document, at positions from the document's start. sequence: all of the packed
    sequence before it, at positions from the sequence's start."""
    min_length: int = 0
    """Only documents of at least so many tokens, end token included."""
    max_length: int = 0
    """Only documents of at most so many tokens, end token included; 0: no limit."""

    @property
    def has_segments(self) -> bool:
        """Whether sequences have segment ids: tokens that do not see all tokens before them."""
        return self.packing == "whole" or self.packed_attention == "document"

    def __post_init__(self):
        key = self.key_prefix
        for field, known in (("packing", get_args(Packing)), ("packed_attention", get_args(PackedAttention))):
            if getattr(self, field) not in known:
                raise ValueError(f"unknown {key}{field} {getattr(self, field)!r}; known: {', '.join(known)}")
        if self.min_length < 0 or self.max_length < 0 or 0 < self.max_length < self.min_length:
            raise ValueError(
                f"{key}min_length={self.min_length} and {key}max_length={self.max_length} leave no "
                "length; both are at least 0, and max_length, unless 0, not below min_length"
            )
