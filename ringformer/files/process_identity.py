"""Identity of a process that left a note on a shared disk. From it, other processes can tell whether that process still
runs."""

import os
import socket
from pathlib import Path


def machine() -> str:
    """Return an identity shared by all processes that see each other's pids, until the machine restarts; "" if there is
    no Linux /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def began(pid: int) -> str:
    """Return the start time of a process of this machine, in ticks since boot: it distinguishes processes that reuse a
    pid. Return "" if there is no such process, or if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    if state in "ZX":
        return ""
    return fields[18]
