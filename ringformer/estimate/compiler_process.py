"""A train step compiled in a process of its own, so that a compiler that dies takes nothing along.

`python -m ringformer.estimate.compiler_process FOLDER PARENT` is that process: it reads the call that
`compile_step_apart` left in the folder, and leaves the answer there.
"""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ringformer.estimate.compile_step import Estimate, read_estimate, run_compiler
from ringformer.estimate.compiler_dump import CompilerFailure
from ringformer.estimate.targets import only_compilers
from ringformer.estimate.workload import Workload
from ringformer.train.config_parsing import CONFIG_MODULE


def compile_step_apart(workload: Workload, *, generate_code: bool = False) -> Estimate:
    """`compile_step` in a process of its own, which ends when the program is scheduled and its buffers are placed: on
    TPU after a tenth of the compiler's work. With `generate_code` it goes on to machine code, of which nothing is said.

    Raises as `compile_step`, MissingCompiler, and CompilerFailure also if the compiler dies.
    """
    workload.target.require_compiler()
    if type(workload.model).__module__ == CONFIG_MODULE:
        raise ValueError(
            f"{type(workload.model).__name__} is defined in the config file, where the compiler's process cannot find "
            "it: put the model in a module beside the config, and import that"
        )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with tempfile.TemporaryDirectory(prefix="ringformer-", ignore_cleanup_errors=True) as folder:
        Path(folder, "call").write_bytes(pickle.dumps((workload, None if generate_code else Path(folder, "dump"))))
        done = subprocess.run(
            [sys.executable, "-m", "ringformer.estimate.compiler_process", folder, str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=environment,
        )  # fmt: skip
        answer = Path(folder, "answer")
        if not answer.exists():
            raise CompilerFailure(f"its process ended with {done.returncode}: {done.stdout.strip()[-2000:]}")
        compiled = pickle.loads(answer.read_bytes())
    if isinstance(compiled, Exception):
        raise compiled
    return read_estimate(compiled, workload.target)


def main(folder: str, parent: int) -> None:
    """The process itself. It ends without waiting for the compiler, and if its parent is gone."""

    def follow():
        while os.getppid() == parent:
            time.sleep(0.5)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to say
    threading.Thread(target=follow, daemon=True).start()
    only_compilers()
    answer: object
    try:
        answer = run_compiler(*pickle.loads(Path(folder, "call").read_bytes()))
    except (ValueError, RuntimeError) as error:
        answer = error
    part = Path(folder, "part")
    part.write_bytes(pickle.dumps(answer))
    part.replace(Path(folder, "answer"))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
