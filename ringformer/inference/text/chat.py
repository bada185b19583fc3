"""A conversation with a model that keeps its cache between turns."""

from collections.abc import Sequence

from ringformer.data.chats.conversations import Message
from ringformer.inference.sampling import Sampling
from ringformer.inference.text.answers import Answer
from ringformer.inference.text.text_generator import TextGenerator
from ringformer.inference.text.text_session import TextSession


class Chat:
    """A conversation that keeps its cache. Of each turn, it reads the conversation from the first token on that differs
    from those in the cache.

    These are the new tokens alone, unless a template rewrites earlier turns, an answer ended at a stop string, or the
    model spelled it with tokens that the tokenizer would not choose.

    Args:
      generator: the model that answers.
      system: the system message; None: the template's default, if it has one.
      session: a session to go on with; None: an empty one. begin: text with which the first question begins.
    """

    def __init__(
        self,
        generator: TextGenerator,
        system: str | None = None,
        session: TextSession | None = None,
        begin: str = "",
    ):
        self.messages: list[Message] = [] if system is None else [Message("system", system)]
        """Conversation so far. The last answer is not included: the next `ask` first appends the part of it that was
        generated."""
        self._generator = generator
        self._begin = begin
        self._session = session or generator.session()
        self._last: Answer | None = None

    def ask(
        self, question: str, *, max_new_tokens: int, sampling: Sampling = Sampling(), stop: Sequence[str] = ()
    ) -> Answer:
        """Answer a question in pieces. The part of the previous answer that was consumed becomes part of the
        conversation.

        Raises ValueError as `TextGenerator.stream` does; the conversation is then unchanged.
        """
        generator = self._generator
        messages = [*self.messages]
        last = self._last
        if last is not None:
            last.close()
            messages.append(Message("assistant", last.text.removesuffix(last.prompt.tail)))
        messages.append(Message("user", question if last else self._begin + question))
        prompt = generator.text.encode_chat(messages)
        generator.check([prompt], max_new_tokens, stop)
        self._last = self._session.answer(prompt, max_new_tokens, sampling, stop)
        self.messages = messages
        return self._last
