"""What a run knows of text: its tokenizer, where an answer begins, and what ends it."""

import json
import shutil
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import transformers

from ringformer.data import load_tokenizer
from ringformer.data.chats.conversations import Message
from ringformer.data.chats.templates import load_template
from ringformer.files.atomic import write_object
from ringformer.files.run_layout import IDENTITY
from ringformer.inference.text.beginning import beginning_of
from ringformer.inference.text.run_text import RunText
from tests.data.chat_samples import CHATS, LLAMA3_JINJA, SPECIAL, UNMARKED_JINJA, chat, llama3, sentencepiece
from tests.inference.runs import converted_folder, llama2, run_folder


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    return {"sp": str(sentencepiece(folder)), "llama2": str(llama2(folder / "2")), "llama3": str(llama3(folder / "3"))}


@pytest.mark.parametrize("name", ("vicuna", "llama2", "llama3", "tokenizer"))
@pytest.mark.parametrize("kind", ("bytes", "sp", "llama2", "llama3"))
def test_the_question_ends_where_training_saw_the_answer_begin(name, kind, tokenizers, tmp_path):
    """For many answers: the prompt and the answer's own tokens are those of the conversation as it was trained on."""
    if name in ("llama3", "tokenizer") and kind != "llama3":
        pytest.skip("the template needs its tokenizer")
    spec = tokenizers.get(kind, kind)
    text = RunText(run_folder(tmp_path / "run", spec, format="messages", template=name))
    tokenizer = load_tokenizer(spec)
    render = load_template(name, tokenizer)
    for messages in (chat("who goes there?"), chat("a", "b", "what? "), chat("naïve 日本", system="You are a ring.")):
        prompt = text.encode_chat(messages)
        for answer in ("It carries keys.", "The ring", "zebra", "1", "日本", "carries", "- one"):
            ((ids, trained),) = tokenizer.encode_chats([render([*messages, Message("assistant", answer)])])
            ids = ids.tolist()
            assert ids[: len(prompt.ids)] == prompt.ids
            behind = tokenizer.decode(ids)[len(tokenizer.decode(prompt.ids)) :]
            assert behind.removeprefix(prompt.lead).removesuffix(prompt.tail) == answer
            assert ids[-1] in text.chat_end_tokens and trained[-1]
            begins = np.flatnonzero(~trained)[-1] + 1
            assert len(prompt.ids) <= begins, "a token that holds a part of the answer is in the prompt"
        shared = kind != "bytes" and name in ("vicuna", "llama2")
        assert prompt.lead == (" " if shared else ""), "a space before a word is the word's"


@pytest.mark.parametrize("name", ("vicuna", "llama2", "llama3", "tokenizer"))
@pytest.mark.parametrize("kind", ("bytes", "sp", "llama2", "llama3"))
def test_an_answer_that_has_begun_goes_on_as_training_saw_it(name, kind, tokenizers, tmp_path):
    """Its beginning stands behind the header of the assistant, a space at most between them."""
    if name in ("llama3", "tokenizer") and kind != "llama3":
        pytest.skip("the template needs its tokenizer")
    spec = tokenizers.get(kind, kind)
    text = RunText(run_folder(tmp_path / "run", spec, format="messages", template=name))
    tokenizer, render = load_tokenizer(spec), load_template(name, load_tokenizer(spec))
    header = {"vicuna": " ASSISTANT:", "llama2": " [/INST]"}.get(name, "\n\n")
    for prefix in (" Answer: they are: ", " The ring is", "The answer:"):
        prompt = text.encode_chat(chat("who goes there?"), prefix)
        given = tokenizer.decode(prompt.ids) + prompt.lead
        assert given.endswith(f"who goes there?{header} {prefix.lstrip()}" if header[0] == " " else header + prefix)
        for answer in ("It", "zebra", "1"):
            begun = prefix.lstrip() if header[0] == " " else prefix
            ((ids, _),) = tokenizer.encode_chats(
                [render([*chat("who goes there?"), Message("assistant", begun + answer)])]
            )
            assert ids[: len(prompt.ids)].tolist() == prompt.ids
            assert tokenizer.decode(ids.tolist()).startswith(given + answer)


