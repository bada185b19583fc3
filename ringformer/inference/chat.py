"""A conversation with a model, whose cache is kept from turn to turn."""

from collections.abc import Sequence
from contextlib import suppress

from ringformer.data.chats.conversations import Message
from ringformer.inference.answers import Answer
from ringformer.inference.run_text import ChatPrompt
from ringformer.inference.sampling import Sampling
from ringformer.inference.session import Session
from ringformer.inference.text_generator import TextGenerator


class Chat:
    """A conversation whose cache is kept: of each turn only the new tokens are read.

    The cache holds exactly the tokens of the conversation as the chat template renders it. Where those do not begin
    with what was read and said so far, the conversation is read anew, and the answer says so in `began_anew`: templates
    may rewrite earlier turns, and a model may have spelled an answer otherwise than the tokenizer does. So it is where
    the cache has no room left beside what turns of odd lengths have left empty in it.

    Args:
      generator: what answers.
      system: the system message; None: the template's own, if it has one.
    """

    def __init__(self, generator: TextGenerator, system: str | None = None):
        self.messages: list[Message] = [] if system is None else [Message("system", system)]
        """The conversation so far; of the last answer `ask` adds what came of it when the next question is asked."""
        self._generator = generator
        self._session: Session | None = None
        self._cached: list[int] = []
        self._last: tuple[Answer, ChatPrompt] | None = None

    def ask(
        self, question: str, *, max_new_tokens: int, sampling: Sampling = Sampling(), stop: Sequence[str] = ()
    ) -> Answer:
        """The answer to a question, in pieces; what was taken of the last one is part of the conversation.

        Raises ValueError as `TextGenerator.stream` does; the conversation is then as it was.
        """
        self._settle()
        generator, messages = self._generator, [*self.messages, Message("user", question)]
        prompt = generator.text.encode_chat(messages)
        generator.check([prompt], max_new_tokens, sampling, stop)
        session, cached = self._session, self._cached
        self._session = None  # until the answer is there
        answer = None
        if session is not None and session.lengths[0] == len(cached) and prompt.ids[: len(cached)] == cached:
            with suppress(ValueError):  # there is room, but not behind what turns of odd lengths have left empty
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
        known: int,
        max_new_tokens: int,
        sampling: Sampling,
        stop: Sequence[str],
    ) -> Answer:
        """The answer to a prompt of which the session has the first `known` tokens."""
        new_ids = prompt.ids[known:]
        session.append([new_ids])
        ends = self._generator.text.chat_end_tokens
        return self._generator.answer(session, prompt, len(new_ids), max_new_tokens, sampling, stop, ends)

    def _settle(self) -> None:
        """Put what was taken of the last answer into the conversation and among the tokens of the cache."""
        if self._last is None:
            return
        (answer, prompt), self._last = self._last, None
        answer.close()
        self.messages.append(Message("assistant", answer.text.removesuffix(prompt.tail)))
        self._session = None if answer.interrupted else answer.session
        self._cached = prompt.ids + answer.ids
