"""Text generation: a Generator with the tokenizer and the chat template of its run."""

from collections.abc import Sequence
from pathlib import Path

from ringformer.data.chats.conversations import Message
from ringformer.data.chats.templates import TemplateName
from ringformer.data.tokenizers.base import Tokenizer
from ringformer.inference.answers import Answer, RowText
from ringformer.inference.generator import Generator
from ringformer.inference.run_text import ChatPrompt, RunText
from ringformer.inference.sampling import Sampling
from ringformer.inference.session import Session, check_decoding, check_room
from ringformer.inference.text_stream import check_stops


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
        mesh_dim: str = "1,1,1,1",
        max_length: int,
        prefill_chunk: int | None = None,
        compute_dtype: str | None = None,
        devices=None,
        tokenizer: str | None = None,
        template: TemplateName | None = None,
    ) -> "TextGenerator":
        """Load the model of a run's latest checkpoint, or a converted model, with its tokenizer.

        Args: those of `Generator.load`, and `tokenizer` and `template` of `RunText`.
        """
        text = RunText(run, tokenizer=tokenizer, template=template)  # first, because its checks are fast
        generator = Generator.load(
            run,
            mesh_dim=mesh_dim,
            max_length=max_length,
            prefill_chunk=prefill_chunk,
            compute_dtype=compute_dtype,
            devices=devices,
        )
        return cls(generator, text)

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the run."""
        return self.text.tokenizer

    def encode(self, prompt: str, *, chat: bool = False, prefix: str = "") -> list[int]:
        """Encode a prompt and `prefix`, the beginning of the answer. The prompt is a text to continue or, with `chat`,
        a question, which is encoded up to where its answer begins.

        Raises ValueError for an empty prompt, and with `chat` for a run without a chat template.
        """
        return self._prompt(prompt, chat, prefix).ids

    def complete(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),
        stop: Sequence[str] = (),
        chat: bool = False,
        prefixes: Sequence[str] = (),
    ) -> list[str]:
        """Continue prompts as one batch; each text ends before an end token or a stop string, or after
        `max_new_tokens`.

        Args:
          prefixes: beginning of the answer to each prompt, which the model is given and answers do not repeat; empty:
            no prefixes.

        Raises ValueError, before anything is computed, for a prompt that is empty or too long (with the largest size
        that fits), and for a stop string that the tokenizer cannot spell.
        """
        begins = prefixes or [""] * len(prompts)
        asked = [self._prompt(prompt, chat, prefix) for prompt, prefix in zip(prompts, begins, strict=True)]
        self.check(asked, max_new_tokens, sampling, stop)
        if not asked:
            return []
        ends, rows = self._ends(chat), len(asked)
        answers = [RowText(self.tokenizer, prompt, ends, stop) for prompt in asked]
        texts = [""] * rows
        idle = -rows % self.generator.mesh.shape["dp"]
        session = self.generator.session(rows + idle)
        session.append([prompt.ids for prompt in asked + asked[:1] * idle])
        steps = session.decode(max_new_tokens=max_new_tokens, sampling=sampling, end_tokens=ends)
        for row in range(rows, rows + idle):
            session.end(row)
        for step in steps:
            for row, token in enumerate(step[:rows]):
                if token is not None and not answers[row].stopped:
                    texts[row] += answers[row].push(token)
                    if answers[row].stopped:
                        session.end(row)
        return [text + answer.close() for text, answer in zip(texts, answers, strict=True)]

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int,
        sampling: Sampling = Sampling(),
        stop: Sequence[str] = (),
        chat: bool = False,
    ) -> Answer:
        """Continue one prompt as `complete` does, in pieces of whole characters as they are generated."""
        asked = self._prompt(prompt, chat)
        self.check([asked], max_new_tokens, sampling, stop)
        session = self.generator.session(1)
        session.append([asked.ids])
        return self.answer(session, asked, len(asked.ids), max_new_tokens, sampling, stop, self._ends(chat))

    def answer(
        self,
        session: Session,
        prompt: ChatPrompt,
        prompt_tokens: int,
        max_new_tokens: int,
        sampling: Sampling,
        stop: Sequence[str],
        ends: frozenset[int],
    ) -> Answer:
        """Continue a prompt that was appended to a session of one row; `prompt_tokens` of its tokens were new there."""
        steps = session.decode(max_new_tokens=max_new_tokens, sampling=sampling, end_tokens=ends)
        return Answer(session, steps, RowText(self.tokenizer, prompt, ends, stop), prompt_tokens)

    def _prompt(self, prompt: str, chat: bool, prefix: str = "") -> ChatPrompt:
        if chat:
            return self.text.encode_chat([Message("user", prompt)], prefix)
        return ChatPrompt(self.text.encode(prompt + prefix), "", "")

    def _ends(self, chat: bool) -> frozenset[int]:
        return self.text.chat_end_tokens if chat else self.text.end_tokens

    def check(
        self, prompts: Sequence[ChatPrompt], max_new_tokens: int, sampling: Sampling, stop: Sequence[str]
    ) -> None:
        """Raise ValueError for a prompt that is too long, a stop string that cannot occur, or invalid sampling."""
        check_decoding(max_new_tokens, sampling)
        check_stops(stop, self.tokenizer)
        check_room(max((len(prompt.ids) for prompt in prompts), default=0), max_new_tokens, self.generator.max_length)
