"""Options of a tokenizer's own chat template: a prompt has those of training, unless a command names others."""

import pytest

from ringformer.inference.text.run_text import RunText
from tests.data.chat_samples import UNMARKED_JINJA, chat, llama3
from tests.inference.runs import run_folder

THOUGHT = "<think>\n\n</think>\n\n"
TEMPLATE = UNMARKED_JINJA + "{% if add_generation_prompt and not thinks | default(true) %}" + THOUGHT + "{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tokenizer = str(llama3(folder / "tokenizer", TEMPLATE))
    return run_folder(
        folder / "run", tokenizer, format="messages", template="tokenizer", template_option="thinks=false"
    )


def prompt(folder, **options):
    text = RunText(folder, **options)
    return text.tokenizer.decode(text.encode_chat(chat("what is a ring?")).ids), text.settings(chat=True)


def test_a_chat_has_the_options_of_training(folder):
    shown, settings = prompt(folder)
    assert shown.endswith(THOUGHT) and settings["template_option"] == "thinks=false"
    shown, settings = prompt(folder, template_option="thinks=true")
    assert not shown.endswith(THOUGHT) and settings["template_option"] == "thinks=true"
    shown, settings = prompt(folder, template_option="")
    assert not shown.endswith(THOUGHT) and "template_option" not in settings
    shown, settings = prompt(folder, template="llama3")
    assert not shown.endswith(THOUGHT) and "template_option" not in settings


def test_an_option_that_nothing_reads_is_refused(folder):
    with pytest.raises(ValueError, match=r"does not read template_option effort; the names that it reads are thinks$"):
        prompt(folder, template_option="effort=high")
    with pytest.raises(ValueError, match="is for the template tokenizer; llama3 has no options"):
        prompt(folder, template="llama3", template_option="thinks=false")
    with pytest.raises(ValueError, match="'thinks' is not like enable_thinking=false"):
        prompt(folder, template_option="thinks")
