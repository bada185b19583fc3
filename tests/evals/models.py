"""What tests of evaluations answer prompts with: models whose answers are known."""

import re
from collections.abc import Callable, Sequence


class Scripted:
    """A TextModel of UTF-8 bytes whose answer to a prompt is a function of it; remembers what it was asked, and whether
    that was a chat."""

    def __init__(self, answer: Callable[[str], str]):
        self.answer = answer
        self.batches: list[list[str]] = []
        self.chats: set[bool] = set()

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        return list((f"<chat>{prompt}" if chat else prompt).encode())

    def complete(self, prompts: Sequence[str], *, max_new_tokens: int, chat: bool = False) -> list[str]:
        self.batches.append(list(prompts))
        self.chats.add(chat)
        return [self.answer(prompt) for prompt in prompts]


def knows_lines(prompt: str, within: float = float("inf")) -> str:
    """The number of the line asked for, if it stands in the last `within` characters; by search in the text."""
    index = re.search(r"in line (\S+)\?", prompt)[1]
    found = re.search(rf"line {index}: REGISTER_CONTENT is <(\d+)>", prompt[-int(min(within, len(prompt))) :])
    return f"The number in line {index} is {found[1]}." if found else "I do not know."
