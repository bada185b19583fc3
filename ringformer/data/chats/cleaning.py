"""Cleaning of conversations: repairs or drops conversations, and counts how often each rule applies.

Every template needs the same order of turns: an optional system message, then alternating questions and answers.
Messages before the first question are dropped. The conversation ends where one speaker has two messages in a row (with
`merge`, the two become one message instead). A final question without an answer is dropped.

Further rules are chosen by name:

    html         converts answers that are HTML, as in raw ShareGPT, to markdown; drops those nested too deeply
    merge        merges consecutive messages of one speaker, instead of ending the conversation there
    unprintable  drops conversations with more than 1% control, unassigned, private-use or replacement characters
    latin        drops conversations whose letters are less than 90% Latin: a filter of scripts, not of languages
    short        drops conversations whose answers have fewer than 20 characters in total
    refusal      drops conversations with an answer that calls itself a language model or refuses like one
    duplicate    drops conversations that equal an earlier one after cleaning
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ringformer.data.chats.conversations import Conversation, Message
from ringformer.data.optional_packages import needed_for
from ringformer.files.hashes import content_digest

RULES = ("html", "merge", "unprintable", "latin", "short", "refusal", "duplicate")
USUAL_RULES = "html,unprintable,duplicate"

_HTML = re.compile(r"\s*<(div|p|pre|ul|ol|h[1-6]|table|blockquote)\b.*</\1>\s*\Z", re.DOTALL | re.IGNORECASE)
_REFUSAL = re.compile(
    r"\bas an? (ai|artificial intelligence|large language|language) (language )?(model|assistant)\b"
    r"|\bi('m| am) (just )?an? (ai|large language|language) (language )?(model|assistant)\b"
    r"|\bi('m| am) sorry, but i (can(no|')t|am unable to)\b",
    re.IGNORECASE,
)
_NOT_PLAIN = re.compile(r"[^\n\r\t -~]")
_PLAIN_ASCII = b"\n\r\t" + bytes(range(0x20, 0x7F))
_LANGUAGE = re.compile(r"(?:lang(?:uage)?-)(\S+)")


class Cleaning:
    """Cleaned conversations that pass the rules; `counts` records what each rule did.

    Raises:
      ValueError: for an unknown rule.
    """

    def __init__(self, conversations: Iterable[Conversation], rules: str):
        self._conversations = conversations
        self._rules = parse_rules(rules)
        self.counts: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Conversation]:
        seen: set[bytes] = set()
        for conversation in self._conversations:
            try:
                messages = [self._markdown(message) for message in self._turns(conversation.messages)]
                reason = self._reason(messages, seen)
            except RecursionError:
                reason = "an answer of HTML nested too deeply"
            if reason:
                self.counts[f"conversations dropped: {reason}"] += 1
            else:
                yield conversation._replace(messages=tuple(messages))

    def _turns(self, messages: Iterable[Message]) -> list[Message]:
        messages = list(messages)
        before, turns = split_turns(messages)
        first = 0
        while first < len(turns) and turns[first].role != "user":
            first += 1
        self.counts["turns dropped: before the first question"] += first
        kept: list[Message] = []
        for i, message in enumerate(turns[first:], first):
            if follows(kept, message):
                kept.append(message)
            elif "merge" in self._rules and message._replace(content="") == kept[-1]._replace(content=""):
                kept[-1] = message._replace(content=f"{kept[-1].content}\n\n{message.content}")
                self.counts["turns merged"] += 1
            else:
                self.counts["turns dropped: after two of one speaker, or a system message within"] += len(turns) - i
                break
        while kept and kept[-1].role != "assistant":
            self.counts["turns dropped: a question without an answer"] += 1
            kept.pop()
        if not kept:
            return []
        return [*before, *kept]

    def _markdown(self, message: Message) -> Message:
        if "html" not in self._rules or message.role != "assistant" or not is_html(message.content):
            return message
        content = to_markdown(message.content)
        self.counts["answers turned from HTML to markdown"] += 1
        return message._replace(content=content)

    def _reason(self, messages: list[Message], seen: set[bytes]) -> str | None:
        """Return the reason to drop the conversation (it has no messages, or the first rule that drops it); None to
        keep it."""
        if not messages:
            return "no question with an answer"
        text = "\n".join(message.content for message in messages)
        answers = [message.content + message.extra for message in messages if message.role == "assistant"]
        if "unprintable" in self._rules and _unprintable(text) > 0.01:
            return "unprintable"
        if "latin" in self._rules and _latin(text) < 0.9:
            return "latin"
        if "short" in self._rules and sum(len(answer.strip()) for answer in answers) < 20:
            return "short"
        if "refusal" in self._rules and any(_REFUSAL.search(answer.replace("’", "'")) for answer in answers):
            return "refusal"
        if "duplicate" in self._rules:
            digest = messages_digest(messages)
            if digest in seen:
                return "duplicate"
            seen.add(digest)
        return None


def split_turns(messages: Sequence[Message]) -> tuple[Sequence[Message], Sequence[Message]]:
    """Split messages into those before the first turn, the tools and a system message, and the turns."""
    first = int(bool(messages) and messages[0].role == "tools")
    first += int(len(messages) > first and messages[first].role == "system")
    return messages[:first], messages[first:]


def follows(turns: Sequence[Message], message: Message) -> bool:
    """Return True if a message may come after these turns: questions and answers alternate, and results of tools come
    between a call and the next answer."""
    last = turns[-1] if turns else None
    if message.role == "tool":
        return last is not None and (last.role == "tool" or "tool_calls" in json.loads(last.extra or "{}"))
    if message.role == "assistant":
        return last is not None and last.role in ("user", "tool")
    return message.role == "user" and (last is None or last.role == "assistant")


def parse_rules(text: str) -> frozenset[str]:
    """Parse rules such as "html,duplicate". Raises ValueError for an unknown one."""
    names = frozenset(map(str.strip, text.split(",")))
    rules = names - {""}
    unknown = sorted(rules - set(RULES))
    if unknown:
        raise ValueError(f"unknown cleaning rule {unknown[0]!r}; known: {', '.join(RULES)}")
    return rules


def messages_digest(messages: Iterable[Message]) -> bytes:
    """Hash the messages to 16 bytes, independent of the file they came from."""
    frame = []
    texts = []
    for message in messages:
        text = f"{message.content}{message.extra}".encode()
        frame.append(f"{message.role} {len(text)}")
        texts.append(text)
    content = " ".join(frame).encode() + b"".join(texts)
    return content_digest(content)


def is_html(text: str) -> bool:
    """Return True for a text that is one element of HTML."""
    return _HTML.match(text) is not None


def to_markdown(html: str) -> str:
    """Convert an answer's HTML to markdown; code blocks keep their text, and their language if a class names it."""
    with needed_for("the cleaning rule html"):
        from bs4 import BeautifulSoup
        from markdownify import MarkdownConverter

    page = BeautifulSoup(html, "html.parser")
    for block in page.find_all("pre"):
        code = block.find("code")
        if code is not None:  # ShareGPT's blocks begin with the language and a button, both outside the code
            block.attrs = {"data-language": _language(code)}
            block.string = code.get_text()
    converter = MarkdownConverter(
        heading_style="ATX",
        bullets="-",
        escape_asterisks=False,
        escape_underscores=False,
        escape_misc=False,
        code_language_callback=lambda block: block.get("data-language", ""),
    )
    text = converter.convert_soup(page)
    parts = []
    for part in re.split(r"(^```.*?^```[^\S\n]*$)", text, flags=re.DOTALL | re.MULTILINE):
        if not part.startswith("```"):
            part = re.sub(r"\n{3,}", "\n\n", part)
        parts.append(part)
    return "".join(parts).strip()


def _language(code) -> str:
    """Return the language that a class of a `code` element names; empty if no class names a language."""
    language = _LANGUAGE.search(" ".join(code.get("class") or []))
    return language[1] if language else ""


def _unprintable(text: str) -> float:
    """Return the share of characters that are not printable."""
    if text.isascii():
        return len(text.encode().translate(None, _PLAIN_ASCII)) / max(len(text), 1)
    bad = 0
    for match in _NOT_PLAIN.finditer(text):  # a list would take 80 bytes per character
        bad += match[0] == "\ufffd" or unicodedata.category(match[0]) in ("Cc", "Cn", "Co", "Cs")
    return bad / max(len(text), 1)


def _latin(text: str) -> float:
    """Return the share of letters that are Latin; 1 if the text has no letters."""
    latin = letters = 0
    for c in text:
        if c.isalpha():
            letters += 1
            latin += c.isascii() or unicodedata.name(c, "").startswith("LATIN")
    if not letters:
        return 1.0
    return latin / letters
