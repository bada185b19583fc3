"""Text processing of a run: its tokenizer, its chat template, the tokens that end a text."""

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
"""Beginnings of answers; the tokens of a question are those that precede any of them."""


class ChatPrompt(NamedTuple):
    """The tokens of a conversation up to an answer."""

    ids: list[int]
    lead: str
    """Template text between `ids` and the answer: a space that shares a token with the answer, or nothing."""
    tail: str
    """Template text between an answer and the token that ends its turn."""


class RunText:
    """Tokenizer, chat template and end tokens of a run or of a converted model.

    Args:
      run: the folder of a run, of a stage of one, or of a converted model.
      tokenizer: a name that `load_tokenizer` accepts; None: the run's tokenizer.
      template: a chat template; None: the one that rendered the run's conversations, else the tokenizer's own.

    Raises:
      FileNotFoundError: the folder does not exist, or holds no model or no tokenizer.
      ValueError: the folder is an unconverted Hugging Face checkpoint, or the tokenizer does not fit the model.
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
        """Context in tokens that the model was trained at, or that its Hugging Face config.json names; None if neither
        is available."""

    def encode(self, prompt: str) -> list[int]:
        """Encode a text to continue. For a converted model, tokens begin with the beginning-of-sentence token where
        Hugging Face adds one; for a run they do not, because its documents had none. Raises ValueError for an empty
        text."""
        _check_not_empty(prompt)
        with _utf8_for(self.tokenizer):
            ids = self.tokenizer.encode(prompt)
        if self.tokenizer.begins and self.tokenizer.bos_id is not None and "data" not in self._saved:
            return [self.tokenizer.bos_id, *ids]
        return ids

    def encode_chat(self, messages: Sequence[Message], prefix: str = "") -> ChatPrompt:
        """Encode a conversation that ends with a question, up to where the answer begins or continues after `prefix`.

        The conversation is rendered and tokenized with an answer, as in training, and cut before the first token that
        holds a character of the answer. If the template ends in a space, a leading space of `prefix` is dropped. Raises
        ValueError for a template that changes the beginning of an answer.
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
            if not lead.strip():  # otherwise a token spans a whole phrase, including words of the question
                return ChatPrompt(ids, lead, behind.removeprefix(PROBES[0]))
        raise ValueError(f"tokenizer {self.tokenizer.name} has no token boundary where an answer begins")

    def _render(self, messages: Sequence[Message]) -> tuple[list[Segment], int]:
        """Render a conversation with only the last answer trained on; return the segments and the answer's index."""
        segments = self._template(messages)
        end = max(i for i, segment in enumerate(segments) if segment.trained) + 1
        start = end - 1
        while start and segments[start - 1].trained:
            start -= 1
        return [s._replace(trained=start <= i < end) for i, s in enumerate(segments)], start

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end a text: the tokenizer's, and those in the model's generation_config.json."""
        (*file,) = contained_files(self._run, [GENERATION_CONFIG])
        ends = read_object(self._run, GENERATION_CONFIG).get("eos_token_id") if file else None
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        if wrong := [i for i in ends if type(i) is not int or i < 0]:
            raise ValueError(f"{self._run / GENERATION_CONFIG}: eos_token_id {wrong[0]!r} is not a token id")
        return frozenset([self.tokenizer.eos_id, *ends])

    @cached_property
    def chat_end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer: `end_tokens` and the token that ends a turn in the template."""
        segments, start = self._render([Message("user", "a"), Message("assistant", "a")])
        ends = [segment.control for segment in segments[start:] if segment.trained and segment.control is not None]
        return self.end_tokens.union(ends[-1:])

    def settings(self, *, chat: bool) -> dict[str, Any]:
        """Settings besides the tokenizer that decide the tokens of a prompt and the end of its answer. Raises
        ValueError for a chat without a template."""
        settings = {"chat": chat, "end_tokens": sorted(self.chat_end_tokens if chat else self.end_tokens)}
        if chat and self.template_name is not None:
            settings["template"] = template_id(self.template_name, self.tokenizer)
        return settings

    @cached_property
    def _template(self):
        if self.template_name is None:
            raise ValueError(
                f"{self._run} was not trained on conversations, and its tokenizer has no chat template: "
                f"choose one with --template={'|'.join(get_args(TemplateName))}"
            )
        return load_template(self.template_name, self.tokenizer)


def _begun(segments: list[Segment], start: int, prefix: str) -> tuple[list[Segment], int]:
    """Split `prefix` off the answer at segment `start` and make it part of the text before the answer. Templates may
    strip an answer."""
    if not prefix:
        return segments, start
    answer = segments[start]
    given = prefix if answer.text.startswith(prefix) else prefix.lstrip()
    if not answer.text.startswith(given):
        raise ValueError(f"the chat template changes the beginning of an answer: {answer.text[:60]!r}, not {prefix!r}")
    before = segments[start - 1] if start else None
    text = given.lstrip(" ") if before is not None and before.control is None and before.text.endswith(" ") else given
    parts = [answer._replace(text=text, trained=False), answer._replace(text=answer.text.removeprefix(given))]
    return [*segments[:start], *parts, *segments[start + 1 :]], start + 1


def _check_not_empty(prompt: str) -> None:
    if not prompt:
        raise ValueError("the prompt is empty: there is nothing to continue")


@contextmanager
def _utf8_for(tokenizer: Tokenizer) -> Iterator[None]:
    """Name the tokenizer in the error for a prompt that is not UTF-8."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not UTF-8, which tokenizer {tokenizer.name} requires: {error}") from None


def _check_folder(run: Path) -> None:
    """Raise FileNotFoundError if `run` is not a folder, or is one of stages; the message lists the stages."""
    if not run.is_dir():
        raise FileNotFoundError(f"there is no folder {run}: name the folder of a run or of a converted model")
    stages = sorted((p for p in run.glob("stage-*-*") if (p / CONFIG).is_file()), key=_stage_number)
    if stages and not (run / CONFIG).is_file():
        raise FileNotFoundError(f"{run} is a run in stages: choose one of {', '.join(map(str, stages))}")


def _stage_number(stage: Path) -> int:
    number = stage.name.split("-")[1]
    return int(number) if number.isdecimal() else 0


def _tokenizer_of(run: Path, saved: dict[str, Any]) -> str:
    """Name the run's tokenizer for `load_tokenizer`. The initial model's tokenizer files may lie beside it."""
    named = (saved.get("data") or {}).get("tokenizer", "")
    if named == "bytes":
        return named
    files = {name: contained(run, name) for name in ("tokenizer.json", "tokenizer.model")}
    kind = Path(named).suffix if named.endswith((".json", ".model")) else ""
    present = [path for name, path in files.items() if name.endswith(kind) and path.is_file()]
    if not present:
        raise FileNotFoundError(
            f"{run} holds no tokenizer: set --tokenizer to bytes, or to the path of a *.model file, a tokenizer.json, "
            "or a folder with one of them"
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
