"""Compilation in a separate process, so that a crash of the compiler is contained.

`python -m ringformer.estimate.compiler.process FOLDER PARENT` is that process. It reads from the folder the call that
`compile_apart` left there. It writes to the folder the program's surroundings before compilation, the compiler's dump,
and the compiler's answer if it finishes. The parent reads the dump: once the program is scheduled, it is known whether
it fits, whatever happens to the compiler after that.
"""

import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

from ringformer.estimate.compiled.dump import (
    AS_COMPILED_PROGRAMS_PRINT,
    Compiled,
    CompilerFailure,
    Memory,
    Refusal,
    compile_printing,
    read_dump,
)
from ringformer.estimate.compiled.peak_buffers import read_peak_buffers
from ringformer.estimate.compiled.program_text import Program
from ringformer.estimate.compiler.known_failures import known_failure
from ringformer.estimate.compiler.program_estimate import Estimate, Surroundings, read_estimate, read_refusal
from ringformer.estimate.seconds.kernel_keys import KernelKeys
from ringformer.estimate.seconds.link_loads import network
from ringformer.estimate.seconds.machine_code import dump_flags, read_kernels
from ringformer.estimate.seconds.program_seconds import Rates, efficiency
from ringformer.estimate.workloads.inference import InferenceWorkload
from ringformer.estimate.workloads.inference_programs import lower_inference
from ringformer.estimate.workloads.programs import ATTENTION, TRAIN_STEP, LoweredProgram, lower_attention, lower_program
from ringformer.estimate.workloads.targets import only_compilers
from ringformer.estimate.workloads.training import Workload
from ringformer.files.atomic import write_whole
from ringformer.ops.kernels.kernel_tools import LANES
from ringformer.parallel.device_order import max_link_hops
from ringformer.runs.config_file import CONFIG_MODULE

MACHINE_CODE = "machine_code"
"""Subfolder of the process's folder to which machine code is dumped."""

LIBTPU_FLAGS = "LIBTPU_INIT_ARGS"


def compile_apart(
    workload: Workload,
    program: str = TRAIN_STEP,
    *,
    generate_code: bool = False,
) -> Estimate:
    """Compile one of `PROGRAMS` or `INFERENCE` in a separate process until it is scheduled and its buffers are placed,
    which on TPU takes a tenth of the compiler's work. Then end the process; the rest cannot change the answer.

    With `generate_code`, the compiler continues until it has generated machine code, and a crash before that is a
    failure. For a train step on TPU, the machine code is read, and the estimate's seconds include its cycles.

    Raises ValueError for an invalid mesh, MissingCompiler, and CompilerFailure (with a message of one line).
    CompilerFailure means that the compiler crashes, is known to crash on such a workload, or fails for another reason
    than memory.
    """
    workload.target.require_compiler()
    if type(workload.model).__module__ == CONFIG_MODULE:
        raise ValueError(
            f"{type(workload.model).__name__} is defined in the config file, which the compiler's process cannot "
            "import: move the model to a module beside the config, and import that"
        )
    if reason := known_failure(workload):
        raise CompilerFailure(f"{program}: {reason}")
    begin = time.perf_counter()
    read_code = generate_code and program == TRAIN_STEP and workload.target.chip.kind == "tpu"
    dumps = None if generate_code else workload.target.chip.kind
    with at_work((workload, program, generate_code), read_code=read_code) as (process, folder):
        answer = wait_for_schedule(process, folder, dumps)
        if answer is None:
            raise CompilerFailure(_death(program, process.returncode, (folder / "log").read_text(errors="replace")))
        if isinstance(answer, Exception):
            raise answer
        around: Surroundings = pickle.loads((folder / "surroundings").read_bytes())
    seconds = time.perf_counter() - begin
    if isinstance(answer, Refusal):
        return read_refusal(answer, around, workload.target, seconds)
    return read_estimate(answer, around, workload.target, seconds)


@contextmanager
def at_work(call: tuple[Any, ...], *, read_code: bool) -> Iterator[tuple[subprocess.Popen[Any], Path]]:
    """Start a process that compiles `call`, a tuple (workload, program, generate_code), and yield the process with its
    folder. It dumps to the subfolder "dump"; with `read_code`, it dumps a TPU's machine code to `MACHINE_CODE`. When
    the context ends, the process is killed and the folder is removed."""
    with tempfile.TemporaryDirectory(prefix="ringformer-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "call").write_bytes(pickle.dumps(call))
        flags = ""
        if read_code:
            (folder / MACHINE_CODE).mkdir()
            flags = dump_flags(folder / MACHINE_CODE)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ringformer.estimate.compiler.process", name, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                env=child_environment(flags),
            )
        try:
            yield process, folder
        finally:
            with suppress(ProcessLookupError):  # the whole process group has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def child_environment(libtpu_flags: str) -> dict[str, str]:
    """Return the environment variables of a child process: it imports from this process's paths, and `libtpu_flags` are
    added to the flags of libtpu."""
    path = os.pathsep.join(path for path in sys.path if path)
    flags = f"{os.environ.get(LIBTPU_FLAGS, '')} {libtpu_flags}".strip()
    return os.environ | {LIBTPU_FLAGS: flags, "PYTHONPATH": path}


