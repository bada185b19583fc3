"""Which process a note speaks of that another one left on a shared disk, and whether it is still there."""

import os
import socket
from pathlib import Path


def machine() -> str:
    """What two processes that can see each other's pids have in common, since this machine was started; empty where
    Linux does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def began(pid: int) -> str:
    """When a process of this machine began, in ticks since the machine did: a pid may come again. Empty if there is no
    such process, or it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *fields = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]
