"""Training data: documents are read, tokenized into a store, packed into sequences, and loaded for the ring.

Names are imported on first use (PEP 562): `import ringformer.data` by itself loads no submodule.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringformer.data.loader import Loader as Loader
    from ringformer.data.packing.document_lengths import DocumentLengths as DocumentLengths
    from ringformer.data.packing.document_lengths import describe_passes as describe_passes
    from ringformer.data.packing.document_lengths import too_often as too_often
    from ringformer.data.packing.document_lengths import too_short as too_short
    from ringformer.data.packing.mixture import Mixture as Mixture
    from ringformer.data.packing.mixture import open_mixture as open_mixture
    from ringformer.data.packing.mixture import parse_mixture as parse_mixture
    from ringformer.data.packing.sequences import Batch as Batch
    from ringformer.data.packing.stream import DocumentStream as DocumentStream
    from ringformer.data.packing.whole_documents import WholeDocuments as WholeDocuments
    from ringformer.data.sources.documents import Document as Document
    from ringformer.data.sources.documents import Documents as Documents
    from ringformer.data.sources.documents import read_documents as read_documents
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

_HOMES = {
    "Batch": "packing.sequences",
    "ByteTokenizer": "tokenizers.byte_level",
    "Document": "sources.documents",
    "DocumentLengths": "packing.document_lengths",
    "DocumentStream": "packing.stream",
    "Documents": "sources.documents",
    "Loader": "loader",
    "Mixture": "packing.mixture",
    "Segment": "tokenizers.base",
    "SentencePieceTokenizer": "tokenizers.sentencepiece",
    "TokenStore": "stores.token_store",
    "Tokenizer": "tokenizers.base",
    "WholeDocuments": "packing.whole_documents",
    "build_stores": "stores.prepare",
    "check_vocabulary": "tokenizers.base",
    "describe_passes": "packing.document_lengths",
    "load_tokenizer": "tokenizers.load",
    "open_mixture": "packing.mixture",
    "open_or_build": "stores.prepare",
    "parse_mixture": "packing.mixture",
    "read_documents": "sources.documents",
    "save_tokenizer": "tokenizers.load",
    "too_often": "packing.document_lengths",
    "too_short": "packing.document_lengths",
    "train_sentencepiece": "tokenizers.sentencepiece",
}
"""Public names, and the module that each name comes from."""

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ringformer.data' has no attribute {name!r}")
    return getattr(import_module(f"ringformer.data.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
