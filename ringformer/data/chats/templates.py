"""Chat templates: they render a conversation as text and control tokens; answers and end tokens are trained on.

    vicuna     {system} USER: {question} ASSISTANT: {answer}</s>USER: ...
    llama2     <s>[INST] <<SYS>>\\n{system}\\n<</SYS>>\\n\\n{question} [/INST] {answer} </s><s>[INST] ...
    llama3     <|begin_of_text|><|start_header_id|>{role}<|end_header_id|>\\n\\n{content}<|eot_id|>...
    tokenizer  the chat_template of the tokenizer's tokenizer_config.json (`tokenizer_template.py`)

Training covers an answer from its first character to the token that ends the turn; in LLaMA-2, this includes the space
between the answer and that token. Conversations are alternating questions and answers after an optional system message.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ringformer.data.chats.conversations import Message
from ringformer.data.chats.rendered import RenderAll, Rendered
from ringformer.data.optional_packages import needed_for
from ringformer.data.tokenizers.base import Segment, Tokenizer
from ringformer.files.json_text import parse_json

if TYPE_CHECKING:  # it needs jinja2
    from ringformer.data.chats.tokenizer_template import JinjaTemplate

TemplateName = Literal["vicuna", "llama2", "llama3", "tokenizer"]
Rewritten = Literal["split", "last", "refuse"]
"""Ways with an answer that a chat template writes in another way once later turns follow: a sequence of its own,
nothing, or an error."""

TAKEN = ("messages", "tools", "add_generation_prompt")
"""Variables of a chat template that a conversation sets."""

PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's constants in JSON: `enable_thinking=False` would be a text, which a template takes for true."""

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


@dataclass(frozen=True)
class Template:
    """A chat template.

    Args:
      render_all: returns, for each of several conversations, the sequences that train on its answers, or an error. A
        tokenizer's own template may write an answer in another way once later turns follow; that answer then has a
        sequence of its own, up to its end. The last sequence has the last answer.
      own: a tokenizer's own template, which also renders prompts; None: a prompt is what stands before an answer.
    """

    render_all: RenderAll
    own: "JinjaTemplate | None" = None

    def sequences(self, messages: Sequence[Message]) -> list[Rendered]:
        """Render a conversation. Raises ValueError if the template refuses it."""
        (sequences,) = self.render_all([messages])
        if isinstance(sequences, ValueError):
            raise sequences
        return sequences

    def __call__(self, messages: Sequence[Message]) -> list[Segment]:
        """Return the segments of the sequence with the last answer. Raises ValueError if the template refuses it."""
        return self.sequences(messages)[-1].segments


def parse_template_option(text: str) -> dict[str, Any]:
    """Return the variables of a chat template that an option such as "enable_thinking=false,effort=high" sets. A value
    is read as JSON if it is JSON or one of Python's constants, and as text otherwise.

    Raises ValueError for a part without a name and a value, and for a name that is set twice or is not free.
    """
    values: dict[str, Any] = {}
    if not text:
        return values
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not (equals and name.isidentifier()):
            raise ValueError(f"template_option={text!r}: {part!r} is not like enable_thinking=false")
        if name in values or name in TAKEN or name.endswith("_token"):
            raise ValueError(f"template_option={text!r}: {name} is set twice, or by the conversation itself")
        value = PYTHON_WORDS.get(value, value)
        try:
            values[name] = parse_json(value)
        except ValueError:
            values[name] = value
    return values


