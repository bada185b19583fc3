"""A conversation with a model that keeps its cache between turns."""

from collections.abc import Sequence
from contextlib import suppress

from ringformer.data.chats.conversations import Message
from ringformer.inference.answers import Answer
from ringformer.inference.run_text import ChatPrompt
from ringformer.inference.sampling import Sampling
from ringformer.inference.session import Session
from ringformer.inference.text_generator import TextGenerator


class Chat:
    """A conversation that keeps its cache: each turn reads only the new tokens.

    The cache holds exactly the tokens of the conversation as the chat template renders it. If the rendered tokens do
    not begin with the cached ones, the conversation is reread from the beginning and the answer sets `began_anew`. This
    happens when a template rewrites earlier turns, or when the model spelled an answer with tokens that the tokenizer
    would not choose. It also happens when the cache has no room left because turns of odd lengths left slots empty.

    Args:
      generator: the model that answers.
      system: the system message; None: the template's default, if it has one.
    """

    def __init__(self, generator: TextGenerator, system: str | None = None):
        self.messages: list[Message] = [] if system is None else [Message("system", system)]
        """Conversation so far; the next `ask` appends the last answer, as far as it was generated."""
        self._generator = generator
        self._session: Session | None = None
        self._cached: list[int] = []
        self._last: tuple[Answer, ChatPrompt] | None = None

    def ask(
        self, question: str, *, max_new_tokens: int, sampling: Sampling = Sampling(), stop: Sequence[str] = ()
    ) -> Answer:
        """Answer a question, in pieces. The part of the previous answer that was consumed joins the conversation.

        Raises ValueError as `TextGenerator.stream` does; the conversation is then unchanged.
        """
        self._settle()
        generator, messages = self._generator, [*self.messages, Message("user", question)]
        prompt = generator.text.encode_chat(messages)
        generator.check([prompt], max_new_tokens, sampling, stop)
        session, cached = self._session, self._cached
        self._session = None  # until the answer is there
        answer = None
        if session is not None and session.lengths[0] == len(cached) and prompt.ids[: len(cached)] == cached:
            with suppress(ValueError):  # turns of odd lengths may have left too few free slots at the end of the cache
                answer = self._answer(session, prompt, len(cached), max_new_tokens, sampling, stop)
        if answer is None:
            answer = self._answer(generator.generator.session(1), prompt, 0, max_new_tokens, sampling, stop)
            answer.began_anew = bool(cached)
        self.messages, self._last = messages, (answer, prompt)
        return answer

    def _answer(
        self,
        session: Session,
        prompt: ChatPrompt,
        cached: int,
        max_new_tokens: int,
        sampling: Sampling,
        stop: Sequence[str],
    ) -> Answer:
        """Answer a prompt whose first `cached` tokens the session already has."""
        new_ids = prompt.ids[cached:]
        session.append([new_ids])
        ends = self._generator.text.chat_end_tokens
        return self._generator.answer(session, prompt, len(new_ids), max_new_tokens, sampling, stop, ends)

    def _settle(self) -> None:
        """Add the consumed part of the last answer to the conversation and to the cached tokens."""
        if self._last is None:
            return
        (answer, prompt), self._last = self._last, None
        answer.close()
        self.messages.append(Message("assistant", answer.text.removesuffix(prompt.tail)))
        self._session = None if answer.interrupted else answer.session
        self._cached = prompt.ids + answer.ids
