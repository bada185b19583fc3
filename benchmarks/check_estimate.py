"""An estimate against the devices that are here: a few real steps, their seconds and memory beside what was said.

    ringformer estimate --config=FILE --target=v5e-256 --json > estimate.json        # before renting, anywhere
    python benchmarks/check_estimate.py --config=FILE --estimate=estimate.json       # there, on every host

Five minutes: the run's own train step is compiled for these devices and executed on random tokens, without a store and
without a checkpoint. Exit code 0: what could be compared agrees; 1: something does not; 2: nothing of it could be
compared with these devices but the bytes of the arguments (a CPU, another chip, another number of devices).

What is compared: the bytes of state and batch on a device; the peak that the compiler here plans; the peak that the
runtime counted since the process began (`Device.memory_stats`; a runtime that counts none is named); the seconds of a
step, the median after one to warm up. What is not: loading, evaluation, saving, and networks under other people's load.
"""

import argparse
import json
import statistics
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from ringformer.runs.config import Config

GiB = 2**30
AGREES, DISAGREES, NOT_COMPARED = 0, 1, 2
"""Exit codes."""

MEMORY_TOLERANCE = 0.02
"""By how much more memory may be taken than was said. Less is no fault."""


class Measured(NamedTuple):
    """What these devices did; bytes of one device. None: the runtime does not say."""

    device_kind: str
    devices: int
    argument_bytes: int
    planned_bytes: int
    """What the compiler here placed on a device for the step: arguments, results and temporaries."""
    peak_bytes: int | None
    """The most that the runtime had given out on any device of this process, since it began."""
    step_seconds: list[float]
    loss: float


class Line(NamedTuple):
    """One comparison."""

    what: str
    said: str
    found: str
    verdict: str
    """Empty: it agrees."""


def measure(config: Config, steps: int) -> Measured:
    """Execute so many steps of a run's own train step, after one to warm up, on random tokens."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding

    from ringformer.data import Batch
    from ringformer.models.registry import check_mesh
    from ringformer.ops.layouts import permutation
    from ringformer.parallel.mesh import BATCH, check_batch, make_mesh
    from ringformer.parallel.parameters import abstract_model, weight_shardings
    from ringformer.train.optimizer import make_optimizer
    from ringformer.train.state import init_state, state_shardings
    from ringformer.train.step import make_train_step

    model, mesh = config.model, make_mesh(config.mesh_dim)
    check_mesh(model, mesh)
    check_batch(model.layout, model.ulysses, mesh, config.seq_len, config.batch_size, config.accumulate)
    weights = weight_shardings(model, mesh)
    optimizer = make_optimizer(config.optimizer, config.steps, abstract_model(model)[2], weights)
    shardings = state_shardings(weights, optimizer)
    order = permutation(model.layout, config.seq_len, mesh.shape["sp"] // model.ulysses)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (config.batch_size, config.seq_len + 1), np.int32)
    whole = np.broadcast_to(order.astype(np.int32), (config.batch_size, config.seq_len))
    trained = np.ones(whole.shape, bool)
    host = Batch(tokens[:, :-1][:, order], tokens[:, 1:][:, order], whole, np.ones_like(whole), trained, ~trained)
    sharding = NamedSharding(mesh, BATCH)
    batch = jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), host)
    state = init_state(model, optimizer, shardings, mesh, config.seed)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((state, batch)))
    step = (
        make_train_step(
            model, optimizer, shardings, mesh, clip_norm=config.optimizer.clip_norm, accumulate=config.accumulate
        )
        .lower(state, batch)
        .compile()
    )
    seconds, loss = [], float("nan")
    for _ in range(steps + 1):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        loss = float(metrics["loss"])  # waits for the step
        seconds.append(time.perf_counter() - start)
    counted = [(x.memory_stats() or {}).get("peak_bytes_in_use") for x in jax.local_devices()]
    plan = step.memory_analysis()
    return Measured(
        device_kind=jax.devices()[0].device_kind,
        devices=mesh.size,
        argument_bytes=held,
        planned_bytes=(
            plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes
        ),
        peak_bytes=max(known) if (known := [x for x in counted if x]) else None,
        step_seconds=seconds[1:],
        loss=loss,
    )


def compare(said: dict[str, Any], found: Measured, tolerance: float) -> tuple[list[Line], int]:
    """What an estimate (a JSON object of `ringformer estimate`) said beside what was found, and the exit code."""
    from ringformer.estimate.workloads.targets import find_target
    from ringformer.hardware import chip_of

    target, chip = find_target(said["target"]), chip_of(found.device_kind)
    devices = f"{target.num_devices} x {target.chip.name}", f"{found.devices} x {found.device_kind}"
    same_chip, same_number = chip is target.chip, found.devices == target.num_devices
    lines = [Line("devices", *devices, "" if same_chip and same_number else "NOT COMPARABLE")]
    arguments = said["argument_bytes"]
    if arguments and same_number:
        # A TPU pads arrays to whole tiles: small ones may take twice their bytes.
        excess = found.argument_bytes / arguments - 1
        lines.append(_line("arguments", _gib(arguments), _gib(found.argument_bytes), excess, excess > MEMORY_TOLERANCE))
    if not (same_chip and same_number):
        lines.append(Line("peak", _gib(said["peak_bytes"]), "", "not compared"))
        lines.append(Line("seconds a step", f"{said['step_seconds_model'] or 0:,.4g}", "", "not compared"))
        return lines, DISAGREES if any(line.verdict.startswith("MORE") for line in lines) else NOT_COMPARED
    for what, taken in (("peak, planned here", found.planned_bytes), ("peak, counted", found.peak_bytes)):
        if taken is None:
            lines.append(Line(what, _gib(said["peak_bytes"]), "this runtime counts none", "not compared"))
            continue
        excess = taken / said["peak_bytes"] - 1
        lines.append(_line(what, _gib(said["peak_bytes"]), _gib(taken), excess, excess > MEMORY_TOLERANCE))
    if seconds := said["step_seconds_model"]:
        median = statistics.median(found.step_seconds)
        excess = median / seconds - 1
        lines.append(_line("seconds a step", f"{seconds:,.4g}", f"{median:,.4g}", excess, abs(excess) > tolerance))
    agrees = all(line.verdict in ("", "not compared") for line in lines)
    return lines, AGREES if agrees else DISAGREES


def _line(what: str, said: str, found: str, excess: float, off: bool) -> Line:
    return Line(
        what, said, f"{found} ({1 + excess:.2f}x)", ("MORE THAN SAID" if excess > 0 else "LESS THAN SAID") * off
    )


def _gib(size: float) -> str:
    return f"{size / GiB:.3f} GiB"


def other_versions(said: dict[str, Any]) -> list[str]:
    """What the estimate was compiled with, and is installed here in another version: said, not refused."""
    lines = []
    for name, then in said.get("versions", {}).items():
        try:
            now = version(name)
        except PackageNotFoundError:
            now = "none"
        if then and name != "ringformer" and now != then:
            lines.append(f"{name}: the estimate is of {then}, here is {now}")
    return lines


def read_estimate(path: Path, stage: int | None) -> dict[str, Any]:
    """The estimate of a stage (1 is the first; without stages there is one) in a file of `ringformer estimate --json`.

    Raises ValueError for a file that is none.
    """
    try:
        estimates = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        said = estimates[(stage or 1) - 1]
        missing = {"target", "peak_bytes", "argument_bytes", "step_seconds_model"} - set(said)
    except (json.JSONDecodeError, IndexError, TypeError) as error:
        raise ValueError(
            f"{path} is no output of ringformer estimate --json with a stage {stage or 1}: {error}"
        ) from None
    if missing:
        raise ValueError(f"{path} has no {', '.join(sorted(missing))}: write it with ringformer estimate --json")
    return said


def check_shape(said: dict[str, Any], config: Config) -> None:
    """Raise ValueError if the estimate is of another step than the config's."""
    for name in ("seq_len", "batch_size", "mesh_dim"):
        if (then := said.get(name)) is not None and then != getattr(config, name):
            raise ValueError(
                f"the estimate is of {name}={then}, the config has {getattr(config, name)}: estimate again"
            )


