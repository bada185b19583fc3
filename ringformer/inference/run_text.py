"""What a run knows of text: its tokenizer, its chat template, the tokens that end a text."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from ringformer.checkpoints.saved_model import model_of
from ringformer.data.chats.conversations import ChatFormat, Message
from ringformer.data.chats.templates import TemplateName, load_template, template_id
from ringformer.data.tokenizers.base import Segment, Tokenizer, check_vocabulary
from ringformer.data.tokenizers.load import load_tokenizer
from ringformer.files.run_layout import CONFIG, HF_CONFIG
from ringformer.files.untrusted import contained, contained_files, read_object

GENERATION_CONFIG = "generation_config.json"

PROBES = ("A", "I", "T", "a", "1")
"""Beginnings of answers: the tokens of a question are those that stand before each of them."""


class ChatPrompt(NamedTuple):
    """The tokens of a conversation up to an answer."""

    ids: list[int]
    lead: str
    """Text of the template between `ids` and the answer, a space or nothing: it shares a token with the answer."""
    tail: str
    """Text of the template between an answer and the token that ends its turn."""


class RunText:
    """Tokenizer, chat template and end tokens of a run or of a converted model.

    Args:
      run: the folder of a run, of a stage of one, or of a converted model.
      tokenizer: `load_tokenizer`'s name for one, instead of the run's own.
      template: a chat template, instead of the run's: the one that its conversations were rendered with, else the
        tokenizer's own.

    Raises:
      FileNotFoundError: there is no such folder, or it holds no model or no tokenizer.
      ValueError: a Hugging Face folder that is not converted yet, or a tokenizer that is not the model's.
    """

    def __init__(self, run: str | Path, *, tokenizer: str | None = None, template: TemplateName | None = None):
        self._run = Path(run)
        _check_folder(self._run)
        model: Any = model_of(self._run)
        self._saved = read_object(self._run, CONFIG)
        self.tokenizer = load_tokenizer(tokenizer or _tokenizer_of(self._run, self._saved))
        check_vocabulary(self.tokenizer, model.vocab_size)
        self.template_name = template or _template_of(self._saved, self.tokenizer)
        self.context = _context_of(self._run, self._saved)
        """The context in tokens that the model was trained at, or that its config.json of Hugging Face names; None if
        neither says."""

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a text to continue. A converted model's begin with the tokenizer's beginning-of-sentence token
        where they do in Hugging Face; a run's do not, for its documents had none. Raises ValueError for one without
        any text."""
        _check_not_empty(prompt)
        with _utf8_for(self.tokenizer):
            ids = self.tokenizer.encode(prompt)
        if self.tokenizer.begins and self.tokenizer.bos_id is not None and "data" not in self._saved:
            return [self.tokenizer.bos_id, *ids]
        return ids

    def encode_chat(self, messages: Sequence[Message], prefix: str = "") -> ChatPrompt:
        """The tokens of a conversation that ends with a question, up to where the answer begins, or goes on behind
        `prefix`.

        As in training: the conversation is rendered and tokenized with an answer, and cut before the first token that
        holds a character of it. A space with which `prefix` begins is left out behind one of the template. Raises
        ValueError for a template that changes how an answer begins.
        """
        _check_not_empty(messages[-1].content)
        rendered = [
            _begun(*self._render([*messages, Message("assistant", prefix + probe)]), prefix) for probe in PROBES
        ]
        with _utf8_for(self.tokenizer):
            encoded = self.tokenizer.encode_chats([segments for segments, _ in rendered])
        segments, start = rendered[0]
        ((before, _),) = self.tokenizer.encode_chats([segments[:start]])
        whole = self.tokenizer.decode(before)
        behind = "".join(s.text for s in segments[start:] if s.trained and s.control is None)
        cuts = {begin: ids for ids, trained in encoded for begin in np.flatnonzero(trained)[:1].tolist()}
        for begin in sorted(cuts):
            ids = cuts[begin][:begin].tolist()
            lead = whole.removeprefix(self.tokenizer.decode(ids))
            if not lead.strip():  # else its tokens are made of whole phrases, the question's words among them
                return ChatPrompt(ids, lead, behind.removeprefix(PROBES[0]))
        raise ValueError(f"tokenizer {self.tokenizer.name} has no tokens that end where an answer begins")

    def _render(self, messages: Sequence[Message]) -> tuple[list[Segment], int]:
        """The segments of a conversation, its last answer alone trained on, and where that begins."""
        segments = self._template(messages)
        end = max(i for i, segment in enumerate(segments) if segment.trained) + 1
        start = end - 1
        while start and segments[start - 1].trained:
            start -= 1
        return [s._replace(trained=start <= i < end) for i, s in enumerate(segments)], start

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end a text: the tokenizer's, and those of the model's generation_config.json."""
        (*file,) = contained_files(self._run, [GENERATION_CONFIG])
        ends = read_object(self._run, GENERATION_CONFIG).get("eos_token_id") if file else None
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        if wrong := [i for i in ends if type(i) is not int or i < 0]:
            raise ValueError(f"{self._run / GENERATION_CONFIG}: eos_token_id {wrong[0]!r} is no token id")
        return frozenset([self.tokenizer.eos_id, *ends])

    @cached_property
    def chat_end_tokens(self) -> frozenset[int]:
        """The tokens that end an answer: `end_tokens` and the one with which the template ends a turn."""
        segments, start = self._render([Message("user", "a"), Message("assistant", "a")])
        ends = [segment.control for segment in segments[start:] if segment.trained and segment.control is not None]
        return self.end_tokens.union(ends[-1:])

    def settings(self, *, chat: bool) -> dict[str, Any]:
        """What decides, besides the tokenizer, which tokens a prompt has and where its answer ends. Raises ValueError
        for a chat without a template."""
        found = {"chat": chat, "end_tokens": sorted(self.chat_end_tokens if chat else self.end_tokens)}
        if chat and self.template_name is not None:
            found["template"] = template_id(self.template_name, self.tokenizer)
        return found

    @cached_property
    def _template(self):
        if self.template_name is None:
            raise ValueError(
                f"{self._run} was not trained on conversations, and its tokenizer has no chat template: "
                f"name one, --template={'|'.join(get_args(TemplateName))}"
            )
        return load_template(self.template_name, self.tokenizer)


def _begun(segments: list[Segment], start: int, prefix: str) -> tuple[list[Segment], int]:
    """Segments whose answer starts at `start`, the `prefix` of it made a part of what stands before the answer. A
    template may strip an answer."""
    if not prefix:
        return segments, start
    answer = segments[start]
    given = prefix if answer.text.startswith(prefix) else prefix.lstrip()
    if not answer.text.startswith(given):
        raise ValueError(f"the chat template changes how an answer begins: {answer.text[:60]!r}, not {prefix!r}")
    before = segments[start - 1] if start else None
    text = given.lstrip(" ") if before is not None and before.control is None and before.text.endswith(" ") else given
    parts = [answer._replace(text=text, trained=False), answer._replace(text=answer.text.removeprefix(given))]
    return [*segments[:start], *parts, *segments[start + 1 :]], start + 1


def _check_not_empty(prompt: str) -> None:
    if not prompt:
        raise ValueError("the prompt is empty: there is nothing to go on from")


@contextmanager
def _utf8_for(tokenizer: Tokenizer) -> Iterator[None]:
    """Say which text it is that cannot be encoded."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not UTF-8, which tokenizer {tokenizer.name} requires: {error}") from None


