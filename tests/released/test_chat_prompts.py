"""Prompts of released chat templates are those of transformers: every text, and every token on real tokenizers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from ringformer.data.chats.conversations import Message
from ringformer.data.chats.sandboxed_template import BREAK, ChatTemplate
from ringformer.data.chats.tokenizer_template import OUTPUT
from ringformer.inference.text.run_text import RunText
from tests.inference.runs import converted_folder
from tests.released.folders import llama_cpp_templates, tokenizer, trl_templates, with_template

THOUGHT = "<think>\nThey move keys.\n</think>\n\nKeys move."
TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Count words.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "a text"}}},
    },
}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "count", "arguments": {"text": "a ring"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "abcdefghi", "name": "count"}


def turns(*contents, system=None):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


CONVERSATIONS = {
    "one turn": turns("What is a ring?"),
    "a system message": turns("What is a ring?", system="Be brief."),
    "unicode": turns("日本語 🙂 é?", "naïve café", "<|im_end|> is text"),
    "three turns": turns("a", "b", "c", "d", "e", system="You are a ring."),
    "thoughts": turns("Why?", THOUGHT, "And then?", THOUGHT, "Really?"),
    "an empty answer": turns("Say nothing.", "", "Thanks."),
    "a tool": [*turns("How many words?"), CALLED, RESULT],
}
TOOLS = {"a tool": [TOOL]}

TEMPLATES = {
    "trl": ("qwen3", "qwen3_training", "deepseek_r1_distill", "phi3", "gemma3", "gptoss"),
    "llama.cpp": ("HuggingFaceTB-SmolLM3-3B", "mistralai-Mistral-Nemo-Instruct-2407", "ByteDance-Seed-OSS"),
}
"""Templates of the usual suite: they rewrite earlier turns, open a thought, have marks, or lie beside a tokenizer."""


def templates():
    for source, texts in (("trl", trl_templates()), ("llama.cpp", llama_cpp_templates())):
        for name, text in texts.items():
            yield f"{source}-{name}", text, name in TEMPLATES[source]


def messages_of(conversation, tools=None):
    """Return the `Message`s of a conversation, as files of chats are read."""
    found = [Message("tools", json.dumps(tools))] if tools else []
    for message in conversation:
        extra = {key: value for key, value in message.items() if key not in ("role", "content")}
        found.append(Message(message["role"], message["content"], json.dumps(extra) if extra else ""))
    return found


def rendered_here(template: str, conversation, tools) -> str | None:
    """The prompt as text; None if the template refuses the conversation. In this process, which is faster."""
    try:
        ours = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}, ["<|im_end|>"], None, OUTPUT)
        parts = ours.prompt(messages_of(conversation, tools))
    except Exception:  # of any class: a template is a program
        return None
    assert not any(trained for _, trained, _ in parts)
    return "".join(text for text, _, _ in parts).replace(BREAK, "")


def rendered_there(template: str, conversation, tools) -> str | None:
    options = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    try:
        texts, _ = render_jinja_template([conversation], tools=tools, chat_template=template, **options)
    except Exception:
        return None
    return texts[0]


@pytest.mark.parametrize("is_usual", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "all others"])
def test_the_prompt_s_text_is_that_of_transformers(is_usual):
    """Compare all templates on all conversations; both may refuse one."""
    compared = refused = 0
    different = []
    for name, template, is_in_usual in templates():
        if is_in_usual != is_usual:
            continue
        for kind, conversation in CONVERSATIONS.items():
            expected = rendered_there(template, conversation, TOOLS.get(kind))
            found = rendered_here(template, conversation, TOOLS.get(kind))
            compared += expected is not None
            refused += expected is None
            if found != expected:
                different.append((name, kind))
    print(f"{compared} prompts are equal but for {len(different)}, {refused} are refused")  # for whoever looks with -s
    assert not different
    assert compared > 10 * refused


class Released(NamedTuple):
    """A released tokenizer with a chat template."""

    end: str
    """Token that ends an answer."""
    template: Callable[[], str] | None = None
    """Function that returns its template; None: the one beside it."""

    def folder(self, name: str, out: Path) -> Path:
        """Copy the tokenizer of this name, with its template, to `out`."""
        return with_template(name, self.template() if self.template else None, out)


RELEASED = {
    "smol": Released("<|im_end|>"),
    "qwen3": Released("<|im_end|>"),
    "llama3_1": Released("<|eot_id|>", lambda: llama_cpp_templates()["meta-llama-Llama-3.1-8B-Instruct"]),
    "gemma3": Released("<end_of_turn>"),
    "gptoss": Released("<|return|>", lambda: trl_templates()["gptoss"]),
    "deepseek_v3": Released("<｜end▁of▁sentence｜>"),
}


@pytest.mark.usual("smol", "qwen3")
@pytest.mark.parametrize("name", RELEASED)
def test_the_prompt_s_tokens_are_those_of_transformers(name, tmp_path):
    folder = RELEASED[name].folder(name, tmp_path / "tokenizer")
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = RunText(converted_folder(tmp_path / "model", folder))
    compared = 0
    for kind, conversation in CONVERSATIONS.items():
        tools = TOOLS.get(kind)
        if rendered_there(theirs.chat_template, conversation, tools) is None:
            with pytest.raises(ValueError, match="refuses this"):
                ours.encode_chat(messages_of(conversation, tools))
            continue
        if kind == "unicode" and "<|im_end|>" in theirs.get_vocab():
            continue  # transformers makes a control token of the user's text
        expected = theirs.apply_chat_template(conversation, tools=tools, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(messages_of(conversation, tools)).ids == expected, kind
        compared += 1
    assert compared >= 4
    assert theirs.convert_tokens_to_ids(RELEASED[name].end) in ours.chat_end_tokens


def test_qwen3_chats_over_several_turns(tmp_path):
    """Its template drops earlier thoughts. The prompt of the next turn is what the template says, without them."""
    text = RunText(converted_folder(tmp_path / "model", tokenizer("qwen3")))
    ids = text.encode_chat(messages_of(CONVERSATIONS["thoughts"])).ids
    shown = text.chat_text(messages_of(CONVERSATIONS["thoughts"]))
    assert "They move keys." not in shown and shown.endswith("<|im_start|>assistant\n")
    assert ids[-2:] == text.tokenizer.encode("assistant\n")
    assert text.tokenizer.controls["<|im_end|>"] in text.chat_end_tokens
