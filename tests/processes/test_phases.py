"""Lines of the phases of a run, with a clock of the test's own."""

import time
from types import SimpleNamespace

import pytest

from ringformer.processes import supervisor
from ringformer.processes.stopping import Phase
from ringformer.processes.supervisor import Supervisor


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now.seconds, sleep=time.sleep))
    return now


def test_each_long_phase_has_a_line_with_its_seconds(clock, capsys):
    supervised = Supervisor(SimpleNamespace(heard=None))
    phases = [
        (3, Phase.STARTUP, None),
        (12, Phase.EVALUATION, 0),
        (40, Phase.COMPILATION, 1),
        (104.4, Phase.FIRST_STEP, 1),
        (9, Phase.BATCH, 2),
        (8, Phase.STEP, 2),
        (7, Phase.STORE_CHECK, 2),
        (0.2, Phase.SAVE, 2),
        (5, Phase.BATCH, 3),
        (2, Phase.SAVE, 3),
        (0.4, Phase.BATCH, 4),
    ]
    try:
        for seconds, phase, step in phases:
            clock.seconds += seconds
            supervised.enter(phase, step)
    finally:
        supervised.watchdog.close()
    assert capsys.readouterr().err.splitlines() == [
        "the preparation took 3 s",
        "the start-up took 12 s",
        "the evaluation of step 0 took 40 s; the compilation of step 1 begins",
        "the compilation of step 1 took 104 s",
        "the save of step 2 took 5 s",
    ]


def test_other_processes_than_the_first_are_silent(clock, capsys):
    supervised = Supervisor(SimpleNamespace(heard=None))
    supervised.first = False
    try:
        for phase in (Phase.STARTUP, Phase.COMPILATION, Phase.FIRST_STEP):
            clock.seconds += 10
            supervised.enter(phase, 1)
    finally:
        supervised.watchdog.close()
    assert not capsys.readouterr().err
