"""Flags of a command that runs as one process of several: --distributed, and the address at which the processes
meet."""

import argparse

from ringformer.cli.parser import Switch
from ringformer.processes.rendezvous import Membership, discover


def add_distributed_flags(parser: argparse.ArgumentParser) -> None:
    """Add --distributed, --coordinator_address, --num_processes and --process_id."""
    discovery = "JAX detects the others on a TPU pod and under SLURM; elsewhere also pass the three flags below"
    parser.add_argument("--distributed", action=Switch, help=f"run as one process of several. {discovery}")
    parser.add_argument("--coordinator_address", help="HOST:PORT of process 0")
    parser.add_argument("--num_processes", type=int, help="number of processes")
    parser.add_argument("--process_id", type=int, help="number of this process, from 0")


def member_of(args: argparse.Namespace, seconds: float) -> Membership | None:
    """Return the place of this process among the processes of the run; None without --distributed.

    Args:
      seconds: time limit for discovery.

    Raises ValueError if the flags are incomplete or contradict each other.
    """
    place = (args.coordinator_address, args.num_processes, args.process_id)
    if args.distributed:
        return discover(*place, seconds)
    if place != (None, None, None):
        raise ValueError("--coordinator_address, --num_processes and --process_id need --distributed")
    return None
