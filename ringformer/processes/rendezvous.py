"""Rendezvous of a run's processes: they meet, or report within a time limit which of them are missing.

It precedes JAX's own start, which waits silently and then aborts in C++: process 0 listens at the coordinator's
address, the others connect, each with its number, and it tells them who is missing. Then the port is free for JAX.
"""

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

_GREETING = "ringformer 1"
"""First value of every line: it tells a process of a run from a stranger that connects to the port."""
_LATECOMERS = 5.0
"""Seconds that process 0 waits for the others after it refused one, so that they learn of it too."""


@dataclass(frozen=True)
class Membership:
    """Place of this process among the processes, and where they meet."""

    address: str
    """HOST:PORT of process 0."""
    count: int
    index: int
    local_devices: list[int] | None = None
    """Devices of this host that belong to this process; None: all of them."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Options of the command by key, which must be the same on all processes."""

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}, meeting at {self.address}"


class ProcessesMissing(Exception):
    """Some processes did not come in time."""


def discover(address: str | None, count: int | None, index: int | None, seconds: float) -> Membership:
    """Return the given place; without one, the place that JAX detects: TPU pod, SLURM job, Open MPI or Kubernetes.

    Raises ValueError if the place is given in part, cannot be detected, or is invalid.
    """
    from jax._src.clusters import ClusterEnv  # JAX's own discovery; jax.distributed.initialize asks the same

    named = (address, count, index)
    devices = None
    if None in named:
        if any(x is not None for x in named):
            raise ValueError("pass all of --coordinator_address, --num_processes and --process_id, or none of them")
        address, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, max(1, round(seconds))
        )
        if address is None or count is None or index is None:
            raise ValueError(
                "--distributed: JAX detects no TPU pod and no SLURM job here; pass --coordinator_address, "
                "--num_processes and --process_id"
            )
    assert address is not None and count is not None and index is not None
    if not re.fullmatch(r".+:\d+", address):
        raise ValueError(f"--coordinator_address={address} must be HOST:PORT")
    if not 0 <= index < count:
        raise ValueError(f"--process_id={index} must lie between 0 and {count - 1}, since --num_processes={count}")
    return Membership(address, count, index, None if devices is None else list(devices))


