"""A conversation with a model that keeps its cache between turns."""

from collections.abc import Sequence
from contextlib import suppress

from ringformer.data.chats.conversations import Message
from ringformer.inference.sampling import Sampling
from ringformer.inference.text.answers import Answer
from ringformer.inference.text.text_generator import TextGenerator


class Chat:
    """A conversation that keeps its cache, so that each turn reads only the new tokens.

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
        """Conversation so far. The last answer is not included: the next `ask` first appends the part of it that was
        generated."""
        self._generator = generator
        self._last: Answer | None = None

    def ask(
        self, question: str, *, max_new_tokens: int, sampling: Sampling = Sampling(), stop: Sequence[str] = ()
    ) -> Answer:
        """Answer a question in pieces. The part of the previous answer that was consumed becomes part of the
        conversation.

        Raises ValueError as `TextGenerator.stream` does; the conversation is then unchanged.
        """
        generator, messages, last = self._generator, [*self.messages], self._last
        if last is not None:
            last.close()
            messages.append(Message("assistant", last.text.removesuffix(last.prompt.tail)))
        messages.append(Message("user", question))
        prompt = generator.text.encode_chat(messages)
        generator.check([prompt], max_new_tokens, stop)
        answer = None
        if last is not None and (cached := last.cached) and prompt.ids[: len(cached)] == cached:
            last.interrupted = True  # its session goes on to the next answer
            with suppress(ValueError):  # turns of odd lengths may have left too few free slots at the end of the cache
                answer = generator.answer(last.session, prompt, len(cached), max_new_tokens, sampling, stop)
        if answer is None:
            answer = generator.answer(generator.generator.session(1), prompt, 0, max_new_tokens, sampling, stop)
            answer.began_anew = last is not None
        self.messages, self._last = messages, answer
        return answer
