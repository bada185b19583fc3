"""Rendezvous of a run's processes: either all meet, or they report within a time limit which of them are missing.

It precedes JAX's own start, which would wait silently and then abort in C++. Process 0 listens at the coordinator's
address. The others connect and send their numbers, and process 0 answers with the list of those that are missing. Then
the port is free for JAX.
"""

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ringformer.files.json_text import parse_json
from ringformer.processes.slices import process_label, slices_of_run

LAST_PORT = 2**16 - 1
MOST_PROCESSES = 100_000
"""Most processes of a run: process 0 keeps a connection to each of the others."""

_GREETING = "ringformer 2"
"""First value of every message. It distinguishes a process of a run from an unrelated program that connects to the
port."""
_LATECOMERS = 5.0
"""Seconds that process 0 still waits for other processes after it has refused one, so that these learn of the refusal
too."""


@dataclass(frozen=True)
class Membership:
    """Place of this process among the processes of a run, and the address at which they meet."""

    address: str
    """HOST:PORT of process 0."""
    count: int
    index: int
    local_devices: Sequence[int] | None = None
    """Devices of this host that belong to this process; None: all of them."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Options of the command and its software (`software.py`), by key; they must be the same on all processes."""
    slices: int = 1
    """TPU slices that the processes are on: each has equally many, and their numbers follow each other."""

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}, meeting at {self.address}"

    def label(self, index: int, *more: str) -> str:
        """Return what messages call a process of this run, and `more` about it (`slices.py`)."""
        return process_label(index, self.count, self.slices, *more)


class ProcessesMissing(Exception):
    """Some processes failed to join in time."""


def discover(address: str | None, count: int | None, index: int | None, seconds: float) -> Membership:
    """Return the place of this process: the given one or, if none is given, the one that JAX detects in a TPU pod, a
    SLURM job, Open MPI or Kubernetes.

    Raises ValueError if the place is only partly given, cannot be detected, or is invalid.
    """
    from jax._src.clusters import ClusterEnv  # JAX's own discovery; jax.distributed.initialize asks the same

    devices = None
    if address is None or count is None or index is None:
        if (address, count, index) != (None, None, None):
            raise ValueError("pass all of --coordinator_address, --num_processes and --process_id, or none of them")
        address, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, max(1, round(seconds))
        )
        if address is None or count is None or index is None:
            raise ValueError(
                "--distributed: JAX detects no TPU pod and no SLURM job here; pass --coordinator_address, "
                "--num_processes and --process_id"
            )
    port = re.fullmatch(r".+:([0-9]{1,5})", address)
    if port is None or not 1 <= int(port[1]) <= LAST_PORT:
        raise ValueError(f"--coordinator_address={address} must be HOST:PORT, with a port from 1 to {LAST_PORT}")
    if count > MOST_PROCESSES:
        raise ValueError(
            f"--num_processes={count} must be at most {MOST_PROCESSES:,}: give the number of processes of this run"
        )
    if not 0 <= index < count:
        raise ValueError(f"--process_id={index} must lie between 0 and {count - 1}, since --num_processes={count}")
    return Membership(address, count, index, devices, slices=slices_of_run(count))


def start_jax(member: Membership, seconds: float) -> None:
    """Connect JAX to the other processes. Call this after all have met, and before JAX has a device."""
    import jax

    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    jax.distributed.initialize(
        member.address,
        member.count,
        member.index,
        member.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(60, round(seconds)),
        shutdown_timeout_seconds=60,
    )


def meet(member: Membership, seconds: float, places: Callable[[], Mapping[int, str]] = dict) -> None:
    """Wait until all processes have come. `places` returns the known hosts of the processes that should come.

    Raises:
      ProcessesMissing: some failed to join within `seconds`; the message names them.
      ValueError: two processes came with the same number, or a process came with another number of processes, other
        options or other software.
      OSError: the port is taken.
    """
    if member.count == 1:
        return
    if member.index == 0:
        _receive(member, seconds, places)
    else:
        _come(member, seconds)


