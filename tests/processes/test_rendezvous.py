"""Processes meet, or say who is missing: threads with sockets of their own, and the command itself."""

import re
import socket
import subprocess
import sys
import threading
import time

import pytest
from jax._src.clusters import cloud_tpu_cluster

from ringformer.processes.rendezvous import Membership, ProcessesMissing, discover, known_places, meet, slurm_places
from ringformer.processes.slices import slices_of_run


def free_port() -> int:
    with socket.create_server(("", 0)) as free:
        return free.getsockname()[1]


def outcome(*calls, seconds=10.0, places=dict, slices=1) -> list[Exception | None]:
    """What each of these (index, count) hears when they meet at once."""
    address = f"localhost:{free_port()}"
    found: list[Exception | None] = [None] * len(calls)

    def one(i, index, count):
        try:
            meet(Membership(address, count, index, slices=slices), seconds, places)
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=one, args=(i, *call)) for i, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_come_and_the_port_is_free_again():
    port = free_port()
    members = [Membership(f"localhost:{port}", 4, i) for i in range(4)]
    for _ in range(2):
        threads = [threading.Thread(target=meet, args=(member, 10.0)) for member in members[1:]]
        for thread in threads:
            thread.start()
        meet(members[0], 10.0)
        for thread in threads:
            thread.join()
        socket.create_server(("", port)).close()


def test_who_did_not_come_is_named_to_all():
    began = time.monotonic()
    errors = outcome((0, 5), (2, 5), (3, 5), seconds=1.0, places=lambda: {4: "node7"})
    assert time.monotonic() - began < 4
    for error in errors:
        assert isinstance(error, ProcessesMissing)
        assert "processes 1, 4 (node7) of 5 failed to join localhost:" in str(error) and "within 1 s" in str(error)
        assert f"those on {socket.gethostname()} did" in str(error)


def test_who_did_not_come_is_named_by_slice_and_host():
    """Process 0 knows the names of its own slice's hosts alone."""
    errors = outcome((0, 4), seconds=0.5, places=lambda: {0: "10.0.0.1", 1: "10.0.0.2"}, slices=2)
    named = "processes 1 (slice 0, host 1, 10.0.0.2), 2 (slice 1, host 0), 3 (slice 1, host 1) of 4 failed to join"
    assert named in str(errors[0])
    (error,) = outcome((3, 4), seconds=0.5, slices=2)
    assert "process 0 (slice 0, host 0) at localhost:" in str(error)
    assert "did not answer process 3 (slice 1, host 1) on" in str(error)


@pytest.mark.parametrize(
    ("environment", "count", "slices"),
    [({}, 4, 1), ({"MEGASCALE_NUM_SLICES": "2"}, 4, 2), ({"MEGASCALE_NUM_SLICES": "2"}, 3, 1)]
    + [({"MEGASCALE_NUM_SLICES": wrong}, 4, 1) for wrong in ("x", "0", "")],
)
def test_slices_are_those_that_jax_reads(monkeypatch, environment, count, slices):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert discover("host:1", count, 0, 1.0).slices == slices


def test_slices_are_in_the_metadata_of_a_tpu_host(monkeypatch):
    for name in ("MEGASCALE_NUM_SLICES", "TPU_SKIP_MDS_QUERY"):
        monkeypatch.delenv(name, raising=False)
    metadata = {"tpu-env": "ZONE: 'z'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'"}
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: (metadata.get(key, ""), 200))
    assert slices_of_run(8) == 2


def test_another_config_is_refused_on_all():
    address = f"localhost:{free_port()}"
    asked = {"seed": 0, "optimizer.learning_rate": 1e-3, "mesh_dim": "1,1,1,-1"}
    found = {}

    def one(i):
        changed = {"seed": 1, "data.store": "x"} if i == 2 else {}
        try:
            meet(Membership(address, 3, i, asked={**asked, **changed}), 10.0)
        except ValueError as error:
            found[i] = str(error)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and len(set(found.values())) == 1
    assert "process 2 on " in found[0] and 'data.store "x", not set; seed 1, not 0; start all with the' in found[0]


def test_process_0_did_not_come():
    (error,) = outcome((1, 2), seconds=1.0)
    assert isinstance(error, ProcessesMissing) and re.search("process 0 at localhost:.* did not answer", str(error))


def test_a_process_that_comes_first_waits_for_process_0():
    address = f"localhost:{free_port()}"
    early = threading.Thread(target=meet, args=(Membership(address, 2, 1), 10.0))
    early.start()
    time.sleep(0.5)
    meet(Membership(address, 2, 0), 10.0)
    early.join()


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (((0, 3), (1, 3), (1, 3)), "two processes claim to be process 1"),
        (((0, 3), (0, 3)), "cannot listen at port"),
        (((0, 3), (1, 2)), "has --num_processes=2, process 0 on .* has 3"),
    ],
)
def test_processes_that_do_not_belong_together(calls, message):
    errors = outcome(*calls, seconds=2.0)
    assert any(error and re.search(message, str(error)) for error in errors), errors
    if "listen" not in message:
        assert all(isinstance(error, ValueError) for error in errors), errors


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", b'["ringformer 2", ["x", 2, "host", {}]]\n', b"\xff" * 5000]
)
def test_strangers_at_the_port_do_no_harm(said):
    port = free_port()
    members = [Membership(f"localhost:{port}", 2, i) for i in range(2)]
    first = threading.Thread(target=meet, args=(members[0], 20.0))
    first.start()
    time.sleep(0.2)
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        meet(members[1], 20.0)
    first.join()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (("host:1", None, 0), "pass all of"),
        (("host", 2, 0), "must be HOST:PORT"),
        (("host:1", 2, 2), "must lie between 0 and 1"),
    ],
)
def test_names_that_cannot_be(named, message):
    with pytest.raises(ValueError, match=message):
        discover(*named, 1.0)


def test_slurm_s_variables_are_jax_s_to_read(monkeypatch, tmp_path):
    job = {
        "SLURM_JOB_ID": "4096",
        "SLURM_STEP_NODELIST": "node[3-4]",
        "SLURM_NTASKS": "3",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
    }
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    tool = tmp_path / "scontrol"
    tool.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert discover(None, None, None, 1.0) == Membership("node3:61440", 3, 2, [0])
    assert known_places(job) == {0: "node3", 1: "node3", 2: "node4"}
    assert slurm_places("node[3-4]", "1(x2)") == {0: "node3", 1: "node4"}


def test_the_command_ends_within_its_limit(tmp_path):
    """Two of four processes came: both name the others, with the exit code to start again on."""
    address = f"localhost:{free_port()}"
    command = [
        sys.executable,
        "-m",
        "ringformer.cli",
        "train",
        "--config=configs/quickstart.py",
        "--distributed",
        f"--coordinator_address={address}",
        "--num_processes=4",
        f"--config.run_dir={tmp_path}/run",
        "--config.handshake_seconds=10",
    ]
    processes = [subprocess.Popen([*command, f"--process_id={i}"], stderr=subprocess.PIPE, text=True) for i in (0, 2)]
    said = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [76, 76]
    for i, text in zip((0, 2), said, strict=True):
        assert f"process {i} of 4: processes 1, 3 of 4 failed to join {address} within 10 s" in text
        assert len(text.strip().splitlines()) == 1, text
