"""Tokenizers: bytes, SentencePiece, `tokenizer.json`, and which bytes their tokens spell."""
