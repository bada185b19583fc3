"""Tokenizers of each kind, trained here."""

import pytest

from ringformer.data import load_tokenizer, train_sentencepiece
from tests.data.chat_samples import llama3
from tests.data.tokenizers.texts import CODE


@pytest.fixture(scope="package")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("sp") / "code.model"
    train_sentencepiece(iter(CODE), path, vocab_size=600)
    return path


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    return llama3(tmp_path_factory.mktemp("l3"))


@pytest.fixture(params=["bytes", "model", "folder"])
def tokenizer(request):
    return load_tokenizer("bytes" if request.param == "bytes" else str(request.getfixturevalue(request.param)))
