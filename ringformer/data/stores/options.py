"""Options of a store: flags of `ringformer data prepare`, and keys of a run's `data`."""

from dataclasses import dataclass
from datetime import date
from typing import ClassVar, Literal, get_args

from ringformer.data.chats.cleaning import USUAL_RULES, parse_rules
from ringformer.data.chats.conversations import ChatFormat
from ringformer.data.chats.templates import Rewritten, TemplateName, parse_template_option
from ringformer.data.sources.joined_files import check_join
from ringformer.data.sources.text_encoding import parse_encodings

Format = Literal["documents", "tokens", ChatFormat]
Begin = Literal["tokenizer", "true", "false"]

OF_DOCUMENTS = ("begin", "separator", "compressibility_tails", "retrieval_tasks", "join")
"""Options that only documents have."""
MOST_TASKS = 10_000
"""Most questions to add to a document."""
NOT_RECORDED = (*OF_DOCUMENTS, "clean", "encoding", "skip_malformed", "template_option")
"""Options that a store of another format, or of an earlier version, does not record: it has their defaults."""
REWRITTEN_BEFORE: Rewritten = "refuse"
"""`rewritten` of stores of earlier versions with a tokenizer's own template, which do not record it."""
OF_OWN_TEMPLATE = ("template_option", "rewritten")
"""Options that only conversations with a tokenizer's own template have."""
ENCODED = ("text", "jsonl", "json", "stdlib", "installed")
"""Kinds of source whose files have an encoding."""
RULES_OF_DOCUMENTS = frozenset({"html"})
"""Cleaning rules that documents have."""


