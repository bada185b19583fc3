"""What takes longer than its limit is noticed once; the stacks of all threads go to a file."""

import threading
import time

import pytest

from ringformer.processes import watchdog
from ringformer.processes.watchdog import Watchdog, dump_stacks


@pytest.fixture
def expired(monkeypatch):
    """A watchdog that looks every 10 ms, with limits of 0.2 s for a step; `found` is what expired."""
    monkeypatch.setattr(watchdog, "INTERVAL", 0.01)
    found = []
    dog = Watchdog(found.append)
    dog.limits = {"startup": 3600, "compile": 3600, "step": 0.2}
    yield dog, found
    dog.close()


def test_only_what_is_under_way_too_long_expires(expired):
    dog, found = expired
    time.sleep(0.5)
    assert not found, "the preparation has no limit"
    dog.begin("the compilation", "compile")
    time.sleep(0.5)
    assert not found
    for step in range(20):
        dog.begin(f"step {step}", "step")
        time.sleep(0.02)
    assert not found
    dog.begin("step 20", "step")
    time.sleep(0.5)
    assert [doing.what for doing in found] == ["step 20"], "said once"


def test_time_in_which_the_process_did_not_run_does_not_count(expired, monkeypatch):
    dog, found = expired
    dog.begin("step 1", "step")
    real, jump = time.monotonic, 0.0
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: real() + jump)
    jump = 3600.0  # stopped for an hour, and going on
    time.sleep(0.05)
    dog.begin("step 2", "step")
    assert not found


def test_stacks_name_what_each_thread_does(tmp_path):
    begun, end = threading.Event(), threading.Event()

    def stuck_in_the_reading_of_a_batch():
        begun.set()
        end.wait()

    thread = threading.Thread(target=stuck_in_the_reading_of_a_batch)
    thread.start()
    begun.wait()
    dump_stacks(tmp_path / "logs" / "process-3.txt", "why it was")
    end.set()
    thread.join()
    text = (tmp_path / "logs" / "process-3.txt").read_text()
    assert "why it was" in text and "stuck_in_the_reading_of_a_batch" in text
    assert "test_stacks_name_what_each_thread_does" in text
