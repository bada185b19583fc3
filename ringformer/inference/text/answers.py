"""Text of a row while the row's tokens are generated."""

from collections.abc import Generator, Iterator, Sequence

from ringformer.data.tokenizers.base import Tokenizer
from ringformer.inference.session import Session
from ringformer.inference.text.run_text import Prompt
from ringformer.inference.text.text_stream import StopStrings, TextStream


class RowText:
    """Text of a row's tokens. It excludes the end token, the template's text before the answer, and everything from a
    stop string on."""

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, stop: Sequence[str]):
        self._stream = TextStream(tokenizer, prompt.ids)
        self._ends = prompt.ends
        self.stops: StopStrings = StopStrings(stop)
        self.ids: list[int] = []
        """Tokens so far, including the end token."""
        self._lead = prompt.lead
        self._begin = ""

    def push(self, token: int) -> str:
        """Return the text that is final once `token` is known."""
        self.ids.append(token)
        return "" if token in self._ends else self.stops.push(self._without_lead(self._stream.push(token)))

    def close(self) -> str:
        """Return the rest of the text, when there are no more tokens."""
        return self.stops.push(self._begin + self._stream.close()) + self.stops.close()

    def _without_lead(self, piece: str) -> str:
        begin = self._begin + piece
        if len(begin) < len(self._lead) and self._lead.startswith(begin):
            self._begin = begin
            return ""
        lead = self._lead
        self._lead = ""
        self._begin = ""
        return begin.removeprefix(lead)


def row_pieces(
    session: Session, steps: Iterator[list[int | None]], rows: Sequence[RowText]
) -> Generator[list[str], None, None]:
    """Yield the next text of each row after every step of a decode, and finally the rest of each text. A row ends at a
    stop string."""
    for step in steps:
        pieces = ["" if token is None else row.push(token) for row, token in zip(rows, step, strict=False)]
        for number, row in enumerate(rows):
            if row.stops.met:
                session.end(number)
        yield pieces
    yield [row.close() for row in rows]


class Answer(Iterator[str]):
    """One row's text in pieces. To stop early, call `close` or just stop iterating."""

    def __init__(self, session: Session, prompt: Prompt, cached: int, steps: Iterator[list[int | None]], row: RowText):
        self.session = session
        self.prompt = prompt
        self.prompt_tokens: int = len(prompt.ids) - cached
        """Number of prompt tokens that were read for this answer, those that were not in the cache."""
        self.ids: list[int] = row.ids
        """Tokens so far, including the end token."""
        self.text: str = ""
        """Text of the pieces so far."""
        self.interrupted: bool = False
        """True after an exception between two tokens; the contents of the session are then undefined."""
        self._pieces = row_pieces(session, steps, [row])

    @property
    def cached(self) -> list[int]:
        """Tokens in the session's cache: the prompt and this answer; empty if the contents are undefined."""
        ids = self.prompt.ids + self.ids
        return ids if not self.interrupted and self.session.lengths[0] == len(ids) else []

    def __next__(self) -> str:
        piece = ""
        while not piece:
            try:
                (piece,) = next(self._pieces)
            except StopIteration:
                raise
            except BaseException:
                self.interrupted = True
                raise
            self.text += piece
        return piece

    def close(self) -> None:
        """Stop generating tokens; the session can then be used again."""
        self._pieces.close()
