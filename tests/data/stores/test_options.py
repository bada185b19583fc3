"""Options of stores: what cannot be is refused, under the names that a config has for it; help names all there is."""

from typing import get_args

import pytest

from ringformer.cli.dataclass_flags import field_docs
from ringformer.data.chats.cleaning import RULES
from ringformer.data.chats.conversations import FORMATS
from ringformer.data.chats.templates import TEMPLATES, TemplateName
from ringformer.data.sources.source_files import KINDS
from ringformer.data.stores.options import Format, StoreOptions
from ringformer.runs.config import DataConfig

WRONG = [
    ({"held_out": 1.0}, r"{}held_out=1.0 must be in \[0, 1\)"),
    ({"held_out": -0.1}, r"{}held_out=-0.1 must be in \[0, 1\)"),
    ({"format": "dolly"}, "unknown {}format 'dolly'; known: documents, tokens, sharegpt, messages, alpaca"),
    ({"format": "tokens", "separator": "\n"}, "{}separator='\\\\n' needs {}format='documents'"),
    ({"format": "tokens", "weight_field": "w"}, "{}weight_field='w': rows of tokens have no weights"),
    ({"compressibility_tails": 0.5}, r"{}compressibility_tails=0.5 must be in \[0, 0.5\)"),
    ({"retrieval_tasks": -1}, "{}retrieval_tasks=-1 must not be negative"),
    ({"template": "chatml"}, "unknown {}template 'chatml'; known: vicuna, llama2, llama3, tokenizer"),
    ({"chat_length": -1}, "{}chat_length=-1 must be positive, or 0 for no limit"),
    ({"max_document_bytes": 0}, "{}max_document_bytes=0 must be at least 1"),
    ({"chat_date": "26 Jul 2024"}, "{}chat_date='26 Jul 2024' is not a date like 2026-11-22"),
    ({"clean": "html,all"}, "unknown cleaning rule 'all'; known: html, "),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_options_are_refused(wrong, message):
    with pytest.raises(ValueError, match=f"^{message.replace('{}', '')}"):
        StoreOptions("stdlib", **wrong)
    with pytest.raises(ValueError, match=f"^{message.replace('{}', 'data.')}"):
        DataConfig(store="s", **wrong)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("source", KINDS),
        ("format", ("documents", "tokens", *FORMATS)),
        ("template", get_args(TemplateName)),
        ("clean", RULES),
    ],
)
def test_the_help_of_a_field_names_its_values(field, values):
    help_text = field_docs(StoreOptions)[field]
    assert [value for value in values if value not in help_text] == []


def test_types_name_the_same_values_as_tables():
    assert get_args(Format) == ("documents", "tokens", *FORMATS)
    assert get_args(TemplateName) == (*TEMPLATES, "tokenizer")
