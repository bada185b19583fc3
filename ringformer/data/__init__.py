"""Data: documents from a source, tokenized into a store, packed into sequences, loaded for the ring."""

from ringformer.data.loader import Loader
from ringformer.data.mixture import Mixture, open_mixture, parse_mixture
from ringformer.data.packing import Batch, PackedSequences
from ringformer.data.sources import Document, Documents, read_documents
from ringformer.data.store import TokenStore, build_stores, open_or_build
from ringformer.data.tokenizers import (
    ByteTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    check_vocabulary,
    load_tokenizer,
    train_sentencepiece,
)
from ringformer.data.whole import WholeDocuments

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Document",
    "Documents",
    "Loader",
    "Mixture",
    "PackedSequences",
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
    "train_sentencepiece",
]
