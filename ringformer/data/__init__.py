"""Data: documents from a source, tokenized into a store, packed into sequences, loaded for the ring."""

from ringformer.data.loader import Loader
from ringformer.data.packing.document_lengths import DocumentLengths, too_short
from ringformer.data.packing.mixture import Mixture, open_mixture, parse_mixture
from ringformer.data.packing.stream import Batch, PackedSequences
from ringformer.data.packing.whole_documents import WholeDocuments
from ringformer.data.sources import Document, Documents, read_documents
from ringformer.data.stores.prepare import build_stores, open_or_build
from ringformer.data.stores.token_store import TokenStore
from ringformer.data.tokenizers.sentencepiece import (
    ByteTokenizer,
    Segment,
    SentencePieceTokenizer,
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
    save_tokenizer,
    train_sentencepiece,
)

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Document",
    "DocumentLengths",
    "Documents",
    "Loader",
    "Mixture",
    "PackedSequences",
    "Segment",
    "SentencePieceTokenizer",
    "TokenStore",
    "Tokenizer",
    "WholeDocuments",
    "build_stores",
    "check_vocabulary",
    "load_tokenizer",
    "open_mixture",
    "open_or_build",
    "parse_mixture",
    "read_documents",
    "save_tokenizer",
    "too_short",
    "train_sentencepiece",
]
