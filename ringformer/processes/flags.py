"""The flags of a command that is one of several processes: --distributed and where they meet."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringformer.processes.rendezvous import Membership


def add_distributed_flags(parser: argparse.ArgumentParser) -> None:
    """--distributed, --coordinator_address, --num_processes and --process_id."""
    discovery = "on a TPU pod and under SLURM they find each other, elsewhere name the other three"
    parser.add_argument("--distributed", action="store_true", help=f"be one of many processes: {discovery}")
    parser.add_argument("--coordinator_address", help="HOST:PORT of process 0")
    parser.add_argument("--num_processes", type=int, help="how many they are")
    parser.add_argument("--process_id", type=int, help="which one this is, from 0")


def member_of(args: argparse.Namespace, seconds: float) -> "Membership | None":
    """Which of the processes this is; None without --distributed.

    Args:
      seconds: the longest that discovery may take.

    Raises ValueError if they are not told enough to meet.
    """
    if args.distributed:
        from ringformer.processes.rendezvous import discover

        return discover(args.coordinator_address, args.num_processes, args.process_id, seconds)
    if args.coordinator_address or args.num_processes or args.process_id is not None:
        raise ValueError("--coordinator_address, --num_processes and --process_id need --distributed")
    return None
