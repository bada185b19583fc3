"""Options of packing documents into sequences; keys of a run's `data`."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

Packing = Literal["stream", "whole"]
PackedAttention = Literal["document", "sequence"]
MixtureBy = Literal["sequences", "tokens"]


@dataclass(frozen=True)
class PackingOptions:
    """Packing of a store's documents into sequences: the selection of documents, cutting, and attention."""

    key_prefix: ClassVar[str] = ""
    """Prefix of a field's name in errors; a config has keys such as data.packing."""

    packing: Packing = "stream"
    """stream: documents end to end, cut every seq_len tokens. whole: uncut, with padding. See docs/data.md."""
    packed_attention: PackedAttention = "document"
    """document: a token sees its own document, at positions from the document's start. sequence: a token sees the whole
    packed sequence before it, at positions from the sequence's start."""
    min_length: int = 0
    """Fewest tokens of a document to use, including those that begin and end it."""
    max_length: int = 0
    """Most tokens of a document to use, including those that begin and end it; 0: no limit."""
    mixture_by: MixtureBy = "sequences"
    """Unit of the weights of a mixture: sequences, or tokens of text, of which sequences of whole documents have
    different numbers."""
    buckets: int = 0
    """Number of length buckets for short documents, each half as long as the one before, with packing=whole and
    packed_attention=document: the documents of a batch are of at most 1/2^k of the sequence, for a k from 0 to buckets,
    and its rings 2^k times smaller. One train step is compiled for each k."""

    position_range: int = 0
    """Shift positions of each document behind a random cut, up to a context of this many tokens (PoSE), to extend the
    context by training on short sequences; 0: no shifts. Held-out data keep their positions."""

    @property
    def has_segments(self) -> bool:
        """True if sequences have segment ids, because tokens do not see all tokens before them."""
        return self.packing == "whole" or self.packed_attention == "document"

    def __post_init__(self) -> None:
        key = self.key_prefix
        choices = {"packing": Packing, "packed_attention": PackedAttention, "mixture_by": MixtureBy}
        for field, choice in choices.items():
            values = get_args(choice)
            if getattr(self, field) not in values:
                raise ValueError(f"unknown {key}{field} {getattr(self, field)!r}; known: {', '.join(values)}")
        if type(self.buckets) is not int:
            raise ValueError(
                f"{key}buckets={self.buckets!r} must be a whole number: the times that sequences are halved"
            )
        if self.buckets < 0:
            raise ValueError(f"{key}buckets={self.buckets} must not be negative: the times that sequences are halved")
        if self.buckets and (self.packing != "whole" or self.packed_attention != "document"):
            raise ValueError(
                f"{key}buckets={self.buckets} needs {key}packing='whole' and {key}packed_attention='document', so that "
                f"no token sees beyond a document that fits; got {self.packing!r} and {self.packed_attention!r}"
            )
        if type(self.position_range) is not int or not 0 <= self.position_range < 2**31:
            raise ValueError(
                f"{key}position_range={self.position_range!r} must be a number of tokens below 2^31, or 0: positions "
                "have 32 bits"
            )
        if self.min_length < 0 or self.max_length < 0 or 0 < self.max_length < self.min_length:
            raise ValueError(
                f"{key}min_length={self.min_length} and {key}max_length={self.max_length} leave no "
                "length; both are at least 0, and max_length, unless 0, not below min_length"
            )
