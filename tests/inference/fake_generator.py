"""A Generator that says what it is told to, and remembers what it was given to read."""

from types import SimpleNamespace


class FakeSession:
    """Follows the contract of a Session: `rows` are the tokens that each row has read and said."""

    def __init__(self, generator, rows: int):
        self.generator, self.rows, self.appended = generator, [[] for _ in range(rows)], []
        self._ended: set[int] = set()
        self.fits = generator.turns_that_fit
        self.timings = SimpleNamespace(prefill_tokens_per_second=1000.0, decode_tokens_per_second=10.0)

    @property
    def lengths(self):
        return [len(row) for row in self.rows]

    def append(self, rows):
        assert all(rows) and len(rows) == len(self.rows)
        if not self.fits:
            raise ValueError("turns of unequal length have left no room")
        self.fits -= 1
        self.appended.append([list(row) for row in rows])
        for row, new in zip(self.rows, rows, strict=True):
            row += new
            assert len(row) <= self.generator.max_length

    def truncate(self, lengths):
        assert all(0 <= length <= len(row) for length, row in zip(lengths, self.rows, strict=True))
        self.rows = [row[:length] for length, row in zip(lengths, self.rows, strict=True)]
        self.fits = self.generator.turns_that_fit if not any(lengths) else self.fits

    def end(self, row):
        self._ended.add(row)

    def decode(self, *, max_new_tokens, sampling, end_tokens=(), first_row=0):
        self.generator.samplings.append(sampling)
        self._ended = set()
        return self._steps(self.generator.script.pop(0), max_new_tokens, end_tokens)

    def _steps(self, said, max_new_tokens, end_tokens):
        for i in range(max_new_tokens):
            if len(self._ended) == len(self.rows):
                return
            if self.generator.interrupt:
                self.generator.interrupt = False
                raise KeyboardInterrupt
            step = [None if row in self._ended else ids[i] for row, ids in enumerate(said)]
            for row, token in enumerate(step):
                if token is not None:
                    self.rows[row].append(token)
                    if token in end_tokens:
                        self._ended.add(row)
            yield step


class FakeGenerator:
    """`script`: for each decode the ids of each row, as many as may be asked for."""

    def __init__(self, script, max_length=4096, *, dp=1, turns_that_fit=99):
        self.script, self.max_length, self.sessions, self.samplings = list(script), max_length, [], []
        self.interrupt, self.turns_that_fit = False, turns_that_fit
        self.can_fork = self.can_append = False
        self.mesh = SimpleNamespace(shape={"dp": dp})
        self.kernel = "kernel xla: there are kernels for TPU and GPU, none for cpu"

    def session(self, rows):
        self.sessions.append(FakeSession(self, rows))
        return self.sessions[-1]
