"""Data: documents from a source, tokenized into a store, packed into sequences, loaded for the ring."""

from ringformer.data.loader import Loader
from ringformer.data.packing import Batch, PackedSequences
from ringformer.data.prepare import build_stores, open_or_build
from ringformer.data.sources import Document, Documents, read_documents
from ringformer.data.store import TokenStore
from ringformer.data.tokenizers import (
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
    "Documents",
    "Loader",
    "PackedSequences",
    "Segment",
    "SentencePieceTokenizer",
    "TokenStore",
    "Tokenizer",
    "build_stores",
    "check_vocabulary",
    "load_tokenizer",
    "open_or_build",
    "read_documents",
    "save_tokenizer",
    "train_sentencepiece",
]
