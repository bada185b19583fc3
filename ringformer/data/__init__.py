"""Data: documents from a source, tokenized into a store, packed into sequences, loaded for the ring.

Public names are imported from their modules when they are first used: `import ringformer.data` imports nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringformer.data.loader import Loader as Loader
    from ringformer.data.packing.document_lengths import DocumentLengths as DocumentLengths
    from ringformer.data.packing.document_lengths import too_short as too_short
    from ringformer.data.packing.mixture import Mixture as Mixture
    from ringformer.data.packing.mixture import open_mixture as open_mixture
    from ringformer.data.packing.mixture import parse_mixture as parse_mixture
    from ringformer.data.packing.sequences import Batch as Batch
    from ringformer.data.packing.stream import DocumentStream as DocumentStream
    from ringformer.data.packing.whole_documents import WholeDocuments as WholeDocuments
    from ringformer.data.sources import Document as Document
    from ringformer.data.sources import Documents as Documents
    from ringformer.data.sources import read_documents as read_documents
    from ringformer.data.stores.prepare import build_stores as build_stores
    from ringformer.data.stores.prepare import open_or_build as open_or_build
    from ringformer.data.stores.token_store import TokenStore as TokenStore
    from ringformer.data.tokenizers.base import Segment as Segment
    from ringformer.data.tokenizers.base import Tokenizer as Tokenizer
    from ringformer.data.tokenizers.base import check_vocabulary as check_vocabulary
    from ringformer.data.tokenizers.byte_level import ByteTokenizer as ByteTokenizer
    from ringformer.data.tokenizers.load import load_tokenizer as load_tokenizer
    from ringformer.data.tokenizers.load import save_tokenizer as save_tokenizer
    from ringformer.data.tokenizers.sentencepiece import SentencePieceTokenizer as SentencePieceTokenizer
    from ringformer.data.tokenizers.sentencepiece import train_sentencepiece as train_sentencepiece

_NAMES = {
    "loader": ("Loader",),
    "packing.document_lengths": ("DocumentLengths", "too_short"),
    "packing.mixture": ("Mixture", "open_mixture", "parse_mixture"),
    "packing.sequences": ("Batch",),
    "packing.stream": ("DocumentStream",),
    "packing.whole_documents": ("WholeDocuments",),
    "sources": ("Document", "Documents", "read_documents"),
    "stores.prepare": ("build_stores", "open_or_build"),
    "stores.token_store": ("TokenStore",),
    "tokenizers.base": ("Segment", "Tokenizer", "check_vocabulary"),
    "tokenizers.byte_level": ("ByteTokenizer",),
    "tokenizers.load": ("load_tokenizer", "save_tokenizer"),
    "tokenizers.sentencepiece": ("SentencePieceTokenizer", "train_sentencepiece"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