def main() -> int:
    """Print the comparison, and return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", required=True, help="the config file; --config.KEY=VALUE overrides follow")
    parser.add_argument("--estimate", type=Path, required=True, help="output of ringformer estimate --json")
    parser.add_argument("--stage", type=int, help="of a config with stages, which (1 is the first)")
    parser.add_argument("--steps", type=int, default=5, help="to measure, after one to warm up")
    parser.add_argument("--tolerance", type=float, default=0.25, help="share by which seconds may differ")
    parser.add_argument("--distributed", action="store_true", help="be one of the processes of a pod or a SLURM job")
    args, overrides = parser.parse_known_args()
    if args.steps < 1 or not args.tolerance > 0 or (args.stage is not None and args.stage < 1):
        parser.error("--steps and --stage must be at least 1, --tolerance positive")
    from ringformer.parallel.mesh import simulate_cpu_devices
    from ringformer.runs.config_file import load_config, parse_stages

    said = read_estimate(args.estimate, args.stage)
    configs = parse_stages(load_config(args.config, overrides), inherit=False)
    if (args.stage or 1) > len(configs):
        parser.error(f"--stage={args.stage}: the config has {len(configs)}")
    config = configs[(args.stage or 1) - 1]
    check_shape(said, config)
    simulate_cpu_devices(config.cpu_devices)
    if args.distributed:
        from ringformer.processes.rendezvous import discover, known_places, meet, start_jax

        member = discover(None, None, None, config.handshake_seconds)
        meet(member, config.handshake_seconds, known_places)
        start_jax(member, config.handshake_seconds)
    found = measure(config, args.steps)
    lines, code = compare(said, found, args.tolerance)
    import jax

    if jax.process_index() == 0:
        report(said, found, lines, code)
    return code


def report(said: dict[str, Any], found: Measured, lines: list[Line], code: int) -> None:
    """Print the table for a person."""
    print(f"{'':22}{'said':>26}{'found':>34}")
    for line in lines:
        print(f"{line.what:22}{line.said:>26}{line.found:>34}  {line.verdict}")
    taken = ", ".join(f"{seconds:,.3g}" for seconds in found.step_seconds)
    source = said.get("seconds_source") or "nobody says how"
    print(f"steps: {taken} s; loss {found.loss:.3f}; the estimate's seconds are modelled: {source}")
    for text in other_versions(said):
        print(text)
    print(
        {
            AGREES: "AGREES",
            DISAGREES: "DISAGREES",
            NOT_COMPARED: "NOT COMPARED: these are not the devices of the estimate",
        }[code]
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"check_estimate: {error}")
