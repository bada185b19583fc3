"""Seconds of a train step on TPU from machine code, which is generated only for the part that matters."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ringformer.estimate.compiled.dump import Compiled, CompilerFailure, Refusal
from ringformer.estimate.compiled.program_text import Instruction, Program
from ringformer.estimate.compiler.process import MACHINE_CODE, at_work, wait_for_schedule
from ringformer.estimate.compiler.program_estimate import Estimate
from ringformer.estimate.seconds.kernel_keys import KernelKeys
from ringformer.estimate.seconds.machine_code import dumped_kernels, grid_of, read_cycles
from ringformer.estimate.seconds.overlap import read_schedule
from ringformer.estimate.seconds.program_seconds import of_chunk_pairs
from ringformer.estimate.workloads.programs import ATTENTION
from ringformer.estimate.workloads.targets import Target, compiler_versions
from ringformer.estimate.workloads.training import Workload
from ringformer.files.json_text import parse_json

IDLE_SECONDS = 15.0
"""Seconds to wait for another kernel once the kernels with matrix products are there. After that, generation stops:
only the program around the kernels is left, which takes long."""


class NoMachineCode(CompilerFailure):
    """The compiler generates no machine code for a kernel, so the program does not compile, whatever its schedule
    shows."""

    meaning = ""


def with_machine_code(
    workload: Workload, estimate: Estimate, log: Callable[[str], None], part: str = ATTENTION
) -> Estimate:
    """Base the seconds of a scheduled program on the machine code of its chunk pairs.

    For a train step, `part` is one layer's attention; for any other program, it is the name of the whole program.

    Machine code that is not cached is generated, which takes about a minute. If the estimate is already based on the
    step's own machine code, its seconds stay, and the new seconds are reported beside them. Estimates for GPUs and for
    models without known parts do not change. If the compiler writes no machine code, the estimate does not change
    either, and the log says so. Raises NoMachineCode.
    """
    attends = workload.has_closed_forms and workload.model.attention != "vanilla"
    if workload.target.chip.kind != "tpu" or estimate.schedule is None or not attends:
        return estimate
    program = Program.parse(estimate.text)
    cache = KernelCache.of(workload.target)
    wanted = kernel_keys(program, of_chunk_pairs)
    cycles = cache.read()
    missing = {key: products for key, products in wanted.items() if key not in cycles}
    if any(missing.values()):  # not if only copies and sums are missing: their bytes suffice
        log("generating the machine code of a layer's attention, for its cycles; about a minute, once")
        try:
            generated = generate_cycles(workload, missing, part)
            cycles = cache.add({key: generated.get(key) for key in missing})
        except NoMachineCode:
            raise
        except CompilerFailure as failure:
            log(f"{failure}; the seconds are not based on machine code")
    counted = {}
    for key in wanted:
        count = cycles.get(key)
        if count is not None:
            counted[key] = count
    estimate = with_tried_kernels(workload, estimate)
    assert estimate.schedule is not None, "as above"
    schedule = read_schedule(estimate.text, estimate.schedule.rates, counted)
    if estimate.own_machine_code:
        return replace(estimate, by_parts=schedule)
    return replace(estimate, schedule=schedule)


def with_tried_kernels(workload: Workload, estimate: Estimate) -> Estimate:
    """Mark the kernels as tried if this compiler has already turned all of them into machine code, for this or another
    program."""
    if not estimate.untried_kernels:
        return estimate
    wanted = kernel_keys(Program.parse(estimate.text), of_chunk_pairs)
    cycles = KernelCache.of(workload.target).read()
    tried = all(cycles.get(key) is not None for key, products in wanted.items() if products)
    return replace(estimate, untried_kernels=not tried)


def kernel_keys(program: Program, among: Callable[[Instruction], bool] = lambda _: True) -> dict[str, bool]:
    """Return the keys of a program's instructions that have machine code; each value is True if the instruction
    computes matrix products."""
    keys = {}
    for name, instruction, key in KernelKeys(program).kernels():
        if among(instruction):
            keys[key] = program.instruction_flops(name, instruction) > 0
    return keys


def generate_cycles(workload: Workload, wanted: dict[str, bool], program: str = ATTENTION) -> dict[str, float]:
    """Generate machine code for one layer's attention, or for one of `PROGRAMS`, and return the cycles of the wanted
    instructions in it by key.

    The compiler's process is ended as soon as these cycles are there. Raises CompilerFailure if the compiler writes no
    machine code, and NoMachineCode if it rejects the program.
    """
    with at_work((workload, program, True), read_code=True) as (process, folder):
        compiled = wait_for_schedule(process, folder, "tpu")
        if not isinstance(compiled, Compiled):
            raise CompilerFailure(f"{program}: the compiler wrote no schedule: {str(compiled)[:300]}")
        keys = {}
        products = set()
        for _, instruction, key in KernelKeys(Program.parse(compiled.program)).kernels():
            if key in wanted:
                keys[instruction.name] = key
                if wanted[key]:
                    products.add(key)
        if not keys:
            return {}
        cycles = _read_as_written(process, folder / MACHINE_CODE, keys, products)
        answer = None if process.poll() is None else wait_for_schedule(process, folder, None)
    if isinstance(answer, Refusal):
        why = answer.strip().splitlines()[0]
        raise NoMachineCode(f"{program} cannot become machine code: {why} Try a smaller q_chunk and k_chunk")
    if not cycles:
        raise CompilerFailure(f"{program}: this compiler writes no machine code")
    if not products <= cycles.keys():
        raise CompilerFailure(f"{program}: the compiler ended before it had written all of its machine code")
    return cycles


def _read_as_written(
    process: subprocess.Popen[Any], folder: Path, keys: dict[str, str], products: set[str]
) -> dict[str, float]:
    """Read cycles by key while the compiler writes them, until all are there or no more appear."""
    cycles: dict[str, float] = {}
    last = time.monotonic()
    while cycles.keys() != set(keys.values()):
        ended = process.poll() is not None
        for name, path in dumped_kernels(folder).items():
            if name not in keys or keys[name] in cycles:
                continue
            count = read_cycles(path.read_text(), grid_of(name))
            if count:
                cycles[keys[name]] = count
                last = time.monotonic()
        idle = time.monotonic() - last > IDLE_SECONDS
        if ended or (idle and products <= cycles.keys()):
            break
        time.sleep(0.5)
    return cycles


@dataclass(frozen=True)
class KernelCache:
    """Cycles by `KernelKeys.key`, for one generation of TPU and one version of its compiler.

    The file is in $XDG_CACHE_HOME/ringformer/kernels, or in ~/.cache; an unreadable file counts as empty. A value of
    None marks an instruction whose machine code was looked for but does not exist.
    """

    path: Path

    @staticmethod
    def of(target: Target) -> "KernelCache":
        """Return the cache for a target's chip and the installed compiler."""
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        versions = compiler_versions(target)
        return KernelCache(home / "ringformer" / "kernels" / f"{target.generation}-libtpu-{versions['libtpu']}.json")

    def read(self) -> dict[str, float | None]:
        """Return all cached cycles."""
        try:
            cached = parse_json(self.path.read_text())
            return {str(key): cycles and float(cycles) for key, cycles in cached.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def add(self, cycles: dict[str, float | None]) -> dict[str, float | None]:
        """Add these cycles and return all; a cache that cannot be written stays as it is."""
        merged = self.read() | cycles
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False) as part:
                json.dump(merged, part)
            os.replace(part.name, self.path)
        return merged