def _check_folder(run: Path) -> None:
    """Raise FileNotFoundError if `run` is no folder, or one of stages, with their names."""
    if not run.is_dir():
        raise FileNotFoundError(f"there is no folder {run}: name that of a run or of a converted model")
    stages = sorted((p for p in run.glob("stage-*-*") if (p / CONFIG).is_file()), key=_stage_number)
    if stages and not (run / CONFIG).is_file():
        raise FileNotFoundError(f"{run} is a run in stages: name one of them, {', '.join(map(str, stages))}")


def _stage_number(stage: Path) -> int:
    number = stage.name.split("-")[1]
    return int(number) if number.isdecimal() else 0


def _tokenizer_of(run: Path, saved: dict[str, Any]) -> str:
    """The run's tokenizer by `load_tokenizer`'s name; of the model that it began with there may be another's files."""
    named = (saved.get("data") or {}).get("tokenizer", "")
    if named == "bytes":
        return named
    files = {name: contained(run, name) for name in ("tokenizer.json", "tokenizer.model")}
    kind = Path(named).suffix if named.endswith((".json", ".model")) else ""
    present = [path for name, path in files.items() if name.endswith(kind) and path.is_file()]
    if not present:
        raise FileNotFoundError(
            f"{run} holds no tokenizer: name the model's with --tokenizer=bytes, or the path of a "
            "*.model file, a tokenizer.json or a folder with one of them"
        )
    return str(present[0])


def _template_of(saved: dict[str, Any], tokenizer: Tokenizer) -> TemplateName | None:
    data = saved.get("data") or {}
    if data.get("format") in get_args(ChatFormat):
        return data["template"]
    return "tokenizer" if tokenizer.config.get("chat_template") else None


def _context_of(run: Path, saved: dict[str, Any]) -> int | None:
    if "seq_len" in saved:
        return saved["seq_len"]
    (*file,) = contained_files(run, [HF_CONFIG])
    return read_object(run, HF_CONFIG).get("max_position_embeddings") if file else None
