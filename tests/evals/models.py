"""What tests of evaluations answer prompts with: models whose answers are known."""

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from ringformer.data.chats.conversations import Message


class Scripted:
    """A TextGenerator of UTF-8 bytes whose answer to a prompt is a function of it; remembers what it was asked, and
    whether that was a chat."""

    generator = SimpleNamespace(can_append=True)

    def __init__(self, answer: Callable[[str], str]):
        self.answer = answer
        self.batches: list[list[str]] = []
        self.chats: set[bool] = set()

    def encode(self, prompt: str, *, chat: bool = False, prefix: str = "") -> list[int]:
        return list(self.text(prompt, prefix, chat).encode())

    def complete(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        batch_size: int,
        chat: bool = False,
        prefixes: Sequence[str] = (),
    ) -> list[str]:
        texts = [self.text(*each, chat) for each in zip(prompts, prefixes or [""] * len(prompts), strict=True)]
        self.batches.append(texts)
        self.chats.add(chat)
        return [self.answer(text) for text in texts]

    @staticmethod
    def text(prompt: str | Sequence[Message], prefix: str, chat: bool) -> str:
        """Return the text that the model is given; a conversation is written as for a model without a template."""
        if not isinstance(prompt, str):
            assert chat
            return "".join(f"{role.title()}: {text}\n\n" for role, text, *_ in prompt) + f"Assistant:{prefix}"
        return f"<chat>{prompt}</chat>{prefix}" if chat else prompt + prefix


def knows_lines(prompt: str, within: float = float("inf")) -> str:
    """The number of the line asked for, if it stands in the last `within` characters; by search in the text."""
    index = re.search(r"in line (\S+)\?", prompt)[1]
    found = re.search(rf"line {index}: REGISTER_CONTENT is <(\d+)>", prompt[-int(min(within, len(prompt))) :])
    return f"The number in line {index} is {found[1]}." if found else "I do not know."


class Words:
    """A tokenizer of words."""

    def encode(self, text):
        return text.split(" ")

    def decode(self, ids):
        return " ".join(ids)
