"""Options of a store: flags of `ringformer data prepare`, and keys of a run's `data`."""

from dataclasses import dataclass
from datetime import date
from typing import ClassVar, Literal, get_args

from ringformer.data.chats.cleaning import USUAL_RULES, parse_rules
from ringformer.data.chats.conversations import ChatFormat
from ringformer.data.chats.templates import TemplateName

Format = Literal["documents", ChatFormat]


@dataclass(frozen=True)
class StoreOptions:
    """Source of documents or conversations, and options for making a store of them."""

    key_prefix: ClassVar[str] = ""
    """Prefix of a field's name in errors; a config has keys such as data.held_out."""

    source: str
    """Source of the documents: stdlib, text:PATTERN, jsonl:PATTERN, json:PATTERN, parquet:PATTERN,
    datasets:NAME_OR_PATH or hf://NAME."""
    field: str = "text"
    """Field with the text of documents (all sources except stdlib and text)."""
    split: str = "train"
    """Split of a dataset (datasets)."""
    skip_empty: bool = False
    """Skip and count empty documents."""
    tokenizer: str = "bytes"
    """bytes, or the path of a SentencePiece .model file, a tokenizer.json or a folder with one of them."""
    max_document_bytes: int = 2**28
    """Most bytes of a document or conversation; larger ones are an error, because preparing one takes about 50 bytes of
    memory per byte."""
    held_out: float = 0.05
    """Share of documents kept for evaluation."""
    format: Format = "documents"
    """documents, or conversations as sharegpt or messages: then only answers are trained on."""
    template: TemplateName = "vicuna"
    """Chat template of conversations: vicuna, llama2, llama3, or tokenizer for the tokenizer's own."""
    chat_date: str = ""
    """Today's date, as 2026-11-22, for a tokenizer's own template (strftime_now). Without it a template that asks for
    the date is refused, because it would make other tokens tomorrow."""
    chat_length: int = 0
    """Most tokens of a conversation; longer ones are split between turns; 0: no limit."""
    clean: str = USUAL_RULES
    """Cleaning rules for conversations, separated by commas: html, merge, unprintable, latin, short, refusal,
    duplicate."""
    skip_malformed: bool = False
    """Skip and count conversations that cannot be read or rendered."""

    def __post_init__(self):
        key = self.key_prefix
        if not 0.0 <= self.held_out < 1.0:
            raise ValueError(f"{key}held_out={self.held_out} must be in [0, 1)")
        for field, values in (("format", get_args(Format)), ("template", get_args(TemplateName))):
            if getattr(self, field) not in values:
                raise ValueError(f"unknown {key}{field} {getattr(self, field)!r}; known: {', '.join(values)}")
        if self.chat_length < 0:
            raise ValueError(f"{key}chat_length={self.chat_length} must be positive, or 0 for no limit")
        if self.max_document_bytes < 1:
            raise ValueError(f"{key}max_document_bytes={self.max_document_bytes} must be at least 1")
        if self.chat_date:
            try:
                date.fromisoformat(self.chat_date)
            except ValueError:
                raise ValueError(f"{key}chat_date={self.chat_date!r} is not a date like 2026-11-22") from None
        parse_rules(self.clean)
