"""`ringformer train`."""

import argparse
import signal
import sys
from collections.abc import Callable


def add_train(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Arguments of `ringformer train`."""
    parser.description = (
        "Train a model, or go on with a run: a run_dir that holds checkpoints is resumed, of a config with stages "
        "where it stopped. Every key of the config is a flag, --config.KEY=VALUE; they stand below."
    )
    parser.set_defaults(overrides=[], more_help=_config_keys)
    parser.add_argument("--config", metavar="FILE", required=True, help="the config file, e.g. configs/quickstart.py")
    parser.add_argument("--stage", type=int, help="of a config with stages, train this one alone (1 is the first)")
    discovery = "on a TPU pod or under SLURM they find each other, elsewhere name the other three"
    parser.add_argument("--distributed", action="store_true", help=f"be one of many processes: {discovery}")
    parser.add_argument("--coordinator_address", help="HOST:PORT of process 0")
    parser.add_argument("--num_processes", type=int, help="how many they are")
    parser.add_argument("--process_id", type=int, help="which one this is, from 0")
    return _train


def _train(args: argparse.Namespace) -> int:
    from ringformer.train.config_parsing import load_config, parse_stages

    values = load_config(args.config, args.overrides)
    configs = parse_stages(values)
    if args.stage is not None and not values.stages:
        raise ValueError(f"--stage={args.stage}: the config has no stages")
    simulate_cpu_devices(configs[0].cpu_devices)
    if args.distributed:
        join_processes(args.coordinator_address, args.num_processes, args.process_id)
    elif args.coordinator_address or args.num_processes or args.process_id is not None:
        raise ValueError("--coordinator_address, --num_processes and --process_id need --distributed")
    from ringformer.train.context_stages import prepare_stages, train_stages
    from ringformer.train.loop import prepare, train
    from ringformer.train.preemption import Terminated

    try:
        if values.stages:
            train_stages(configs, prepare_stages(configs, args.stage))
        else:
            train(prepare(configs[0]))
    except Terminated as end:
        print(f"ringformer train: {end}", file=sys.stderr)
        return 128 + signal.SIGTERM
    return 0


def simulate_cpu_devices(count: int) -> None:
    """Make JAX run on `count` simulated CPU devices (0: leave it as it is); before anything has asked it for one."""
    import jax

    if count:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)


def join_processes(coordinator_address: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Make this process one of many that train together; before anything has asked JAX for a device."""
    import jax

    named = (coordinator_address, num_processes, process_id)
    if any(x is not None for x in named) and None in named:
        raise ValueError("name all of --coordinator_address, --num_processes and --process_id, or none of them")
    try:
        jax.distributed.initialize(coordinator_address, num_processes, process_id)
    except ValueError as error:
        if coordinator_address:
            raise
        raise ValueError(
            f"--distributed: JAX finds no TPU pod and no SLURM job here ({error}); name --coordinator_address, "
            "--num_processes and --process_id"
        ) from None


def _config_keys() -> str:
    """The keys of a config with their defaults and meaning; those of the model are LLaMA's."""
    from ringformer.dataclass_flags import describe_fields
    from ringformer.models.llama_config import LlamaConfig
    from ringformer.ops.rope import RopeScaling
    from ringformer.train.config import Config, DataConfig, OptimizerConfig

    parts = {"": Config, "optimizer.": OptimizerConfig, "data.": DataConfig, "model.": LlamaConfig,
             "model.rope_scaling.": RopeScaling}  # fmt: skip
    nested = ("model", "data", "optimizer", "rope_scaling")
    said = [describe_fields(cls, f"--config.{part}", but=nested) for part, cls in parts.items()]
    return "\n".join(["config keys, with the defaults of what neither config nor preset says:", *said])
