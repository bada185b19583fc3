"""Text processing of a run: its tokenizer, its chat template, and the tokens that end a text."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_args

from ringformer.checkpoints.rope_change import RopeChange
from ringformer.checkpoints.saved_model import (
    hugging_face_tokens,
    model_of,
    other_tokenizer,
    recorded_tokenizer,
    run_context,
)
from ringformer.data.chats.conversations import ChatFormat, Message
from ringformer.data.chats.templates import TemplateName, load_template, template_id, templates_for
from ringformer.data.tokenizers.base import Segment, Tokenizer, check_vocabulary
from ringformer.data.tokenizers.load import load_tokenizer
from ringformer.files.run_layout import CONFIG
from ringformer.files.untrusted import contained_files, read_object
from ringformer.inference.text.beginning import Beginning
from ringformer.models.registry import as_decoder

PROBES = ("A", "I", "T", "a", "1")
"""Beginnings of answers. They are used to find the tokens of a question: these precede every one of the answers."""

ANSWER = "It carries keys."
"""An answer, by which the ending of a turn is found."""


class Prompt(NamedTuple):
    """Tokens of a text to continue, or of a conversation up to an answer."""

    ids: list[int]
    ends: frozenset[int]
    """Tokens that end the continuation or the answer."""
    lead: str = ""
    """Template text between `ids` and the answer: a space that shares a token with the answer, or nothing."""
    tail: str = ""
    """Template text between an answer and the token that ends its turn."""


class Ending(NamedTuple):
    """Text and tokens that a template writes behind an answer."""

    tail: str
    """Text between the answer and the token that ends its turn."""
    tokens: frozenset[int]
    """The token that ends the turn; empty if it is no control token."""


class RunText:
    """Tokenizer, chat template and end tokens of a run or of a converted model.

    Args:
      run: the folder of a run, of a stage of one, or of a converted model.
      tokenizer: a name that `load_tokenizer` accepts; None: the run's tokenizer.
      template: a chat template; None: the one that rendered the run's conversations or, if there is none, the
        tokenizer's own.
      template_option: variables of a tokenizer's own template (`parse_template_option`); None: those that rendered the
        run's conversations, unless `template` is another.
      allow: "data.tokenizer" if `tokenizer` may be another than the model was trained with.
      rope: another rope than the model's, which may extend its context.

    Raises:
      FileNotFoundError: if the folder does not exist, or holds no model or no tokenizer.
      ValueError: if the folder is an unconverted Hugging Face checkpoint, the tokenizer or `rope` does not fit the
        model, or an end token is none of the model's tokens.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        tokenizer: str | None = None,
        template: TemplateName | None = None,
        template_option: str | None = None,
        allow: Collection[str] = (),
        rope: RopeChange | None = None,
    ):
        self._run = Path(run)
        _check_folder(self._run)
        model: Any = model_of(self._run)
        saved = read_object(self._run, CONFIG)
        self._data: dict[str, Any] = saved.get("data") or {}  # empty for a converted model
        self.tokenizer: Tokenizer = load_tokenizer(tokenizer or _tokenizer_of(self._run, self._data))
        if tokenizer is not None and "data.tokenizer" not in allow:
            theirs = other_tokenizer(self._run, self.tokenizer)
            if theirs is not None:
                raise ValueError(
                    f"{run} was trained with tokenizer {theirs}, but --tokenizer={tokenizer} is {self.tokenizer.name}, "
                    "whose ids mean another text: leave out --tokenizer, or use it with --allow=data.tokenizer"
                )
        check_vocabulary(self.tokenizer, model.vocab_size)
        self.beginning: Beginning = Beginning.of(self._run, saved, self.tokenizer)
        recorded: TemplateName | None = None
        if self._data.get("format") in get_args(ChatFormat):
            recorded = self._data["template"]
        elif self.tokenizer.config.get("chat_template"):
            recorded = "tokenizer"
        self.template_name: TemplateName | None = template or recorded
        has_recorded = self.template_name == "tokenizer" == self._data.get("template")
        if template_option is None and has_recorded:
            template_option = self._data.get("template_option")
        self.template_option: str = template_option or ""
        original = hugging_face_tokens(self._run, model)
        self.end_tokens: frozenset[int] = original.ends | {self.tokenizer.eos_id}
        """Tokens that end a text: the tokenizer's, and those of the model that came from Hugging Face."""
        self.context: int | None = run_context(saved) or original.context
        """Context, in tokens, with which the model was trained, or which its Hugging Face config.json names; None if
        neither is available. A scaled `rope` extends it."""
        self.rope = rope
        if rope is not None:
            decoder = as_decoder(model, self._run)
            rope.apply(decoder, self.context)  # refuses what does not fit
            self.context = rope.context(decoder, self.context)

    def prompt(self, text: str | Sequence[Message], chat: bool = False, prefix: str = "") -> Prompt:
        """Encode a text to continue or, with `chat`, a question or a conversation to answer. `prefix` is the beginning
        of the continuation or of the answer."""
        if isinstance(text, str):
            if not chat:
                return Prompt(self.encode(text + prefix), self.end_tokens)
            text = [Message("user", text)]
        if not chat:
            raise ValueError("a conversation is answered with a chat template: set chat")
        return self.encode_chat(text, prefix)

    @property
    def begin(self) -> list[int]:
        """Tokens with which every text begins: the BOS token, or none."""
        return self.beginning.tokens

    def encode(self, prompt: str) -> list[int]:
        """Encode a text to continue, after the tokens with which every text begins. Raises ValueError for an empty
        text."""
        with _checks(prompt, self.tokenizer):
            return [*self.begin, *self.tokenizer.encode(prompt)]

    def encode_chat(self, messages: Sequence[Message], prefix: str = "") -> Prompt:
        """Encode a conversation that ends with a question, up to the place where the answer begins, or where it
        continues after `prefix`.

        A tokenizer's own template writes this prompt itself; its tokens are those of transformers. With another
        template, the conversation is rendered and tokenized with an answer, as in training, and cut before the first
        token that holds a character of the answer. If the template ends in a space, a leading space of `prefix` is
        dropped. Raises ValueError for a template that changes the beginning of an answer.
        """
        with _checks(messages[-1].content, self.tokenizer):
            own = self._template.own
            if own is None:
                with_answers = [[*messages, Message("assistant", prefix + probe)] for probe in PROBES]
                return self._before_answer([_begun(*self._render(chat), prefix) for chat in with_answers])
            before = own.prompt(messages)
            if prefix:
                before.append(Segment(self._as_shown(prefix)))
                return self._before_answer([([*before, Segment(x, trained=True)], len(before)) for x in PROBES])
            ((ids, _),) = self.tokenizer.encode_chats([before])
            return Prompt(ids.tolist(), self.chat_end_tokens, tail=self._ending.tail)

    def _before_answer(self, rendered: list[tuple[list[Segment], int]]) -> Prompt:
        """Encode what stands before an answer, given renderings that differ in the answer, which begins at a segment:
        up to the first token that holds a character of it."""
        encoded = self.tokenizer.encode_chats([segments for segments, _ in rendered])
        segments, start = rendered[0]
        ((before, _),) = self.tokenizer.encode_chats([segments[:start]])
        whole = self.tokenizer.decode(before)
        for ids, trained in sorted(encoded, key=lambda row: int(row[1].argmax())):
            ids = ids[: trained.argmax()].tolist()
            lead = whole.removeprefix(self.tokenizer.decode(ids))
            if not lead.strip():  # otherwise a token spans a phrase with words of the question
                return Prompt(ids, self.chat_end_tokens, lead, self._ending.tail)
        raise ValueError(f"tokenizer {self.tokenizer.name} has no token boundary where an answer begins")

    def _as_shown(self, prefix: str) -> str:
        """Return the beginning of an answer as the tokenizer's own template writes it: it may strip answers. Raises
        ValueError if the template changes it otherwise."""
        text = "".join(segment.text for segment in self._one_turn(prefix + PROBES[0]))
        for shown in (prefix, prefix.lstrip()):
            if shown + PROBES[0] in text:
                return shown
        raise ValueError(f"the chat template changes the beginning of an answer, {prefix!r}: it writes {text[-60:]!r}")

    @cached_property
    def _ending(self) -> Ending:
        """Text and tokens that the template writes behind an answer."""
        if self._template.own is None:
            segments, start = self._render([Message("user", "a"), Message("assistant", ANSWER)])
            segments = [segment for segment in segments[start:] if segment.trained]
        else:
            segments = self._one_turn(ANSWER)
        last = max((i for i, segment in enumerate(segments) if ANSWER in segment.text), default=None)
        if last is None:
            raise ValueError("the chat template does not show an answer")
        ends = frozenset(segment.control for segment in segments[last + 1 : last + 2] if segment.control is not None)
        return Ending(segments[last].text.rpartition(ANSWER)[2], ends)

    def _one_turn(self, answer: str) -> list[Segment]:
        """Render a question and an answer with the tokenizer's own template."""
        return self._template.own.text([Message("user", "a"), Message("assistant", answer)])

    def chat_text(self, messages: Sequence[Message], to_answer: bool = True) -> str:
        """Render a conversation as text, with the names of control tokens: up to the answer to come or, without
        `to_answer`, up to the end of its last answer."""
        if to_answer and self._template.own is not None:
            return "".join(segment.text for segment in self._template.own.prompt(messages))
        if to_answer:
            segments, start = self._render([*messages, Message("assistant", PROBES[0])])
            return "".join(segment.text for segment in segments[:start])
        segments, _ = self._render(messages)
        last = max(i for i, segment in enumerate(segments) if segment.trained and segment.control is None)
        return "".join(segment.text for segment in segments[: last + 1])

    def _render(self, messages: Sequence[Message]) -> tuple[list[Segment], int]:
        """Render a conversation with only the last answer trained on; return the segments and the answer's index."""
        segments = self._template(messages)
        end = max(i for i, segment in enumerate(segments) if segment.trained) + 1
        start = end - 1
        while start and segments[start - 1].trained:
            start -= 1
        return [s._replace(trained=start <= i < end) for i, s in enumerate(segments)], start

    @cached_property
    def chat_end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer: `end_tokens` and the token that ends a turn in the template."""
        return self.end_tokens | self._ending.tokens

    def settings(self, *, chat: bool) -> dict[str, Any]:
        """Return the settings, besides the tokenizer, that determine the tokens of a prompt and the end of its answer.
        Raises ValueError for a chat without a template."""
        ends = self.chat_end_tokens if chat else self.end_tokens
        settings = {"chat": chat, "end_tokens": sorted(ends)}
        if chat and self.template_name is not None:
            settings["template"] = template_id(self.template_name, self.tokenizer)
            if self.template_option:
                settings["template_option"] = self.template_option
        return settings

    @cached_property
    def _template(self):
        if self.template_name is None:
            raise ValueError(
                f"{self._run} was not trained on conversations, and its tokenizer has no chat template: "
                f"choose one with --template={'|'.join(templates_for(self.tokenizer))}"
            )
        return load_template(self.template_name, self.tokenizer, template_option=self.template_option)


def _begun(segments: list[Segment], start: int, prefix: str) -> tuple[list[Segment], int]:
    """Split `prefix` off the answer at segment `start`, and make it part of the text before the answer. A template may
    have stripped the answer."""
    if not prefix:
        return segments, start
    answer = segments[start]
    given = prefix if answer.text.startswith(prefix) else prefix.lstrip()
    if not answer.text.startswith(given):
        raise ValueError(f"the chat template changes the beginning of an answer: {answer.text[:60]!r}, not {prefix!r}")
    text = given
    if start:
        before = segments[start - 1]
        if before.control is None and before.text.endswith(" "):
            text = given.lstrip(" ")
    parts = [answer._replace(text=text, trained=False), answer._replace(text=answer.text.removeprefix(given))]
    return [*segments[:start], *parts, *segments[start + 1 :]], start + 1


@contextmanager
def _checks(prompt: str, tokenizer: Tokenizer) -> Iterator[None]:
    """Context that raises ValueError for an empty prompt, or if encoding the prompt fails because it is not UTF-8."""
    if not prompt:
        raise ValueError("the prompt is empty: there is nothing to continue")
    try:
        yield
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not UTF-8, which tokenizer {tokenizer.name} requires: {error}") from None


def _check_folder(run: Path) -> None:
    """Raise FileNotFoundError if `run` is not a folder, or is a run in stages; the message then lists the stages."""
    if not run.is_dir():
        raise FileNotFoundError(f"there is no folder {run}: name the folder of a run or of a converted model")
    stages = [path for path in run.glob("stage-*-*") if (path / CONFIG).is_file()]
    if stages and not (run / CONFIG).is_file():
        stages.sort(key=lambda path: path.name.split("-")[1].zfill(9))  # stage 10 after stage 9
        raise FileNotFoundError(f"{run} is a run in stages: choose one of {', '.join(map(str, stages))}")


def _tokenizer_of(run: Path, data: dict[str, Any]) -> str:
    """Return the name of the run's tokenizer for `load_tokenizer`. Tokenizer files of the initial model may lie beside
    the run's own."""
    named = data.get("tokenizer", "")
    if named == "bytes":
        return named
    kind = Path(named).suffix if named.endswith((".json", ".model")) else ""
    if (recorded_tokenizer(run) or "").startswith("sentencepiece-"):  # from a folder
        kind = ".model"
    present = [path for path in contained_files(run, ("tokenizer.json", "tokenizer.model")) if path.name.endswith(kind)]
    if not present:
        raise FileNotFoundError(
            f"{run} holds no tokenizer: set --tokenizer to bytes, or to the path of a *.model file, a tokenizer.json, "
            "or a folder with one of them"
        )
    return str(present[0])
