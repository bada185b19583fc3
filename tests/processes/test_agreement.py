"""A signal that comes while the processes of a run begin to train: they agree first, and then all of them end.

The store of the other processes is the test's own, and answers when the test says so. Real processes are in
test_supervisor.py.
"""

import os
import signal
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from ringformer.processes.stopping import STOPPED, Stopped, StopReason
from ringformer.processes.supervisor import State, Supervisor

OTHER_STARTS = State(session=1, asks=0, phase="starting")
OTHER_TRAINS = State(session=0, asks=7, phase="training")


class Others:
    """Stands for `Peers`: the agreement lasts until `answer` is set."""

    def __init__(self, other: State):
        self.other = other
        self.asked, self.answer = threading.Event(), threading.Event()

    def gather(self, mine: State) -> list[State]:
        self.asked.set()
        assert self.answer.wait(10)
        return [mine, self.other]


class Ended(BaseException):
    """Raised instead of ending the process."""


@pytest.fixture
def ends(monkeypatch):
    """Exit codes with which the process would have ended."""
    codes = []

    def end(code):
        codes.append(code)
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    return codes


def agreement(supervised: Supervisor, others: Others) -> threading.Thread:
    """Begin the agreement in its thread, as `Peers` does."""
    supervised._peers = others
    supervised.first = False

    def agree():
        with suppress(Ended):
            supervised._stop_together(StopReason.by_signal(signal.SIGTERM))

    thread = threading.Thread(target=agree, daemon=True)
    thread.start()
    assert others.asked.wait(10)
    return thread


@pytest.fixture
def supervised():
    supervised = Supervisor(SimpleNamespace(heard=None))
    yield supervised
    supervised.watchdog.close()


def test_a_run_begins_only_after_the_agreement(supervised, ends):
    """A process that left before it would keep the others waiting in theirs: they hung for a minute."""
    others = Others(OTHER_STARTS)
    agreed = agreement(supervised, others)
    begun = threading.Event()

    def begin():
        with suppress(Stopped), supervised:  # here, unlike a process that has ended, the lock is free again
            begun.set()

    threading.Thread(target=begin, daemon=True).start()
    assert not begun.wait(0.2)
    others.answer.set()
    agreed.join(10)
    assert ends == [STOPPED]


def test_what_others_still_train_is_awaited_by_those_that_are_ahead(supervised, ends):
    """The last save of the run before is written first; the next run does not begin."""
    others = Others(OTHER_TRAINS)
    agreed = agreement(supervised, others)
    others.answer.set()
    agreed.join(10)
    assert not ends
    with pytest.raises(Stopped, match="nothing is lost"):
        supervised.__enter__()