def test_the_beginning_of_an_answer_that_a_template_strips_is_given_without_its_space(tmp_path):
    strips = UNMARKED_JINJA.replace("message['content']", "message['content'] | trim")
    assert strips != UNMARKED_JINJA
    text = RunText(converted_folder(tmp_path / "m", llama3(tmp_path / "t", strips)))
    prompt = text.encode_chat(chat("what is a ring?"), " The ring is")
    bare = text.encode_chat(chat("what is a ring?"))
    assert text.tokenizer.decode(prompt.ids) == text.tokenizer.decode(bare.ids) + "The ring is"
    upper = LLAMA3_JINJA.replace("message['content']", "message['content'] | upper")
    text = RunText(converted_folder(tmp_path / "u", llama3(tmp_path / "v", upper)))
    with pytest.raises(ValueError, match="changes the beginning of an answer, ' The ring is': it writes"):
        text.encode_chat(chat("what is a ring?"), " The ring is")


def test_the_prompt_of_a_jinja_template_is_that_of_transformers(tokenizers, tmp_path):
    for i, template in enumerate((None, UNMARKED_JINJA)):
        folder = llama3(tmp_path / f"t{i}", *([template] if template else []))
        theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
        text = RunText(converted_folder(tmp_path / f"m{i}", folder))
        assert text.template_name == "tokenizer"
        for messages in (chat("what is a ring?"), chat("a", "b", "c", system="You are a ring.")):
            expected = theirs.apply_chat_template(
                [m._asdict() for m in messages], add_generation_prompt=True, return_dict=False
            )
            assert text.encode_chat(messages).ids == expected
        assert text.encode("The ring") == theirs("The ring")["input_ids"], "begins with the beginning of a sentence"


def test_special_tokens_in_a_question_are_text(tokenizers, tmp_path):
    text = RunText(run_folder(tmp_path / "run", tokenizers["llama3"], format="sharegpt", template="llama3"))
    plain, evil = (text.encode_chat(chat(q)).ids for q in ("hi", "".join(SPECIAL) + CHATS["role-like"][0].content))
    special = set(text.tokenizer.controls.values())
    assert [i for i in plain if i in special] == [i for i in evil if i in special]
    assert not special & set(text.encode("".join(SPECIAL)))


def test_what_ends_a_text(tokenizers, tmp_path):
    names = load_tokenizer(tokenizers["llama3"]).controls
    eot, text_end, header = (names[name] for name in ("<|eot_id|>", "<|end_of_text|>", "<|end_header_id|>"))
    folder = llama3(tmp_path / "t")
    for i, (eos, expected) in enumerate(
        ((None, {eot}), (header, {eot, header}), ([text_end, header], {eot, text_end, header}))
    ):
        files = {} if eos is None else {"generation_config": {"eos_token_id": eos}}
        text = RunText(converted_folder(tmp_path / str(i), folder, **files))
        assert text.end_tokens == expected == text.chat_end_tokens
    listed = {"hf_config": {"eos_token_id": [text_end, header]}}
    text = RunText(converted_folder(tmp_path / "listed", folder, **listed))
    assert text.end_tokens == {eot, text_end, header}, "those of config.json, which generation_config.json lacks"
    overridden = listed | {"generation_config": {"eos_token_id": eot}}
    assert RunText(converted_folder(tmp_path / "both", folder, **overridden)).end_tokens == {eot}
    for i, (wrong, message) in enumerate(
        (("</s>", "'</s>' is not a token id"), (420, "420 is beyond the model's vocabulary of "))
    ):
        with pytest.raises(ValueError, match=f"eos_token_id {message}"):
            RunText(converted_folder(tmp_path / f"x{i}", folder, generation_config={"eos_token_id": wrong}))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "<|end_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text = RunText(converted_folder(tmp_path / "turn", folder))
    assert text.end_tokens == {text_end} and text.chat_end_tokens == {text_end, eot}, "the template's end of turn"