def load_template(
    name: TemplateName, tokenizer: Tokenizer, *, chat_date: str | None = None, template_option: str = ""
) -> Template:
    """Load the template `name` for a tokenizer.

    Args:
      chat_date: today's date for a tokenizer's own template, e.g. 2026-11-22; None: today. "": a template that asks for
        the date is refused. Unless `chat_date` is None, a template that generates random text is refused too.
      template_option: variables of a tokenizer's own template (`parse_template_option`).

    Raises:
      ValueError: if the template is unknown, needs tokens that the tokenizer lacks, or does not read an option.
    """
    values = parse_template_option(template_option)
    if name == "tokenizer":
        with needed_for("the template tokenizer"):
            import jinja2  # noqa: F401  (it runs in another process)

        from ringformer.data.chats.tokenizer_template import JinjaTemplate

        jinja = JinjaTemplate(tokenizer, chat_date, values)
        return Template(jinja, jinja)
    if name not in TEMPLATES:
        raise ValueError(f"unknown chat template {name!r}; known: {', '.join(get_args(TemplateName))}")
    if values:
        raise ValueError(f"template_option={template_option!r} is for the template tokenizer; {name} has no options")
    render = TEMPLATES[name]
    render(tokenizer, ())  # raises ValueError for a missing token

    def rendered(messages: Sequence[Message]) -> list[Rendered] | ValueError:
        if any(message.extra or message.role in ("tool", "tools") for message in messages):
            return ValueError(
                f"it calls tools, has thoughts beside an answer or names a speaker, which the template {name} has no "
                "words for: use the template tokenizer"
            )
        answers = sum(message.role == "assistant" for message in messages)
        return [Rendered(render(tokenizer, messages), tuple(range(answers)))]

    return Template(lambda conversations: list(map(rendered, conversations)))


def templates_for(tokenizer: Tokenizer) -> list[TemplateName]:
    """Return the templates whose tokens a tokenizer has; its own is not among them."""
    fitting: list[TemplateName] = []
    for name, render in TEMPLATES.items():
        with suppress(ValueError):
            render(tokenizer, ())
            fitting.append(name)
    return fitting


def template_id(name: TemplateName, tokenizer: Tokenizer) -> str:
    """Return the identifier of a template for a store's settings: its name and, for a tokenizer's own template, a hash,
    because that template may change."""
    if name != "tokenizer":
        return name
    digest = hashlib.blake2b(repr(tokenizer.config.get("chat_template")).encode(), digest_size=8)
    return f"{name}-{digest.hexdigest()}"


def template_name(template: str) -> str:
    """Return the name of the template that a `template_id` identifies."""
    return template.partition("-")[0]


def _vicuna(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Segment]:
    system, turns = _split_system(messages)
    if system is None:
        system = VICUNA_SYSTEM
    segments = [*_begin(tokenizer), Segment(f"{system} ")]
    for role, content, *_ in turns:
        if role == "user":
            segments.append(Segment(f"USER: {content} ASSISTANT: "))
        else:
            segments += [Segment(content, trained=True), _end(tokenizer)]
    return segments


def _llama2(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Segment]:
    system, turns = _split_system(messages)
    before = "" if system is None else f"<<SYS>>\n{system}\n<</SYS>>\n\n"
    segments: list[Segment] = []
    for role, content, *_ in turns:
        if role == "user":
            segments += [*_begin(tokenizer), Segment(f"[INST] {before}{content} [/INST] ")]
            before = ""
        else:
            segments += [Segment(f"{content} ", trained=True), _end(tokenizer)]
    return segments


def _llama3(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[Segment]:
    names = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    missing = [name for name in names if name not in tokenizer.controls]
    if missing:
        raise ValueError(
            f"the template llama3 needs {', '.join(missing)}, which tokenizer {tokenizer.name} does not have; "
            "choose another template, or a LLaMA-3 tokenizer.json"
        )
    begin, start_header, end_header, end = (Segment(name, control=tokenizer.controls[name]) for name in names)
    segments = [begin]
    for role, content, *_ in messages:
        answer = role == "assistant"
        segments += [start_header, Segment(role), end_header, Segment("\n\n")]
        segments += [Segment(content, trained=answer), end._replace(trained=answer)]
    return segments


TEMPLATES: dict[TemplateName, Callable[[Tokenizer, Sequence[Message]], list[Segment]]] = {
    "vicuna": _vicuna,
    "llama2": _llama2,
    "llama3": _llama3,
}
"""Functions that render a conversation for a tokenizer, by template."""


def _begin(tokenizer: Tokenizer) -> list[Segment]:
    if tokenizer.bos_id is None:
        return []
    return [Segment("<s>", control=tokenizer.bos_id)]


def _end(tokenizer: Tokenizer) -> Segment:
    return Segment("</s>", trained=True, control=tokenizer.eos_id)


def _split_system(messages: Sequence[Message]) -> tuple[str | None, Sequence[Message]]:
    if messages and messages[0].role == "system":
        return messages[0].content, messages[1:]
    return None, messages
