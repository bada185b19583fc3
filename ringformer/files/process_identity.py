"""Identity of a process that left a note on a shared disk, by which others tell if it still runs."""

import os
import socket
from pathlib import Path


def machine() -> str:
    """Return an identity that processes share if they see each other's pids, until the machine restarts; empty where
    Linux does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def began(pid: int) -> str:
    """Return the start time of a process of this machine, in ticks since boot, since pids are reused. Empty if there is
    no such process, or it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]
