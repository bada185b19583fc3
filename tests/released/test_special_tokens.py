"""Special tokens of released tokenizers, and ends of a released model, are those of transformers."""

import pytest
from transformers import AutoTokenizer

from ringformer.data import load_tokenizer
from tests.data.tokenizers.test_special_tokens import model_tokens, of_transformers
from tests.released.folders import TOKENIZERS, smol, tokenizer

OF_THE_CLASS = {"gemma3": {"<mask>"}}
"""Special tokens that no file names, but a class of transformers."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TOKENIZERS, "smol"])
def test_the_special_tokens_of_a_released_tokenizer(name):
    folder = smol() if name == "smol" else tokenizer(name)
    ours, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token_id is not None
    assert (ours.eos_id, ours.vocab_size) == (theirs.eos_token_id, len(theirs))
    if theirs.bos_token is not None:
        assert ours.bos_id == theirs.bos_token_id
    flagged = {token.content for token in theirs.added_tokens_decoder.values() if token.special}
    special = flagged | set(theirs.all_special_tokens)
    assert set(ours.controls) == special - OF_THE_CLASS.get(name, set())


@pytest.mark.slow
def test_the_ends_and_the_context_of_a_released_model():
    folder = smol()
    tokens = model_tokens(folder, 49152)
    assert tokens == of_transformers(folder)
    assert tokens.ends == {load_tokenizer(str(folder)).eos_id} and tokens.context == 8192
