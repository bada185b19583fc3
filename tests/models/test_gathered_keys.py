"""Gathered keys that no device can hold are refused before a compiler or a device is asked."""

import pytest
from jax.sharding import AbstractMesh

from ringformer.hardware import CHIPS
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.models.gathered_keys import check_gathered_keys
from ringformer.parallel.mesh import AXIS_NAMES


def config(**changes):
    return LlamaConfig(**preset("llama_7b") | {"ring": "gathered", "compute_dtype": "bfloat16"} | changes)


def mesh(fsdp=1, tp=1):
    return AbstractMesh((1, fsdp, tp, 8), AXIS_NAMES)


def test_keys_of_a_whole_sequence_must_fit():
    """32 heads of 128 features, 12 bytes each: 48 GiB at 1M tokens; 8 devices that exchange heads hold an eighth."""
    match = r"ring='gathered' holds the keys of 1 x 1,048,576 tokens .* 48\.0 GiB for one layer; .* has 15\.\d GiB"
    with pytest.raises(ValueError, match=match):
        check_gathered_keys(config(), mesh(), 2**20, 1, CHIPS["v5e"])
    with pytest.raises(ValueError, match=r"2 x 1,048,576 tokens .* 96\.0 GiB"):
        check_gathered_keys(config(), mesh(fsdp=2), 2**20, 4, CHIPS["v5p"])
    for tp, chip in ((1, CHIPS["v5p"]), (4, CHIPS["v5e"]), (1, None)):
        check_gathered_keys(config(), mesh(tp=tp), 2**20, 1, chip)
    check_gathered_keys(config(ulysses=8), mesh(), 2**20, 1, CHIPS["v5e"])