def wait_for_schedule(
    process: subprocess.Popen[Any], folder: Path, dumps: str | None
) -> Compiled | Refusal | Exception | None:
    """Return the contents of the dump as soon as it is complete, or the process's answer if the process ends first;
    None if it died without an answer. `dumps`: kind of the target that is compiled for."""
    while True:
        ended = process.poll() is not None  # checked before the dump is read, so as not to miss its last files
        if dumps and (compiled := read_dump(folder / "dump", dumps)):
            return compiled
        if ended:
            answer = folder / "answer"
            if not answer.exists():
                return None
            return pickle.loads(answer.read_bytes())
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)


def _death(program: str, returncode: int, log: str) -> str:
    """Describe in one line how a compiler died, its last message, and what to try."""
    how = f"exit code {returncode}"
    hint = ""
    if returncode < 0:
        how = signal.Signals(-returncode).name
        hint = "; try other head_groups or remat_group, more devices on sp, or half the sequence"
    checks = re.findall(r"^F\d{4} [\d:.]+ +\d+ (.+)$", log, re.MULTILINE)  # fatal errors in the C++ log
    last = (checks[:1] or log.strip().splitlines()[-1:] or ["it printed nothing"])[0].strip()
    return f"{program}: the compiler died ({how}): {last[:300]}{hint}"


def main(folder: Path, parent: int) -> None:
    """Run the compiling process. The process ends with the compiler's answer, or when its parent is gone."""

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    only_compilers()
    answer: Any
    try:
        answer = _compile(folder, *pickle.loads((folder / "call").read_bytes()))
    except jax.errors.JaxRuntimeError as error:
        answer = Refusal(str(error))
    except (ValueError, RuntimeError) as error:
        answer = error
    write_whole(folder / "answer", pickle.dumps(answer))
    os._exit(0)


def _compile(folder: Path, workload: Workload, program: str, generate_code: bool) -> Compiled:
    lowered, options, mesh, state, alive, in_host = _lower(workload, program)
    rates = _rates(workload, mesh)
    dump = folder / "dump"
    around = Surroundings(program, rates, max_link_hops(mesh, workload.model.ulysses), state, alive, in_host)
    write_whole(folder / "surroundings", pickle.dumps(around))
    dumps: dict[str, Any] = AS_COMPILED_PROGRAMS_PRINT | {"xla_dump_to": str(dump)}
    if generate_code and "xla_dump_to" in os.environ.get("XLA_FLAGS", ""):  # the user's own dump takes precedence
        dumps = {}
    compiled = compile_printing(lowered, options, dumps)
    # On some TPUs, `as_text` fails on programs with offloaded arrays; their compiler also dumps the schedule at the
    # end.
    written = next(dump.glob("*after_codegen.txt"), None)
    text = written.read_text() if written else compiled.as_text()
    memory = compiled.memory_analysis()
    if text is None or memory is None:
        raise CompilerFailure(f"{program}: this compiler reports neither its program nor its memory")
    return Compiled(
        text,
        Memory(
            arguments=memory.argument_size_in_bytes,
            outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
            temporaries=memory.temp_size_in_bytes,
            host=memory.host_temp_size_in_bytes,
        ),
        generated_code=True,
        code_bytes=memory.generated_code_size_in_bytes or None,  # GPU compilers report 0
        peak_buffers=read_peak_buffers(dump),
        cycles=_cycles(text, folder / MACHINE_CODE),
    )


def _lower(workload: Workload, program: str) -> LoweredProgram:
    if program == ATTENTION:
        return lower_attention(workload)
    if isinstance(workload, InferenceWorkload):
        return lower_inference(workload, program)
    return lower_program(workload, program)


def _cycles(text: str, code: Path) -> dict[str, float] | None:
    """Read the cycles of a program's instructions, by key; None if there is no folder of machine code. The compiler
    writes the machine code of equal instructions only once."""
    if not code.exists():
        return None
    by_name = read_kernels(code)
    names = KernelKeys(Program.parse(text)).named(by_name)
    return {key: by_name[name] for key, name in names.items()}


def _rates(workload: Workload, mesh: jax.sharding.Mesh) -> Rates:
    target = workload.target
    model = workload.model
    chip = workload.target.chip
    clock = chip.clock_hz if chip.kind == "tpu" else 0.0
    kernel = getattr(model, "kernel", "xla")
    head_dim = getattr(model, "head_dim", LANES)
    int8_cache = isinstance(workload, InferenceWorkload) and workload.cache_dtype == "int8"
    share = efficiency(target.generation, kernel, head_dim, int8_cache)
    links = network(target, mesh)
    return Rates(chip.flops(model.compute_dtype), links, chip.hbm_bandwidth, clock, share, chip.host_bandwidth)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
