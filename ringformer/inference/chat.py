"""A conversation with a model, whose cache is kept from turn to turn."""

from collections.abc import Sequence

from ringformer.data.chats.conversations import Message
from ringformer.inference.answers import Answer
from ringformer.inference.generator import Session
from ringformer.inference.run_text import ChatPrompt
from ringformer.inference.sampling import Sampling
from ringformer.inference.text_generator import TextGenerator


class Chat:
    """A conversation whose cache is kept: of each turn only the new tokens are read.

    The cache holds exactly the tokens of the conversation as the chat template renders it. Where those do not begin
    with what was read and said so far, the conversation is read anew, and the answer says so in `began_anew`: templates
    may rewrite earlier turns, and a model may have spelled an answer otherwise than the tokenizer does.

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
        generator.check([prompt], max_new_tokens, stop)
        before, known = self._session, len(self._cached)
        keeps = before is not None and before.lengths[0] == known and prompt.ids[:known] == self._cached
        session = before if before is not None and keeps else generator.generator.session(1)
        new_ids = prompt.ids[known:] if keeps else prompt.ids
        self._session, self._cached = None, []  # until the answer is there
        session.append([new_ids])
        ends = generator.text.chat_end_tokens
        answer = generator.answer(session, prompt, len(new_ids), max_new_tokens, sampling, stop, ends)
        answer.began_anew = known > 0 and not keeps
        self.messages, self._last = messages, (answer, prompt)
        return answer

    def _settle(self) -> None:
        """Put what was taken of the last answer into the conversation and among the tokens of the cache."""
        if self._last is None:
            return
        (answer, prompt), self._last = self._last, None
        answer.close()
        self.messages.append(Message("assistant", answer.text.removesuffix(prompt.tail)))
        self._session = None if answer.interrupted else answer.session
        self._cached = prompt.ids + answer.ids
