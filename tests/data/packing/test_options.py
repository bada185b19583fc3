"""Options of packing: what cannot be is refused, under the names that a config has for it."""

import pytest

from ringformer.data.packing.options import PackingOptions
from ringformer.runs.config import DataConfig

WRONG = [
    ({"packing": "hole"}, "unknown {}packing 'hole'; known: stream, whole"),
    ({"packed_attention": "all"}, "unknown {}packed_attention 'all'; known: document, sequence"),
    ({"min_length": 9, "max_length": 5}, "{0}min_length=9 and {0}max_length=5 leave no length"),
    ({"buckets": 1.5}, "{}buckets=1.5 must be a whole number"),
    ({"buckets": -1}, "{}buckets=-1 must not be negative"),
    ({"buckets": 2}, "{0}buckets=2 needs {0}packing='whole' and {0}packed_attention='document'"),
    ({"buckets": 2, "packing": "whole", "packed_attention": "sequence"}, "{0}buckets=2 needs {0}packing='whole'"),
    ({"min_length": -1}, "{0}min_length=-1 and {0}max_length=0 leave no length"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_options_are_refused(wrong, message):
    with pytest.raises(ValueError, match=f"^{message.format('')}"):
        PackingOptions(**wrong)
    with pytest.raises(ValueError, match=f"^{message.format('data.')}"):
        DataConfig(store="s", **wrong)