@dataclass(frozen=True)
class StoreOptions:
    """Source of documents or conversations, and options for making a store of them."""

    key_prefix: ClassVar[str] = ""
    """Prefix of a field's name in errors; a config has keys such as data.held_out."""

    source: str
    """Source of the documents: stdlib, installed, text:PATTERN, jsonl:PATTERN, json:PATTERN, parquet:PATTERN,
    arrow:PATTERN, datasets:NAME_OR_PATH or hf://NAME. A folder in place of a pattern is all of its files. Files of text
    and JSON may be compressed (.gz, .zst)."""
    join: str = ""
    """Join files into long documents: folder, those of a folder; package, those of each folder at the top of the source
    and of the folders in it; default: each file is a document (text, stdlib, installed)."""
    encoding: str = ""
    """Encodings of the files (text, jsonl, json) to try in this order, e.g. utf-8,utf-16,cp1252; default: utf-8."""
    field: str = "text"
    """Field with the text of documents (records: all sources but files of text)."""
    split: str = "train"
    """Split of a dataset (datasets)."""
    skip_empty: bool = False
    """Skip and count empty documents."""
    weight_field: str = ""
    """Field with the weight of a record, e.g. 2.5: training gets two copies of it, or three of half of such records; ""
    for none."""
    begin: Begin = "tokenizer"
    """Begin each document with the tokenizer's BOS token: tokenizer, if the tokenizer itself begins texts with it (its
    post-processor, or add_bos_token of a SentencePiece model); true; or false. Conversations begin as their template
    writes."""
    separator: str = ""
    """Text that ends each document in place of the end token, for packed_attention=sequence (UltraLong)."""
    compressibility_tails: float = 0.0
    """Leave out this share of the documents that gzip compresses least, and as many that it compresses most, e.g. 0.2;
    reads the source twice."""
    retrieval_tasks: int = 0
    """Questions to add at the end of each document, about its words and sentences."""
    tokenizer: str = "bytes"
    """bytes, or the path of a SentencePiece .model file, a tokenizer.json or a folder with one of them."""
    max_document_bytes: int = 2**28
    """Most bytes of a document, a conversation or a row of tokens; larger ones are an error before they are unpacked,
    because preparing one takes about 50 bytes of memory per byte."""
    held_out: float = 0.05
    """Share of documents kept for evaluation."""
    format: Format = "documents"
    """documents; tokens, rows with input_ids and, if wanted, labels or masks; or conversations as sharegpt, messages,
    alpaca or prompt: then only answers are trained on."""
    template: TemplateName = "vicuna"
    """Chat template of conversations: vicuna, llama2, llama3, or tokenizer for the tokenizer's own."""
    chat_date: str = ""
    """Today's date, as 2026-11-22, for a tokenizer's own template (strftime_now). Without it a template that asks for
    the date is refused, because it would make other tokens tomorrow."""
    template_option: str = ""
    """Variables of a tokenizer's own template, e.g. enable_thinking=false, separated by commas."""
    rewritten: Rewritten = "split"
    """Treatment of an answer that a tokenizer's own template writes in another way once later turns follow, for
    example without its thoughts: split: a sequence of its own, which ends with it; last: only the answers that stay as
    they were are trained on; refuse: an error."""
    chat_length: int = 0
    """Most tokens of a conversation; longer ones are split between turns; 0: no limit."""
    clean: str = "usual"
    """Cleaning rules, separated by commas: html, for documents and conversations; merge, unprintable, latin, short,
    refusal, duplicate, for conversations. usual: html,unprintable,duplicate for conversations, none for documents."""
    skip_malformed: bool = False
    """Skip and count records, lines, conversations and files that cannot be read or rendered."""

    def __post_init__(self) -> None:
        key = self.key_prefix
        if not 0.0 <= self.held_out < 1.0:
            raise ValueError(f"{key}held_out={self.held_out} must be in [0, 1)")
        choices = {"format": Format, "template": TemplateName, "rewritten": Rewritten, "begin": Begin}
        for field, choice in choices.items():
            values = get_args(choice)
            if getattr(self, field) not in values:
                raise ValueError(f"unknown {key}{field} {getattr(self, field)!r}; known: {', '.join(values)}")
        if self.format != "documents":
            self._refuse(OF_DOCUMENTS, f"{key}format='documents'")
        if self.format == "tokens" and self.weight_field:
            raise ValueError(f"{key}weight_field={self.weight_field!r}: rows of tokens have no weights")
        check_join(self.join, self.source, key)
        parse_template_option(self.template_option)
        chats = get_args(ChatFormat)
        if self.format not in chats or self.template != "tokenizer":
            needed = f"{key}template='tokenizer' and a {key}format of conversations: {', '.join(chats)}"
            self._refuse(OF_OWN_TEMPLATE, needed)
        if not 0.0 <= self.compressibility_tails < 0.5:
            raise ValueError(f"{key}compressibility_tails={self.compressibility_tails} must be in [0, 0.5)")
        if not 0 <= self.retrieval_tasks <= MOST_TASKS:
            raise ValueError(
                f"{key}retrieval_tasks={self.retrieval_tasks} must not be negative, and at most {MOST_TASKS:,}"
            )
        if self.chat_length < 0:
            raise ValueError(f"{key}chat_length={self.chat_length} must be positive, or 0 for no limit")
        if self.max_document_bytes < 1:
            raise ValueError(f"{key}max_document_bytes={self.max_document_bytes} must be at least 1")
        if self.chat_date:
            try:
                date.fromisoformat(self.chat_date)
            except ValueError:
                raise ValueError(f"{key}chat_date={self.chat_date!r} is not a date like 2026-11-22") from None
        if parse_encodings(self.encoding) and self.encoding and self.source.partition(":")[0] not in ENCODED:
            raise ValueError(
                f"{key}encoding={self.encoding!r} needs a source of {', '.join(ENCODED)}, not {self.source}"
            )
        others = rules_of(self.clean, self.format)
        if self.format == "documents":
            others -= RULES_OF_DOCUMENTS
        if others and self.format in ("documents", "tokens"):
            raise ValueError(f"{key}clean={self.clean!r}: {', '.join(sorted(others))} cannot clean {self.format}")

    def _refuse(self, fields: tuple[str, ...], needed: str) -> None:
        """Raise ValueError if one of these fields does not have its default, because it needs other options."""
        for field in fields:
            value = getattr(self, field)
            if value != getattr(StoreOptions, field):
                raise ValueError(f"{self.key_prefix}{field}={value!r} needs {needed}")


def rules_of(clean: str, data_format: str) -> frozenset[str]:
    """Return the cleaning rules that an option `clean` stands for. Raises ValueError for an unknown rule.

    Configs of earlier versions have the usual rules of conversations for documents too, where they had no effect.
    """
    if clean not in ("usual", USUAL_RULES):
        return parse_rules(clean)
    if data_format in ("documents", "tokens"):
        return frozenset()
    return parse_rules(USUAL_RULES)