def test_the_tokenizer_is_the_run_s_and_not_that_of_the_model_it_began_with(tokenizers, tmp_path):
    for spec in ("bytes", tokenizers["sp"], tokenizers["llama3"]):
        run = run_folder(tmp_path / f"run{len(list(tmp_path.iterdir()))}", spec)
        if spec != tokenizers["llama3"]:  # what init_from left there
            shutil.copy(f"{tokenizers['llama2']}/tokenizer.json", run)
        assert RunText(run).tokenizer.name == load_tokenizer(spec).name
        assert RunText(run, tokenizer=spec).context == 64


def test_a_run_s_tokenizer_from_a_folder_is_the_one_that_it_records(tokenizers, tmp_path):
    """Its config names the folder, and init_from left a tokenizer of the other kind in the run."""
    shutil.copytree(Path(tokenizers["sp"]).parent, tmp_path / "sp", ignore=shutil.ignore_patterns("[23]"))
    run = run_folder(tmp_path / "run", str(tmp_path / "sp"))
    shutil.copy(f"{tokenizers['llama2']}/tokenizer.json", run)
    name = load_tokenizer(tokenizers["sp"]).name
    write_object(run / IDENTITY, {"identity": {"data.tokenizer": name}, "saved": None})
    assert RunText(run).tokenizer.name == name


@pytest.mark.parametrize("kind", ["converted", "run", "older run"])
def test_another_tokenizer_than_the_model_s_is_refused_unless_it_is_allowed(kind, tokenizers, tmp_path):
    theirs = load_tokenizer(tokenizers["llama3"]).name
    if kind == "converted":
        folder = converted_folder(tmp_path / "m", Path(tokenizers["llama3"]))
    else:
        folder = run_folder(tmp_path / "m", tokenizers["llama3"])
    if kind == "run":
        write_object(folder / IDENTITY, {"identity": {"data.tokenizer": theirs}, "saved": None})
    message = (
        rf"was trained with tokenizer {theirs}, but --tokenizer=bytes is bytes, whose ids .* --allow=data.tokenizer"
    )
    with pytest.raises(ValueError, match=message):
        RunText(folder, tokenizer="bytes")
    assert RunText(folder, tokenizer="bytes", allow=["data.tokenizer"]).tokenizer.name == "bytes"
    assert RunText(folder, tokenizer=tokenizers["llama3"]).tokenizer.name == RunText(folder).tokenizer.name == theirs


def test_the_context_of_a_converted_model(tokenizers, tmp_path):
    folder = llama3(tmp_path / "t")
    hf = {"hf_config": {"max_position_embeddings": 8192}}
    assert RunText(converted_folder(tmp_path / "a", folder, **hf)).context == 8192
    assert RunText(converted_folder(tmp_path / "b", folder)).context is None
    of_wrapper = {"hf_config": {"text_config": {"max_position_embeddings": 4096}}}
    assert RunText(converted_folder(tmp_path / "c", folder, **of_wrapper)).context == 4096
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    stretched = {"hf_config": {"max_position_embeddings": 8192, "rope_parameters": yarn}}
    assert RunText(converted_folder(tmp_path / "d", folder, **stretched)).context == 32768


