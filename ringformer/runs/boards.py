"""Boards that show a run's metrics elsewhere: TensorBoard and Weights & Biases. None of them can end a run."""

import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ringformer.files.atomic import write_whole
from ringformer.files.json_text import parse_json
from ringformer.files.run_layout import CONFIG

FIRST_PAUSE = 10.0
LONGEST_PAUSE = 600.0
"""Seconds until a board that failed is tried again; they double from failure to failure."""


class Board(Protocol):
    """Place that shows the numbers of steps."""

    def write(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, run_dir: Path):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(run_dir))
        self.close: Callable[[], None] = self._writer.close

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write the numbers of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


class WeightsAndBiases:
    """Run in a Weights & Biases project, named after the training run's folder. A resumed training run continues the
    same Weights & Biases run, whose id is in the file `wandb_id`."""

    def __init__(self, project: str, run_dir: Path):
        import wandb

        run_dir = Path(run_dir)
        settings = parse_json((run_dir / CONFIG).read_text())
        kept = run_dir / "wandb_id"
        if not kept.is_file():
            write_whole(kept, uuid.uuid4().hex)
        self._run = wandb.init(
            project=project, name=run_dir.name, dir=str(run_dir), config=settings, id=kept.read_text(), resume="allow"
        )
        self.close: Callable[[], None] = self._run.finish

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write the numbers of a step."""
        self._run.log(values, step=step)


class GuardedBoard:
    """Board whose failures are told once, while the run goes on. Rows wait, and are written when it works again.

    Args:
      name: name of the board in warnings.
      open_board: function that opens it; it is called again after a failure.
      package: package that it needs.
      setting: setting of the config that asks for it.
      say: function that prints a line.

    Raises ValueError if the package is not installed.
    """

    def __init__(
        self, name: str, open_board: Callable[[], Board], package: str, setting: str, say: Callable[[str], None]
    ):
        self._name = name
        self._open = open_board
        self._say = say
        self._board: Board | None = None
        self._waiting = deque[tuple[int, dict[str, float]]]()
        self._pause = FIRST_PAUSE
        self._next_trial = 0.0
        self._is_told = False
        try:
            self._board = open_board()
        except ImportError:
            raise ValueError(f"{setting} needs the package {package}: pip install {package}") from None
        except Exception as error:
            self._failed(error)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write the numbers of a step, after those that wait."""
        self._waiting.append((step, values))
        if time.monotonic() >= self._next_trial:
            self._write_waiting()

    def close(self) -> None:
        """Write what waits, and close the board."""
        if self._waiting:
            self._write_waiting()
        try:
            if self._board is not None:
                self._board.close()
        except Exception as error:
            self._failed(error)
        if self._waiting:
            self._say(
                f"warning: {self._name} lacks {len(self._waiting):,} rows, from step {self._waiting[0][0]} on: "
                "metrics.jsonl has them"
            )

    def _write_waiting(self) -> None:
        try:
            if self._board is None:
                self._board = self._open()
            while self._waiting:
                self._board.write(*self._waiting[0])
                self._waiting.popleft()
        except Exception as error:
            self._failed(error)
        else:
            self._pause = FIRST_PAUSE

    def _failed(self, error: Exception) -> None:
        self._next_trial = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if not self._is_told:
            self._say(
                f"warning: {self._name} fails ({_described(error)}): the run goes on, metrics.jsonl has the rows, and "
                f"{self._name} is tried again"
            )
        self._is_told = True


def _described(error: Exception) -> str:
    lines = str(error).splitlines()
    first_line = f": {lines[0]}" if lines else ""
    return f"{type(error).__name__}{first_line}"
