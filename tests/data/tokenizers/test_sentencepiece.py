"""SentencePiece models: trained, named by content, refused without an end token."""

import pytest

from ringformer.data import load_tokenizer, train_sentencepiece
from tests.data.tokenizers.texts import CODE


def test_sentencepiece_merges_and_is_named_by_content(model, tmp_path):
    tokenizer = load_tokenizer(str(model))
    assert tokenizer.vocab_size == 600
    assert len(tokenizer.encode(CODE[0])) < 0.6 * len(CODE[0])
    assert len(tokenizer.encode(" " * 8)) <= 2, "indentation is merged"
    copy = tmp_path / "other.model"
    copy.write_bytes(model.read_bytes())
    assert load_tokenizer(str(copy)).name == tokenizer.name
    train_sentencepiece(CODE, copy, vocab_size=500)
    assert load_tokenizer(str(copy)).name != tokenizer.name


def test_training_says_nothing(tmp_path, capfd):
    train_sentencepiece(CODE[2:], tmp_path / "a.model", vocab_size=400)
    assert capfd.readouterr() == ("", "")


def test_training_reports_an_impossible_vocabulary(tmp_path):
    with pytest.raises(ValueError, match="vocab_size=100 "):
        train_sentencepiece(CODE, tmp_path / "a.model", vocab_size=100)
    with pytest.raises(ValueError, match=r"does not end in \.model"):
        train_sentencepiece(CODE, tmp_path / "a.bin", vocab_size=400)
    assert not list(tmp_path.iterdir())


def test_a_model_without_end_token_is_refused(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CODE[0].splitlines()),
        model_prefix=str(tmp_path / "m"),
        vocab_size=400,
        model_type="bpe",
        eos_id=-1,
        minloglevel=2,
    )
    with pytest.raises(ValueError, match="lacks the end-of-sentence token"):
        load_tokenizer(str(tmp_path / "m.model"))
