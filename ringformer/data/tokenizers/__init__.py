"""Tokenizers: bytes, SentencePiece, `tokenizer.json`, and the bytes of their tokens."""