def _receive(member: Membership, seconds: float, places: Callable[[], Mapping[int, str]]) -> None:
    port = int(member.address.rpartition(":")[2])
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=member.count)
    except OSError as error:
        raise OSError(
            f"process 0 cannot listen at port {port}: {error.strerror}; is another run still using it?"
        ) from None
    peers: list[socket.socket] = []
    came = {0: _here()}
    refusal = ""
    missing = ""
    end = time.monotonic() + seconds
    with closing(server):
        while len(peers) < member.count - 1 and (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                peer, _ = server.accept()
            except TimeoutError:
                break
            try:
                process, processes, place, asked = _hear(peer, min(5.0, left))
                newcomer = _Newcomer(int(process), int(processes), str(place), dict(asked))
            except (OSError, ValueError, TypeError):  # a stranger
                peer.close()
                continue
            peers.append(peer)
            if not refusal:
                refusal = _refusal(member, newcomer, came)
                came[newcomer.process] = newcomer.place
                if refusal:
                    end = min(end, time.monotonic() + _LATECOMERS)
    if not refusal and len(came) < member.count:
        missing = _missing(member, seconds, places(), came)
    _answer(peers, [refusal, missing])
    _raise(refusal, missing)


class _Newcomer(NamedTuple):
    """Message of a process when it connects."""

    process: int
    processes: int
    place: str
    asked: Mapping[str, Any]


def _refusal(member: Membership, newcomer: _Newcomer, came: Mapping[int, str]) -> str:
    """Return the reason why a process cannot join the run, or "" if it can. `came`: the hosts of the processes that
    came before it."""
    process, processes, place, asked = newcomer
    if processes != member.count:
        return (
            f"a process on {place} has --num_processes={processes}, process 0 on {_here()} has {member.count}: "
            "start all with the same number"
        )
    if differs := _differences(member.asked, asked):
        return (
            f"process {member.label(process)} on {place} was started otherwise than process {member.label(0)} on "
            f"{_here()}: {differs}; start all with the same config, software and environment"
        )
    if process in came:
        return f"two processes claim to be process {member.label(process)}, on {came[process]} and on {place}"
    return ""


def _come(member: Membership, seconds: float) -> None:
    host, _, port = member.address.rpartition(":")
    end = time.monotonic() + seconds
    why = "it does not listen"
    while (left := end - time.monotonic()) > 0:
        try:
            # Once this process is connected, process 0 enforces the time limit.
            with closing(socket.create_connection((host.strip("[]"), int(port)), timeout=left)) as peer:
                _say(peer, _Newcomer(member.index, member.count, _here(), member.asked))
                answer = _hear(peer, seconds + 10)
            if answer is not None:
                return _raise(*answer)
            why = "it ended during the rendezvous"
        except OSError as error:
            why = str(error)
        time.sleep(0.2)
    raise ProcessesMissing(
        f"process {member.label(0)} at {member.address} did not answer process {member.label(member.index)} on "
        f"{_here()} within {seconds:g} s ({why})"
    )


def _raise(refusal: str, missing: str) -> None:
    if refusal:
        raise ValueError(refusal)
    if missing:
        raise ProcessesMissing(missing)


def _answer(peers: list[socket.socket], answer: list[str]) -> None:
    """Send the answer to all peers, and wait until each has closed its end: only then can JAX listen on the port
    immediately."""
    for peer in peers:
        with suppress(OSError):
            _say(peer, answer)
            peer.shutdown(socket.SHUT_WR)
    for peer in peers:
        with suppress(OSError):
            peer.settimeout(2.0)
            peer.recv(1)
        peer.close()


def _say(peer: socket.socket, value: Any) -> None:
    peer.sendall(json.dumps([_GREETING, value]).encode() + b"\n")


def _hear(peer: socket.socket, seconds: float) -> Any:
    """Return the value that a peer sends; None if it sends no message of this protocol."""
    peer.settimeout(seconds)
    try:
        with peer.makefile() as lines:
            greeting, value = parse_json(lines.readline(2**20))
    except (ValueError, TypeError):
        return None
    return value if greeting == _GREETING else None


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return the first few keys that differ, with both values."""
    here = {key: json.dumps(value) for key, value in ours.items()}
    there = {key: json.dumps(value) for key, value in theirs.items()}
    keys = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
    shown = [f"{key} {there.get(key, 'not set')}, not {here.get(key, 'set')}" for key in keys[:5]]
    if len(keys) > 5:
        shown.append(f"and {len(keys) - 5} more")
    return "; ".join(shown)


def _here() -> str:
    return socket.gethostname()


def _missing(member: Membership, seconds: float, places: Mapping[int, str], came: Mapping[int, str]) -> str:
    """Name the processes that failed to join, with their hosts from `places`, and the hosts of those that joined."""
    missing = []
    for i in range(member.count):
        if i not in came:
            missing.append(member.label(i, places[i]) if i in places else member.label(i))
    shown = ", ".join(missing[:16])
    if len(missing) > 16:
        shown += f" and {len(missing) - 16} more"
    noun = "processes" if len(missing) > 1 else "process"
    return (
        f"{noun} {shown} of {member.count} failed to join {member.address} within {seconds:g} s; those on "
        f"{', '.join(sorted(set(came.values())))} did"
    )


def known_places(environment: Mapping[str, str] = os.environ) -> dict[int, str]:
    """Return the host that each process should be on, in a TPU pod or a SLURM job; an empty dict elsewhere. Of several
    slices, a host knows the hosts of its own; process 0, which asks, is in the first."""
    nodes = environment.get("SLURM_STEP_NODELIST")
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE")
    if nodes and tasks:
        return slurm_places(nodes, tasks)
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster

    for cluster in (GkeTpuCluster, GceTpuCluster):
        try:
            if cluster.is_env_present():
                return dict(enumerate(cluster._get_worker_list_in_slice()))
        except Exception:  # any error, e.g. of the metadata server: a name is only a hint
            return {}
    return {}


def slurm_places(nodes: str, tasks: str) -> dict[int, str]:
    """Return the node of each task, assuming blocks, SLURM's default order: "8(x2),4" means 8, 8 and 4 tasks.

    Empty without `scontrol`, which expands the list of nodes.
    """
    try:
        hostnames = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        counts += [int(count)] * int(times or 1)
    places: list[str] = []
    for node, tasks_there in zip(hostnames.stdout.split(), counts, strict=False):
        places += [node] * tasks_there
    return dict(enumerate(places))
