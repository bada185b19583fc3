"""What the processes of a run tell one another, in the key-value store of JAX's coordination service.

    alive/N      what process N is doing, anew every second
    left/N       why process N ended before its time
    told/signal  the signal that one of them got
    told/verdict who ended the run, and why: process 0 finds it and all read it

Process 0 holds the store, so that every process makes two calls a second, and process 0 alone reads all of them.
"""

import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from ringformer.processes.watchdog import INTERVAL, Watchdog

SILENT = {"step": 15.0}
"""Seconds without a word after which a process counts as lost, by what it is doing."""

SILENT_ELSE = 60.0
"""The same for what may hold Python's lock: tracing, and reading."""

LOST = 76
"""The exit code of a run that lost a process: one died, stalled or did not come. The same command again goes on."""

_ROOM = "ringformer/"
_AGREE_SECONDS = 60
_GATHER_SECONDS = 3.0


class Verdict(NamedTuple):
    """Why the processes end."""

    why: str
    code: int
    by_itself: bool
    """Whether a process ended with an error of its own; the others may be about to fail of the same."""


class Peers:
    """The other processes of a run. Calls `judged(verdict)` and `signalled(number)`, each once, in a thread."""

    def __init__(
        self,
        client: Any,
        index: int,
        count: int,
        watchdog: Watchdog,
        judged: Callable[[Verdict], None],
        signalled: Callable[[int], None],
    ):
        self._client, self._index, self._count, self._watchdog = client, index, count, watchdog
        self._judged, self._signalled = judged, signalled
        self._request: int | None = None
        self._expired = False
        self.broken = False
        """Whether a collective of this process failed because another one could not be reached."""
        self._attempt = 0
        self._seen: dict[int, tuple[str, float]] = {}
        self._stalled_since: float | None = None
        self._closing = threading.Event()
        self.heard = watchdog.clock
        """The watchdog's clock when the store last answered."""
        self._thread = threading.Thread(target=self._exchange, name="peers", daemon=True)
        self._thread.start()

    def request(self, number: int) -> None:
        """Make all processes hear of a signal."""
        self._request = number

    def stalled(self) -> None:
        """Say that this process has been doing something for too long."""
        self._expired = True

    def left(self, why: str, code: int) -> None:
        """Say that this process ends with an error."""
        self._put(f"left/{self._index}", [why, code])

    def gather(self, mine: Any) -> list[Any]:
        """What each process says at this point, in a thread of each; raises if one of them does not."""
        self._attempt += 1
        room = f"gather-{self._attempt}/"
        self._put(f"{room}{self._index}", mine)
        self._client.wait_at_barrier(f"{_ROOM}{room}barrier", 1000 * _AGREE_SECONDS)
        return list(self._get(room).values())

    def close(self) -> None:
        """Say no more."""
        self._closing.set()
        self._thread.join(5)

    def _exchange(self):
        signal_known = False
        while not self._closing.is_set():
            try:
                self._put(f"alive/{self._index}", self._state())
                told = self._get("told/")
                self.heard = self._watchdog.clock
                if self._request is not None and "signal" not in told:
                    self._put_first("told/signal", self._request)
                if self._index == 0 and "verdict" not in told and (verdict := self._judge()):
                    self._put("told/verdict", verdict)
                    told["verdict"] = verdict
                if "verdict" in told:
                    return self._judged(Verdict(*told["verdict"]))
                if "signal" in told and not signal_known:
                    signal_known = True
                    threading.Thread(target=self._signalled, args=(told["signal"],), daemon=True).start()
            except RuntimeError:  # the store did not answer; of a silence that lasts the watchdog hears
                pass
            self._closing.wait(INTERVAL)

    def _state(self):
        doing = self._watchdog.doing
        place = f"{socket.gethostname()}, pid {os.getpid()}"
        return [doing.number, doing.what, doing.limit, place, self._expired, self._watchdog.clock, self.broken]

    def _judge(self) -> Verdict | None:
        for index, (why, code) in sorted(self._get("left/").items()):
            return Verdict(f"process {index} ended: {why}", code, by_itself=True)
        now, states = self._watchdog.clock, {int(i): state for i, state in self._get("alive/").items()}
        # Somebody is gone, whatever it was doing: its last word may be older than the step that it died in.
        limits = {i: silent_limit("step" if any(s[6] for s in states.values()) else s[2]) for i, s in states.items()}
        for i, state in sorted(states.items()):
            if (text := str(state)) != self._seen.get(i, ("", 0.0))[0]:
                self._seen[i] = text, now
            elif (silence := now - self._seen[i][1]) > limits[i]:
                return Verdict(
                    f"process {i} ({state[3]}) is lost: no word from it for {silence:.0f} s, since "
                    f"{state[1]}; it died, is stopped or cut off",
                    LOST,
                    by_itself=False,
                )
        if any(state[4] for state in states.values()):
            self._stalled_since = now if self._stalled_since is None else self._stalled_since
            if now - self._stalled_since > _GATHER_SECONDS:  # the others may have been on their way
                return Verdict(_stalled(states), LOST, by_itself=False)
        return None

    def _put(self, key, value):
        self._client.key_value_set(_ROOM + key, json.dumps(value), allow_overwrite=True)

    def _put_first(self, key, value):
        try:
            self._client.key_value_set(_ROOM + key, json.dumps(value))
        except RuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise

    def _get(self, room: str) -> dict[str, Any]:
        return {key.rpartition("/")[2]: json.loads(text) for key, text in self._client.key_value_dir_get(_ROOM + room)}


def silent_limit(limit: str) -> float:
    """After how many seconds a process that is doing this counts as lost."""
    return SILENT.get(limit, SILENT_ELSE)


def _stalled(states: dict[int, list]) -> str:
    """Which process holds up the others: the one that is behind."""
    least, most = min(state[0] for state in states.values()), max(state[0] for state in states.values())
    behind = [f"process {i} ({states[i][3]}) in {states[i][1]}" for i in sorted(states) if states[i][0] == least]
    if least == most:
        return f"all {len(states)} processes stalled in {states[0][1]}: none is behind the others"
    ahead = next(state[1] for state in states.values() if state[0] == most)
    more = f" and {len(behind) - 4} more" if len(behind) > 4 else ""
    return f"{', '.join(behind[:4])}{more} stalled; the others are in {ahead}"
