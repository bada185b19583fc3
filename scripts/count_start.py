"""Count the functions that a tiny `ringformer train` enters before the first call of the train step.

    python scripts/count_start.py [--verbose]

Counts named functions of the package (no lambdas, no comprehensions) outside ops, models and data, on the main thread,
with a store that was built before. Also counts the functions that `prepare` enters with a config or a part of a config.
"""

import argparse
import inspect
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import ringformer
from ringformer.cli import main
from ringformer.runs.config import Config, DataConfig, OptimizerConfig

ROOT, PACKAGE = Path(__file__).parents[1], Path(ringformer.__file__).parent
ELSEWHERE = ("ops", "models", "data")


class FirstStep(BaseException):
    """Ends the command just before it calls the train step."""


class Counts:
    """Functions that a profiler sees being entered, by file and qualified name."""

    def __init__(self):
        self.entered: Counter[tuple[str, str]] = Counter()
        self.configured: Counter[tuple[str, str]] = Counter()
        self._preparing = 0

    def see(self, frame: FrameType, event: str, _: Any) -> None:
        """Receive a call or a return from `sys.setprofile`."""
        code = frame.f_code
        of_package = code.co_filename.startswith(str(PACKAGE))
        if not of_package or code.co_name.startswith("<") or not code.co_flags & inspect.CO_OPTIMIZED:  # a class's body
            return
        name = str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname
        if name[1] == "prepare" and event in ("call", "return"):
            self._preparing += 1 if event == "call" else -1
        if event != "call":
            return
        if name[0].split("/")[0] not in ELSEWHERE:
            self.entered[name] += 1
        if self._preparing and _has_config(frame):
            self.configured[name] += 1


def _has_config(frame: FrameType) -> bool:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    values = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    return any(isinstance(value, Config | DataConfig | OptimizerConfig) or _is_model(value) for value in values)


def _is_model(value: Any) -> bool:
    return hasattr(type(value), "ARCHITECTURE")


def count(arguments: list[str]) -> Counts:
    """Run `ringformer train` with these arguments up to its first step."""
    from ringformer.train import step

    def make_train_step(*args: Any, **options: Any):
        real(*args, **options)

        def first_step(*_: Any):
            sys.setprofile(None)
            raise FirstStep

        return first_step

    counts, real, step.make_train_step = Counts(), step.make_train_step, make_train_step
    sys.setprofile(counts.see)
    try:
        main(["train", *arguments])
    except FirstStep:
        return counts
    finally:
        sys.setprofile(None)
        step.make_train_step = real
    raise RuntimeError("the command ended before its first step")


def tiny(folder: Path) -> list[str]:
    """Build the store of a tiny run, and return the arguments of its command."""
    from ringformer.data.stores.options import StoreOptions
    from ringformer.data.stores.prepare import open_or_build
    from ringformer.data.tokenizers.load import load_tokenizer

    for i in range(30):
        (folder / f"{i}.txt").write_text(f"{i} ring block key value " * 300)
    values: dict[str, Any] = {"source": f"text:{folder}/*.txt", "tokenizer": "bytes", "held_out": 0.0}
    open_or_build(folder / "store", StoreOptions(**values), load_tokenizer("bytes"))
    model = dict(vocab_size=257, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1, num_kv_heads=1)
    keys: dict[str, Any] = {f"model.{name}": value for name, value in {**model, "head_dim": 16}.items()}
    keys |= {"data.store": folder / "store", "run_dir": folder / "run", "mesh_dim": "1,1,1,1", "cpu_devices": 1}
    keys |= {"seq_len": 64, "batch_size": 1, "steps": 40, "data.held_out": 0.0, "data.tokenizer": "bytes"}
    return [
        f"--config={ROOT / 'configs' / 'quickstart.py'}",
        *(f"--config.{name}={value}" for name, value in keys.items()),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-v", "--verbose", action="store_true", help="also list the functions")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = count(tiny(Path(folder)))
    files = {file for file, _ in result.entered}
    print(
        json.dumps(
            {
                "functions": len(result.entered),
                "files": len(files),
                "functions of prepare with a config": len(result.configured),
                "calls of them": sum(result.configured.values()),
                "calls of check_run": sum(n for (_, name), n in result.entered.items() if name == "check_run"),
            },
            indent=1,
        )
    )
    if arguments.verbose:
        for kind, counted in (("entered", result.entered), ("with a config", result.configured)):
            for (file, name), n in sorted(counted.items()):
                print(f"{kind:>14} {n:>4} {file}:{name}")