def start_jax(member: Membership, seconds: float) -> None:
    """Connect JAX to the other processes; call it once all have come, and before JAX has a device."""
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
    """Return when all processes have come. `places` returns the host that each should be on, where it is known.

    Raises:
      ProcessesMissing: some did not come within `seconds`; the message names them.
      ValueError: two processes came with the same number, another number of processes or another config.
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
    try:
        server = socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=member.count
        )
    except OSError as error:
        raise OSError(
            f"process 0 cannot listen at port {port}: {error.strerror}; is another run still using it?"
        ) from None
    peers: list[socket.socket] = []
    came: dict[int, str] = {}
    end, wrong, refused = time.monotonic() + seconds, "", False
    with closing(server):
        while len(peers) < member.count - 1 and (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                peer, _ = server.accept()
            except TimeoutError:
                break
            newcomer = _read(peer, min(5.0, left))
            if newcomer is None:
                peer.close()
                continue
            peers.append(peer)
            if not refused:
                wrong = _refusal(member, newcomer, came)
                came[newcomer.index] = newcomer.place
                if wrong:
                    refused, end = True, min(end, time.monotonic() + _LATECOMERS)
    missing = [i for i in range(1, member.count) if i not in came]
    if not refused and missing:
        wrong = _missing(missing, member, seconds, places(), list(came.values()))
    _answer(peers, {"wrong": wrong, "refused": refused})
    _raise(wrong, refused)


def _refusal(member: Membership, newcomer: "_Newcomer", came: Mapping[int, str]) -> str:
    """Return why a process cannot join the run, or "" if it can. `came`: the hosts of those before it."""
    index, place = newcomer.index, newcomer.place
    if newcomer.count != member.count:
        return (
            f"a process on {place} has --num_processes={newcomer.count}, process 0 on {_here()} has {member.count}: "
            "start all with the same number"
        )
    if differs := _differences(member.asked, newcomer.asked):
        return (
            f"process {index} on {place} was started with another config than process 0 on {_here()}: "
            f"{differs}; start all with the same config"
        )
    if index == 0 or index in came:
        return f"two processes claim to be process {index}, on {came.get(index, _here())} and on {place}"
    return ""


def _come(member: Membership, seconds: float) -> None:
    host, _, port = member.address.rpartition(":")
    end, why = time.monotonic() + seconds, "it does not listen"
    while (left := end - time.monotonic()) > 0:
        try:
            # Once connected, process 0 keeps the time.
            with closing(socket.create_connection((host.strip("[]"), int(port)), timeout=left)) as peer:
                peer.settimeout(seconds + 10)
                us = {"index": member.index, "count": member.count, "asked": member.asked, "place": _here()}
                peer.sendall(_line(us))
                with peer.makefile() as lines:
                    answer = _parse(lines.readline())
            if answer is not None:
                return _raise(answer["wrong"], answer["refused"])
            why = "it ended during the rendezvous"
        except OSError as error:
            why = str(error)
        time.sleep(0.2)
    raise ProcessesMissing(
        f"process 0 at {member.address} did not answer process {member.index} on {_here()} within {seconds:g} s ({why})"
    )


def _raise(wrong: str, refused: bool) -> None:
    if wrong:
        raise ValueError(wrong) if refused else ProcessesMissing(wrong)


def _answer(peers: list[socket.socket], answer: dict[str, Any]) -> None:
    """Answer all and wait until each has closed its end: only then can JAX listen on the port at once."""
    for peer in peers:
        with suppress(OSError):
            peer.sendall(_line(answer))
            peer.shutdown(socket.SHUT_WR)
    for peer in peers:
        with suppress(OSError):
            peer.settimeout(2.0)
            peer.recv(1)
        peer.close()


@dataclass(frozen=True)
class _Newcomer:
    """Message of a process when it connects."""

    index: int
    count: int
    place: str
    asked: dict[str, Any]


def _read(peer: socket.socket, seconds: float) -> _Newcomer | None:
    peer.settimeout(seconds)
    try:
        with peer.makefile() as lines:
            message = _parse(lines.readline(2**20))
        if message is None:
            return None
        return _Newcomer(int(message["index"]), int(message["count"]), str(message["place"]), dict(message["asked"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return the first few keys that differ, with both values."""
    ours, theirs = ({key: json.dumps(value) for key, value in asked.items()} for asked in (ours, theirs))
    keys = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    shown = [f"{key} {theirs.get(key, 'not set')}, not {ours.get(key, 'set')}" for key in keys[:5]]
    return "; ".join(shown) + (f"; and {len(keys) - 5} more" if len(keys) > 5 else "")


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps([_GREETING, values]).encode() + b"\n"


def _parse(line: str) -> dict[str, Any] | None:
    try:
        greeting, values = json.loads(line)
    except (ValueError, TypeError):
        return None
    return values if greeting == _GREETING else None


def _here() -> str:
    return socket.gethostname()


def _missing(missing: list[int], member: Membership, seconds: float, places: Mapping[int, str], came: list[str]) -> str:
    named = [f"{i} ({places[i]})" if i in places else str(i) for i in missing]
    shown = ", ".join(named[:16]) + (f" and {len(named) - 16} more" if len(named) > 16 else "")
    plural = "es" if len(missing) > 1 else ""
    hosts = ", ".join(sorted({_here(), *came}))
    return (
        f"process{plural} {shown} of {member.count} did not come to {member.address} within {seconds:g} s; those "
        f"on {hosts} did"
    )


def known_places(environment: Mapping[str, str] = os.environ) -> dict[int, str]:
    """Return the host that each process should be on, in a TPU pod or a SLURM job; nothing elsewhere."""
    if "SLURM_STEP_NODELIST" in environment and "SLURM_STEP_TASKS_PER_NODE" in environment:
        return slurm_places(environment["SLURM_STEP_NODELIST"], environment["SLURM_STEP_TASKS_PER_NODE"])
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster, GkeTpuCluster

    for cluster in (GkeTpuCluster, GceTpuCluster):
        try:
            if cluster.is_env_present():
                return dict(enumerate(cluster._get_worker_list_in_slice()))
        except Exception:  # of any kind: a name is only a hint, and the metadata server may be the cause
            return {}
    return {}


def slurm_places(nodes: str, tasks: str) -> dict[int, str]:
    """Return the node of each task in blocks, SLURM's default order: "8(x2),4" are 8, 8 and 4 tasks.

    Empty without `scontrol`, which expands the list of nodes.
    """
    try:
        hostnames = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    counts = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks) for _ in range(int(times or 1))]
    return dict(enumerate(node for node, n in zip(hostnames.stdout.split(), counts, strict=False) for _ in range(n)))
