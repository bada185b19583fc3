"""The text of a row while its tokens are generated."""

from collections.abc import Iterator, Sequence

from ringformer.data.tokenizers.base import Tokenizer
from ringformer.inference.run_text import ChatPrompt
from ringformer.inference.session import Session
from ringformer.inference.text_stream import StopStrings, TextStream


class RowText:
    """The text of a row's tokens, without the end token, the template's text before the answer, and anything from a
    stop string on."""

    def __init__(self, tokenizer: Tokenizer, prompt: ChatPrompt, ends: frozenset[int], stop: Sequence[str]):
        self._stream, self._ends = TextStream(tokenizer, prompt.ids), ends
        self._stops = StopStrings(stop)
        self._lead, self._begin = prompt.lead, ""

    @property
    def stopped(self) -> bool:
        return self._stops.met

    def push(self, token: int) -> str:
        return "" if token in self._ends else self._stops.push(self._without_lead(self._stream.push(token)))

    def close(self) -> str:
        rest = self._begin + self._stream.close()
        return self._stops.push(rest) + self._stops.close()

    def _without_lead(self, piece: str) -> str:
        if not self._lead:
            return piece
        text = self._begin + piece
        if len(text) < len(self._lead) and self._lead.startswith(text):
            self._begin = text
            return ""
        lead, self._lead, self._begin = self._lead, "", ""
        return text.removeprefix(lead)


class Answer(Iterator[str]):
    """One row's text in pieces. To stop early, call `close` or just stop iterating."""

    def __init__(self, session: Session, steps: Iterator[list[int | None]], text: RowText, prompt_tokens: int):
        self.session = session
        self.prompt_tokens = prompt_tokens
        """Tokens of the prompt that were read for this answer; in a chat, only those that were not in the cache."""
        self.ids: list[int] = []
        """Tokens so far, including the end token."""
        self.text = ""
        """Text of the pieces so far."""
        self.interrupted = False
        """True after an exception between two tokens; the contents of the session are then undefined."""
        self.began_anew = False
        """True if a chat had to reread its conversation from the beginning (`Chat.ask`)."""
        self._steps, self._text, self._closed = steps, text, False

    def __next__(self) -> str:
        while not self._closed:
            try:
                step = next(self._steps, None)
            except BaseException:
                self.interrupted = self._closed = True
                raise
            if step is None:
                self._closed = True
                piece = self._text.close()
            elif (token := step[0]) is not None:
                self.ids.append(token)
                piece = self._text.push(token)
                if self._text.stopped:
                    self.close()
            else:
                piece = ""
            self.text += piece
            if piece:
                return piece
        raise StopIteration

    def close(self) -> None:
        """Stop asking for tokens; the session can be used again."""
        self._closed = True
        if hasattr(self._steps, "close"):
            self._steps.close()