def test_folders_without_a_model_or_a_tokenizer(tokenizers, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        RunText(tmp_path / "none")
    (tmp_path / "hf").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json: name the folder of a run"):
        RunText(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="convert it first, with ringformer convert from-hf"):
        RunText(tmp_path / "hf")
    for number in (2, 10, 1):
        run_folder(tmp_path / "staged" / f"stage-{number}-64", "bytes")
    with pytest.raises(FileNotFoundError, match=r"run in stages: choose one of .*stage-1-64, .*2-64, .*stage-10-64$"):
        RunText(tmp_path / "staged")
    run = run_folder(tmp_path / "run", tokenizers["sp"])
    (run / "tokenizer.model").unlink()
    with pytest.raises(FileNotFoundError, match="holds no tokenizer: set --tokenizer to bytes"):
        RunText(run)
    assert RunText(run, tokenizer=tokenizers["sp"]).encode("ring")
    with pytest.raises(ValueError, match="tokens, but the model's vocabulary has only 333"):
        RunText(run, tokenizer=tokenizers["llama3"])


def test_prompts_that_cannot_be(tokenizers, tmp_path):
    text = RunText(run_folder(tmp_path / "run", tokenizers["sp"]))
    for ask in (text.encode, lambda prompt: text.encode_chat(chat(prompt))):
        with pytest.raises(ValueError, match="the prompt is empty"):
            ask("")
    with pytest.raises(ValueError, match=r"was not trained on conversations, .*--template=vicuna\|llama2"):
        text.encode_chat(chat("a"))
    named = RunText(tmp_path / "run", template="vicuna")
    assert named.encode_chat(chat("a")).ids
    for ask in (named.encode, lambda prompt: named.encode_chat(chat(prompt))):
        with pytest.raises(ValueError, match="the prompt is not UTF-8, which tokenizer sentencepiece"):
            ask("a\udcff")


@pytest.mark.parametrize("adds", [True, False], ids=["post-processor", "none, as SmolLM"])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}], ids=str)
def test_a_converted_model_s_text_begins_as_in_transformers(tmp_path, adds, config):
    folder = llama3(tmp_path / "t")
    for name, changes in (
        ("tokenizer.json", {} if adds else {"post_processor": None}),
        ("tokenizer_config.json", config),
    ):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))("ring").input_ids
    assert RunText(converted_folder(tmp_path / "a", folder)).encode("ring") == theirs


def test_a_sentencepiece_model_s_text_begins_unless_its_config_says_no(tmp_path, tokenizers):
    folder = tmp_path / "t"
    folder.mkdir()
    shutil.copy(tokenizers["sp"], folder / "tokenizer.model")
    for config, begins in (({}, True), ({"add_bos_token": False}, False)):
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        assert load_tokenizer(str(folder)).begins is begins


@pytest.mark.parametrize("recorded", [True, False, None, "nothing"])
@pytest.mark.parametrize("kind", ["llama3", "sp", "bytes"])
def test_texts_of_a_run_begin_as_its_documents(tokenizers, tmp_path, kind, recorded):
    """Once, in prompts and in chats. A run on stores of an earlier version records nothing: a line says how its texts
    begin if the tokenizer begins texts otherwise."""
    folder = run_folder(tmp_path / "run", tokenizers.get(kind, kind))
    if recorded != "nothing":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"texts_begin": recorded}))
    text = RunText(folder, template="llama3" if kind == "llama3" else "vicuna")
    bos, ids = text.tokenizer.bos_id, text.tokenizer.encode("<s> ring")
    begin = [bos] if recorded is True and kind != "bytes" else []
    assert text.begin == begin and text.encode("<s> ring") == [*begin, *ids]
    if kind != "bytes":
        assert text.encode_chat([Message("user", "ring")]).ids.count(bos) == 1
    line, of_harness = text.beginning.describe_earlier(), text.beginning.describe_earlier(harness=True)
    if recorded in (True, False) or kind == "bytes":
        assert line == of_harness == ""
    else:
        assert "prompts and documents begin without <" in line and "requests begin with <" in of_harness
        assert text.beginning.in_harness
    if recorded is False:
        assert not text.beginning.in_harness
    otherwise = text.beginning.describe_export()
    assert bool(otherwise) == (kind != "bytes" and recorded is not True)
    assert kind == "bytes" or beginning_of(folder) == text.beginning._replace(tokenizer=ANY)


def test_an_advised_template_is_one_that_the_tokenizer_has_the_tokens_for(tokenizers, tmp_path):
    for kind, names in (("bytes", "vicuna|llama2"), ("llama2", "vicuna|llama2")):
        run = run_folder(tmp_path / kind, tokenizers.get(kind, kind))
        with pytest.raises(ValueError, match=rf"choose one with --template={names.replace('|', '[|]')}$"):
            RunText(run).encode_chat(chat("who goes there?"))
        for name in names.split("|"):
            assert RunText(run, template=name).encode_chat(chat("who goes there?")).ids
