"""Messages between the processes of a run, through the key-value store of JAX's coordination service.

    alive/N      activity of process N, rewritten every second
    left/N       reason why process N ended early
    told/stop    reason for which one process asks all to stop
    told/verdict reason why the run ends: process 0 decides and all processes read it

Process 0 hosts the store. Every process makes two calls a second. Only process 0 reads the activities of all processes.
"""

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ringformer.processes.rendezvous import Membership
from ringformer.processes.stopping import LOST, StopReason
from ringformer.processes.watchdog import INTERVAL, Watchdog

SILENT = {"step": 15.0}
"""Seconds of silence after which a process counts as lost, by the name of its activity's time limit."""

SILENT_ELSE = 60.0
"""Seconds of silence that are allowed under other time limits, because tracing and reading may hold Python's global
lock."""

_ALSO_GONE = 0.8
"""Share of the allowed silence after which a process is named together with one that is lost: the same may have ended
both, such as the loss of a slice."""

_ROOM = "ringformer/"
_AGREE_SECONDS = 60
_GATHER_SECONDS = 3.0


class Verdict(NamedTuple):
    """Reason for the processes to end."""

    why: str
    code: int
    by_itself: bool = False
    """True if a process ended with its own error; the others may be about to fail with the same one."""


class _Alive(NamedTuple):
    """Activity of a process; see `Doing` and `Peers` for the fields."""

    number: int
    what: str
    limit: str
    place: str
    stalled: bool
    clock: float
    broken: bool


class Peers:
    """Connection to the other processes. It calls `judged(verdict)` and `requested(reason)` at most once each, in a
    thread."""

    request: StopReason | None = None
    """Reason to stop, to announce to all processes."""
    stalled = False
    """True after this process has exceeded a time limit."""
    broken = False
    """True after a collective of this process failed because it could not reach another process."""

    def __init__(
        self,
        client: Any,
        member: Membership,
        watchdog: Watchdog,
        judged: Callable[[Verdict], None],
        requested: Callable[[StopReason], None],
    ):
        self._client = client
        self._member = member
        self._index = member.index
        self._watchdog = watchdog
        self._judged = judged
        self._requested = requested
        self._place = f"{socket.gethostname()}, pid {os.getpid()}"
        self._attempt = 0
        self._seen: dict[int, tuple[_Alive, float]] = {}
        self._stalled_since: float | None = None
        self._closing = threading.Event()
        self.heard: float = watchdog.clock
        """Time at which the store last answered, by the watchdog's clock."""
        self._thread = threading.Thread(target=self._exchange, name="peers", daemon=True)
        self._thread.start()

    def left(self, why: str, code: int) -> None:
        """Report that this process ends with an error."""
        self._put(f"left/{self._index}", [why, code])

    def gather(self, mine: Any) -> list[Any]:
        """Return the values that all processes pass here, each in a thread; raises RuntimeError if one is missing."""
        self._attempt += 1
        room = f"gather-{self._attempt}/"
        self._put(f"{room}{self._index}", mine)
        self._client.wait_at_barrier(f"{_ROOM}{room}barrier", 1000 * _AGREE_SECONDS)
        return list(self._get(room).values())

    def close(self) -> None:
        """Stop exchanging messages."""
        self._closing.set()
        self._thread.join(5)

    def _exchange(self):
        request_known = False
        while not self._closing.is_set():
            try:
                self._put(f"alive/{self._index}", self._alive())
                shared = self._get("told/")
                self.heard = self._watchdog.clock
                if self.request is not None and "stop" not in shared:
                    self._put("told/stop", self.request, allow_overwrite=False)
                if self._index == 0 and "verdict" not in shared and (verdict := self._judge()):
                    self._put("told/verdict", verdict)
                    shared["verdict"] = verdict
                if "verdict" in shared:
                    return self._judged(Verdict(*shared["verdict"]))
                if "stop" in shared and not request_known:
                    request_known = True
                    reason = StopReason(*shared["stop"])
                    threading.Thread(target=self._requested, args=(reason,), daemon=True).start()
            except RuntimeError:
                # Another process announced a request first, or the store did not answer. If the store stays silent,
                # `Supervisor` ends this process.
                pass
            self._closing.wait(INTERVAL)

    def _alive(self) -> _Alive:
        return _Alive(*self._watchdog.doing, self._place, self.stalled, self._watchdog.clock, self.broken)

    def _judge(self) -> Verdict | None:
        for index, (why, code) in sorted(self._get("left/").items()):
            return Verdict(f"process {self._member.label(int(index))} ended: {why}", code, by_itself=True)
        now = self._watchdog.clock
        states = {int(i): _Alive(*state) for i, state in self._get("alive/").items()}
        # A broken collective shows that a process is gone: its last message may predate the step that it died in.
        broken = any(state.broken for state in states.values())
        silences: dict[int, float] = {}
        for i, state in sorted(states.items()):
            last, since = self._seen.get(i, (None, now))
            if state != last:
                self._seen[i] = state, now
            else:
                silences[i] = (now - since) / silent_limit("step" if broken else state.limit)
        if any(share > 1 for share in silences.values()):
            gone = [i for i, share in silences.items() if share > _ALSO_GONE]
            names = [self._name(i, states[i]) for i in gone]
            return lost(names, now - self._seen[gone[0]][1], f", since {states[gone[0]].what}")
        if any(state.stalled for state in states.values()):
            if self._stalled_since is None:
                self._stalled_since = now
            if now - self._stalled_since > _GATHER_SECONDS:  # until then, others may still finish theirs
                return Verdict(self._stalled(states), LOST)
        return None

    def _name(self, index: int, state: _Alive) -> str:
        return f"process {self._member.label(index, state.place)}"

    def _stalled(self, states: Mapping[int, _Alive]) -> str:
        """Name the processes that hold up the others, which are those with the fewest activities begun."""
        numbers = [state.number for state in states.values()]
        least = min(numbers)
        most = max(numbers)
        if least == most:
            return f"all {len(states)} processes stalled in {states[0].what}: none is behind the others"
        behind = []
        for i, state in sorted(states.items()):
            if state.number == least:
                behind.append(f"{self._name(i, state)} in {state.what}")
        ahead = next(state.what for state in states.values() if state.number == most)
        return f"{_first_four(behind)} stalled; the others are in {ahead}"

    def _put(self, key: str, value: Any, allow_overwrite: bool = True) -> None:
        self._client.key_value_set(_ROOM + key, json.dumps(value), allow_overwrite=allow_overwrite)

    def _get(self, room: str) -> dict[str, Any]:
        return {key.rpartition("/")[2]: json.loads(text) for key, text in self._client.key_value_dir_get(_ROOM + room)}


def silent_limit(limit: str) -> float:
    """Return the seconds of silence after which a process counts as lost, given the limit of its activity."""
    return SILENT.get(limit, SILENT_ELSE)


def lost(processes: list[str], silence: float, since: str = "") -> Verdict:
    """Return the verdict on processes that have been silent for `silence` seconds."""
    spoke = f"no message for {silence:.0f} s{since}"
    if len(processes) > 1:
        why = f"{_first_four(processes)} are lost: {spoke}; they died, are stopped or are cut off"
    else:
        why = f"{processes[0]} is lost: {spoke}; it died, is stopped or is cut off"
    return Verdict(why, LOST)


def _first_four(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
