"""Who is lost, who stalls and who ended, judged by process 0 and heard by all: around a store in memory."""

import re
import threading
import time
from types import SimpleNamespace

import pytest

from ringformer.processes import peers, watchdog
from ringformer.processes.peers import Peers
from ringformer.processes.rendezvous import Membership
from ringformer.processes.stopping import LOST, StopReason
from ringformer.processes.watchdog import Watchdog


class Store:
    """What `Peers` uses of JAX's client, of `count` processes."""

    def __init__(self, count):
        self.values, self.lock, self.barrier = {}, threading.Lock(), threading.Barrier(count)

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.lock:
            if key in self.values and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value

    def key_value_dir_get(self, room):
        with self.lock:
            return [(key, value) for key, value in self.values.items() if key.startswith(room)]

    def wait_at_barrier(self, name, timeout):
        del name
        self.barrier.wait(timeout / 1000)


@pytest.fixture
def run(monkeypatch, request):
    """Three processes, or the parameter's (COUNT, SLICES), that look every 10 ms: `run.dogs`, `run.peers`, what each
    `judged` and was `requested`."""
    count, slices = getattr(request, "param", (3, 1))
    monkeypatch.setattr(watchdog, "INTERVAL", 0.01)
    monkeypatch.setattr(peers, "INTERVAL", 0.01)
    monkeypatch.setattr(peers, "SILENT", {"step": 0.5})
    monkeypatch.setattr(peers, "_GATHER_SECONDS", 0.1)

    dogs = [Watchdog(lambda _: None) for _ in range(count)]
    for dog in dogs:
        dog.begin("step 7", "step")
    store = Store(count)
    judged = [[] for _ in dogs]
    requested = [[] for _ in dogs]
    all_peers = []
    for i, dog in enumerate(dogs):
        member = Membership("", count, i, slices=slices)
        all_peers.append(Peers(store, member, dog, judged[i].append, requested[i].append))
    yield SimpleNamespace(dogs=dogs, peers=all_peers, judged=judged, requested=requested)
    for one in (*all_peers, *dogs):
        one.close()


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_all_is_well(run):
    time.sleep(1.5)
    assert run.judged == [[], [], []] and run.requested == [[], [], []]


def test_a_process_without_a_word_is_lost(run):
    run.peers[2].close()
    assert until(lambda: run.judged[0] and run.judged[1]), run.judged
    for (verdict,) in run.judged[:2]:
        assert verdict.code == LOST and verdict.why.startswith("process 2 (") and "since step 7" in verdict.why


@pytest.mark.parametrize("run", [(4, 2)], indirect=True)
def test_a_slice_that_is_lost_is_named_host_by_host(run):
    """Its processes said their last word at almost the same time; one is noticed first, and both are named."""
    run.peers[2].close()
    time.sleep(0.05)
    run.peers[3].close()
    assert until(lambda: run.judged[0] and run.judged[1]), run.judged
    for (verdict,) in run.judged[:2]:
        begin, _, end = verdict.why.partition(" are lost: no message for ")
        assert re.fullmatch(r"process 2 \(slice 1, host 0, .+\), process 3 \(slice 1, host 1, .+\)", begin), verdict.why
        assert end.endswith("since step 7; they died, are stopped or are cut off") and verdict.code == LOST


def test_a_process_that_compiles_may_be_silent(run):
    run.dogs[2].begin("the compilation", "compile")
    time.sleep(0.1)
    run.peers[2].close()
    time.sleep(1.2)
    assert run.judged == [[], [], []]


def test_a_process_is_lost_that_another_could_not_reach_though_it_last_said_that_it_compiles(run):
    """It died in a step, before it said that it was in one; the limit of a step holds, not at once."""
    run.dogs[2].begin("the compilation", "compile")
    time.sleep(0.1)
    run.peers[2].close()
    run.peers[1].broken = True
    time.sleep(0.2)
    assert run.judged == [[], [], []]
    assert until(lambda: run.judged[0] and run.judged[1], 2), run.judged
    assert all(verdict.why.startswith("process 2 (") and verdict.code == LOST for (verdict,) in run.judged[:2])


@pytest.mark.parametrize("reporter", [0, 1, 2])
def test_the_one_that_is_behind_stalls(run, reporter):
    """Whoever notices first."""
    for dog in run.dogs[:2]:
        dog.begin("step 8", "step")
    run.peers[reporter].stalled = True
    assert until(lambda: all(run.judged)), run.judged
    why = run.judged[1][0].why
    assert why.startswith("process 2 (") and "in step 7 stalled; the others are in step 8" in why


def test_nobody_is_behind(run):
    run.peers[1].stalled = True
    assert until(lambda: all(run.judged))
    assert run.judged[2][0].why == "all 3 processes stalled in step 7: none is behind the others"


def test_an_error_of_one_is_told_to_all(run):
    run.peers[1].left("no such store", 2)
    assert until(lambda: all(run.judged))
    assert run.judged[0] == run.judged[2] == [("process 1 ended: no such store", 2, True)]


def test_the_first_request_is_everyone_s(run):
    first = StopReason("the host of process 1 failed", 75)
    run.peers[1].request = first
    assert until(lambda: all(run.requested))
    run.peers[2].request = StopReason.by_signal(2)
    time.sleep(0.2)
    assert run.requested == [[first], [first], [first]]


def test_all_gather_what_each_says(run):
    found = [None] * 3

    def gather(i):
        found[i] = sorted(run.peers[i].gather([1, 10 + i]))

    threads = [threading.Thread(target=gather, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[[1, 10], [1, 11], [1, 12]]] * 3
