"""`ringformer train`."""

import argparse
import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

from ringformer.processes.flags import add_distributed_flags, member_of

if TYPE_CHECKING:
    from ringformer.processes.supervisor import Supervisor

CONFIG_KEYS = "config_keys.txt"
"""File of this folder with the help of every config key. scripts/page_facts.py writes it: reading the keys from their
classes would import JAX, for which a help would take a second."""
EXIT_CODES = """exit codes:
  0    the run is finished
  1    the run failed: disk full, loss not finite, ...
  2    invalid request
  75   stopped by SIGTERM, SIGUSR1 or SIGHUP on any process, or by a failure of a host between two steps, and saved:
       the same command resumes the run
  76   a process stalled, died, failed to join or has no input: the same command resumes the run from the latest save
  130  stopped by Ctrl-C, and saved; a second Ctrl-C exits at once without saving"""


def add_train(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the arguments of `ringformer train`."""
    parser.description = (
        "Train a model. A run_dir that holds checkpoints is resumed; a config with stages continues with the stage "
        "that was interrupted. Every key of the config is a flag, --config.KEY=VALUE, listed below."
    )
    parser.set_defaults(overrides=[], more_help=_more_help)
    parser.add_argument("--config", metavar="FILE", required=True, help="the config file, e.g. configs/quickstart.py")
    parser.add_argument("--stage", type=int, help="train only this stage of a config with stages (1 is the first)")
    allowed = "continue a run although these keys of its config changed; stage-2: begin that stage anew"
    parser.add_argument("--allow", metavar="KEY,...", default="", help=allowed)
    checked = "check that every stage could train on N devices, and train nothing; needs no such devices"
    parser.add_argument("--check_devices", metavar="N", type=int, help=checked)
    add_distributed_flags(parser)
    return _train


def _train(args: argparse.Namespace) -> int:
    if args.check_devices is not None:
        return _check_devices(args)
    from ringformer.processes.signals import SignalThread
    from ringformer.processes.stderr import LastingStream

    with redirect_stderr(LastingStream(sys.stderr)), SignalThread(_nothing_begun) as signals:  # during the imports
        from ringformer.processes.supervisor import Supervisor

        supervisor = Supervisor(signals)
        try:
            return _supervised(args, supervisor)
        except Exception as error:
            supervisor.failed(error)
            raise
        finally:
            supervisor.close()


def _check_devices(args: argparse.Namespace) -> int:
    """Check the stages of a config, or one of them, for a number of devices that need not be there."""
    from ringformer.runs.config_file import load_config, parse_stages
    from ringformer.train.checks import check_devices

    if args.check_devices < 1:
        raise ValueError(f"--check_devices={args.check_devices} must be at least 1")
    values = load_config(args.config, args.overrides)
    configs = parse_stages(values, inherit=False)
    if args.stage is not None:
        if not 1 <= args.stage <= len(values.stages):
            raise ValueError(f"--stage={args.stage} does not exist: the config has {len(values.stages)} stages")
        configs = configs[args.stage - 1 : args.stage]
    for config in configs:
        check_devices(config, args.check_devices)
    return 0


def _nothing_begun(number: int) -> None:
    """End the process at once."""
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    os.write(2, f"ringformer train: stopped by {name} before anything began\n".encode())  # in one piece
    os._exit(130 if number == signal.SIGINT else 75)


def _supervised(args: argparse.Namespace, supervisor: "Supervisor") -> int:
    import jax
    from flax.traverse_util import flatten_dict

    from ringformer.parallel.compilation_cache import keep_programs
    from ringformer.parallel.mesh import simulate_cpu_devices
    from ringformer.processes.software import software
    from ringformer.runs.config_file import load_config, parse_stages

    values = load_config(args.config, args.overrides)
    configs = parse_stages(values)
    for kind in ("startup", "compile", "step"):
        supervisor.watchdog.limits[kind] = 60 * max(getattr(config, f"{kind}_minutes") for config in configs)
    if args.stage is not None and not values.stages:
        raise ValueError(f"--stage={args.stage}: the config has no stages")
    simulate_cpu_devices(configs[0].cpu_devices)
    seconds = configs[0].handshake_seconds
    if (member := member_of(args, seconds)) is None:
        keep_programs()
    else:
        if not values.run_dir:
            raise ValueError("several processes need a common folder: set it, e.g. --config.run_dir=/shared/runs/mine")
        asked = {"--stage": args.stage, "--allow": args.allow}
        asked |= software() | flatten_dict(values.to_dict(), sep=".")
        supervisor.join(dataclasses.replace(member, asked=asked), seconds, Path(values.run_dir))
    from ringformer.processes.stopping import Stopped
    from ringformer.runs.folder import nothing_left
    from ringformer.train.loop import train
    from ringformer.train.prepare import prepare
    from ringformer.train.stages import prepare_stages, train_stages

    allow = [key for key in args.allow.split(",") if key]
    try:
        if values.stages:
            train_stages(configs, prepare_stages(configs, args.stage, allow), supervisor)
        elif (run := prepare(configs[0], allow)).checked.step and nothing_left(run.config):
            if jax.process_index() == 0:
                print(f"{run.run_dir} is finished, at step {run.config.steps}: there is nothing left to train")
        else:
            train(run, supervisor)
    except Stopped as end:
        if not args.distributed or supervisor.first:
            print(f"ringformer train: {end}", file=sys.stderr)
        return end.code
    return 0


def _more_help() -> str:
    """Return the exit codes, and the keys of a config with their defaults; the keys of the model are LLaMA's."""
    keys = Path(__file__).with_name(CONFIG_KEYS).read_text()
    heading = "config keys, with the defaults that apply where neither config nor preset sets them:"
    return f"{EXIT_CODES}\n\n{heading}\n{keys.rstrip()}"
