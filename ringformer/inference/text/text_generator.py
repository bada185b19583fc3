"""Text generation with a `Generator`, and with the tokenizer and the chat template of its run."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ringformer.checkpoints.rope_change import RopeChange
from ringformer.data.chats.conversations import Message
from ringformer.data.chats.templates import TemplateName
from ringformer.data.tokenizers.base import Tokenizer
from ringformer.inference.generator import Generator
from ringformer.inference.rows import check_room
from ringformer.inference.sampling import Sampling
from ringformer.inference.shared_text import SharedText, shared_length
from ringformer.inference.text.answers import Answer, RowText, row_pieces
from ringformer.inference.text.run_text import Prompt, RunText
from ringformer.inference.text.text_session import TextSession, shared_beginning
from ringformer.inference.text.text_stream import check_stops, valid_unicode

SHARED = 256
"""Fewest tokens with which prompts must begin for these to be read once: another program is compiled for that."""


def shared_tokens(rows: Sequence[list[int]]) -> int:
    """Return with how many equal tokens rows begin; each has at least one token after them."""
    return min(shared_beginning(min(rows), max(rows)), min(map(len, rows)) - 1)


class TextGenerator:
    """A model that continues texts, answers questions and chats.

    Args:
      generator: the model on its mesh.
      text: tokenizer, chat template and end tokens of the same run.
    """

    def __init__(self, generator: Generator, text: RunText):
        self.generator = generator
        self.text = text

    @classmethod
    def load(
        cls,
        run: str | Path,
        *,
        tokenizer: str | None = None,
        template: TemplateName | None = None,
        template_option: str | None = None,
        allow: Collection[str] = (),
        rope: RopeChange | None = None,
        **options: Any,
    ) -> "TextGenerator":
        """Load the model of a run's latest checkpoint, or a converted model, with its tokenizer.

        Args: `run`, `tokenizer`, `template`, `template_option`, `allow` and `rope` as for `RunText`; `options` as
          for `Generator.load`; `max_length` is required.
        """
        text = RunText(  # first, because its checks are fast
            run, tokenizer=tokenizer, template=template, template_option=template_option, allow=allow, rope=rope
        )
        return cls(Generator.load(run, rope=rope, **options), text)

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the run."""
        return self.text.tokenizer

    def encode(self, prompt: str | Sequence[Message], *, chat: bool = False, prefix: str = "") -> list[int]:
        """Encode a prompt and `prefix`, the beginning of the answer. The prompt is a text to continue or, with `chat`,
        a question or a conversation, which is encoded up to where its answer begins.

        Raises ValueError for an empty prompt, and with `chat` for a run without a chat template.
        """
        return self.text.prompt(prompt, chat, prefix).ids

    def complete(
        self,
        prompts: Sequence[str | Sequence[Message]],
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),
        stop: Sequence[str] = (),
        chat: bool = False,
        prefixes: Sequence[str] = (),
        batch_size: int | None = None,
    ) -> list[str]:
        """Continue prompts, or with `chat` answer questions or conversations. Each text ends before an end token or a
        stop string, or after `max_new_tokens`. A long text with which all prompts begin is read once (`SharedText`).

        Args:
          batch_size: prompts to continue at a time; None: all of them.
          prefixes: beginning of the answer to each prompt. The model is given this text, and answers do not repeat it.
            Empty: no prefixes.

        Before anything is computed, raises ValueError for a prompt that is empty or too long (the message states the
        largest size that fits), and for a stop string that the tokenizer cannot spell.
        """
        begins = prefixes or [""] * len(prompts)
        asked = [self.text.prompt(prompt, chat, prefix) for prompt, prefix in zip(prompts, begins, strict=True)]
        self.check(asked, max_new_tokens, stop)
        batches = self.complete_batches(asked, batch_size or len(asked) or 1, max_new_tokens, sampling, stop)
        return [text for texts in batches for text in texts]

    def complete_batches(
        self,
        prompts: Sequence[Prompt],
        batch_size: int,
        max_new_tokens: int,
        sampling: Sampling,
        stop: Sequence[str],
        first_row: int = 0,
    ) -> Iterator[list[str]]:
        """Continue checked prompts, so many at a time, and yield the texts of each batch. A long text with which all
        prompts begin is read once. The draws of a prompt are those of its number, counted from `first_row`, so that
        they do not depend on the batches."""
        common = shared_tokens([prompt.ids for prompt in prompts]) if len(prompts) > 1 else 0
        common = shared_length(self.generator, common, -(-len(prompts) // batch_size))
        dp = self.generator.mesh.shape["dp"]
        shared = None
        rows = min(len(prompts), batch_size)
        rows += -rows % dp
        if common >= SHARED:
            shared = SharedText(self.generator, prompts[0].ids[:common], rows)
        for first in range(0, len(prompts), batch_size):
            asked = prompts[first : first + batch_size]
            rows = rows if shared else len(asked) + -len(asked) % dp
            ids = [prompt.ids for prompt in [*asked, *[asked[0]] * (rows - len(asked))]]
            if shared is None:
                session = self.generator.session(rows)
                session.append(ids)
            else:
                session = shared.session(max(map(len, ids)) - common + max_new_tokens)
                session.append([row[common:] for row in ids])
            steps = session.decode(
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                end_tokens=asked[0].ends,
                first_row=first_row + first,
            )
            for row in range(len(asked), rows):
                session.end(row)
            pieces = row_pieces(session, steps, [RowText(self.tokenizer, prompt, stop) for prompt in asked])
            texts = [valid_unicode("".join(of_row)) for of_row in zip(*pieces, strict=True)]
            del session, steps, pieces
            yield texts

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),
        stop: Sequence[str] = (),
        chat: bool = False,
        session: TextSession | None = None,
    ) -> Answer:
        """Continue one prompt as `complete` does, and return the text in pieces of whole characters as they are
        generated.

        Args:
          session: a session whose cache may hold the beginning of the prompt; None: a new one.
        """
        asked = self.text.prompt(prompt, chat)
        self.check([asked], max_new_tokens, stop)
        return (session or self.session()).answer(asked, max_new_tokens, sampling, stop)

    def session(self) -> TextSession:
        """Start an empty session for `stream` or `Chat`, which keeps its cache from prompt to prompt."""
        return TextSession(self.generator, self.tokenizer)

    def check(self, prompts: Sequence[Prompt], max_new_tokens: int, stop: Sequence[str]) -> None:
        """Raise ValueError for a prompt that is too long, or a stop string that cannot occur."""
        check_room(max((len(prompt.ids) for prompt in prompts), default=0), max_new_tokens, self.generator.max_length)
        check_stops(stop, self.tokenizer)
