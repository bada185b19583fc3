"""Gathered keys that no device can hold are refused before a compiler or a device is asked."""

import pytest

from ringformer.hardware import CHIPS
from ringformer.models.gathered_keys import check_gathered_keys
from ringformer.models.llama_config import LlamaConfig
from ringformer.models.llama_presets import preset


def config(**changes):
    return LlamaConfig(**preset("llama_7b") | {"ring": "gathered", "compute_dtype": "bfloat16"} | changes)


def test_keys_of_a_whole_sequence_must_fit():
    """32 heads of 128 features, 12 bytes each: 48 GiB at 1M tokens; 8 devices that exchange heads hold an eighth."""
    match = r"ring='gathered' holds the keys of 1 x 1,048,576 tokens .* 48\.0 GiB for one layer; .* has 15\.\d GiB"
    with pytest.raises(ValueError, match=match):
        check_gathered_keys(config(), 1, 2**20, 1, CHIPS["v5e"])
    with pytest.raises(ValueError, match=r"2 x 1,048,576 tokens .* 96\.0 GiB"):
        check_gathered_keys(config(), 2, 2**20, 1, CHIPS["v5p"])
    for fits in (dict(tp=1, chip=CHIPS["v5p"]), dict(tp=4, chip=CHIPS["v5e"]), dict(tp=1, chip=None)):
        check_gathered_keys(config(), 1, 2**20, **fits)
    check_gathered_keys(config(ulysses=8), 1, 2**20, 1, CHIPS["v5e"])
    check_gathered_keys(config(ring="both_ways"), 1, 2**24, 1, CHIPS["v5e"])
