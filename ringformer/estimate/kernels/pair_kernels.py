"""TPU kernels compiled alone, to count their cycles per grid step: one pair of chunks with all query heads of a key
head.

`python -m ringformer.estimate.kernels.pair_kernels GENERATION KIND NUMBERS` compiles one kernel, in a process that
dumps its machine code.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.compiler.process import child_environment
from ringformer.estimate.kernels.slot_use import SlotUse, detailed_dump_flags, read_slot_use
from ringformer.estimate.seconds.machine_code import Grid, dumped_kernels
from ringformer.estimate.workloads.programs import abstract_array
from ringformer.estimate.workloads.targets import Target, find_target, only_compilers
from ringformer.hardware import CHIPS
from ringformer.ops.blockwise_attention import Keys, Queries
from ringformer.ops.kernels.flash_backward import flash_backward
from ringformer.ops.kernels.flash_forward import flash_forward
from ringformer.ops.kernels.kernel_tools import Logits
from ringformer.ops.kernels.pair_table import PairTable
from ringformer.ops.online_softmax import Softmax

TARGETS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""Generations for which kernels are judged, each with a slice that the compiler supports."""

TOKENS = 65536
KEY_HEADS = 16
PAIRS = 64
"""Size of the shard. The compiler would keep arrays of a smaller shard on the chip, which would distort the counts."""

Kind = Literal["forward", "backward"]


_NO_VMEM = re.compile(r"memory in memory space vmem|VmemOom|exceeded scoped vmem limit", re.IGNORECASE)


class TooLarge(ValueError):
    """A kernel needs more on-chip memory than the chip has."""


@dataclass(frozen=True)
class Pair:
    """Shape of a kernel's step."""

    q_chunk: int = 1024
    k_chunk: int = 1024
    head_dim: int = 128
    heads: int = 1
    """Query heads per key head."""
    packed: int = 0
    """1 with segment ids, 0 without."""
    window: int = 0
    """Keys that a query sees at most; 0: no limit."""

    def ideal_cycles(self, generation: str, kind: Kind) -> float:
        """Cycles of a step's matrix products (two forward, five backward) at the full rate of a core's units.

        On v6e, products over heads of up to 128 features fill only half of a unit, and so take twice as long. Products
        over keys may take fewer cycles than these.
        """
        cores = CHIPS[generation].tensor_cores
        assert cores is not None, "the targets are TPUs"
        products = {"forward": 2, "backward": 5}[kind]
        flops = products * 2.0 * self.heads * self.q_chunk * self.k_chunk * self.head_dim
        return flops / cores.matrix_flops_per_cycle / cores.filled(self.head_dim)


def find_generation(target: str) -> str:
    """Return the generation of a target, such as "v5e" or a slice of it. Raises ValueError that lists the valid
    generations."""
    generation = re.split("[-:]", target)[0]
    if generation in TARGETS and (target in TARGETS or find_target(target)):
        return generation
    raise ValueError(f"unknown target {target!r}; kernels are judged for {', '.join(TARGETS)}")


def hbm_bytes_per_cycle(generation: str) -> float:
    """HBM bytes per cycle that one core gets; the cores of a chip share its memory."""
    chip = CHIPS[generation]
    assert chip.tensor_cores is not None, "the targets are TPUs"
    return chip.hbm_bandwidth / chip.tensor_cores.count / chip.clock_hz


@contextmanager
def dumped(command: list[str]) -> Iterator[tuple[Path, str]]:
    """Run a Python command, and yield the folder with the machine code that it compiled, and the command's output.

    Raises TooLarge if a kernel needs more on-chip memory than there is, and CompilerFailure if the process fails for
    another reason.
    """
    with tempfile.TemporaryDirectory(prefix="ringformer-") as name:
        done = subprocess.run(
            [sys.executable, *command],
            env=child_environment(detailed_dump_flags(Path(name))),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            errors = re.findall(r"^\S*Error: .*$", done.stderr, re.MULTILINE) or ["it printed no error"]
            message = errors[-1][:300]
            if _NO_VMEM.search(done.stderr):
                raise TooLarge(message)
            raise CompilerFailure(message)
        yield Path(name), done.stdout


PARTS = {"whole": Grid(1, 0, 0), "masked": Grid(0, 1, 0), "visit": Grid(0, 0, 1)}
"""Parts of a grid that are counted separately: a step without a mask, a step with one, and the extra work at the
beginning and end of a visit."""


def count_kernel(generation: str, kind: Kind, pair: Pair) -> dict[str, SlotUse]:
    """Compile a kernel and count its `PARTS`. Raises TooLarge, CompilerFailure and MissingCompiler."""
    find_target(TARGETS[generation]).require_compiler()
    numbers = map(str, astuple(pair))
    with dumped(["-m", "ringformer.estimate.kernels.pair_kernels", generation, kind, *numbers]) as (folder, _):
        (name,) = (name for name in dumped_kernels(folder) if f"flash_{kind}" in name)
        return {part: read_slot_use(folder, name, generation, grid) for part, grid in PARTS.items()}


def trace_kernel(
    target: Target,
    kind: Kind,
    pair: Pair,
    *,
    tokens: int = TOKENS,
    key_heads: int = KEY_HEADS,
    biased: bool = False,
    adds: bool = True,
) -> jax.stages.Traced:
    """Trace a kernel of a shard for a device of a target; `.lower().compile()` of what is returned compiles it.

    Args:
      tokens: number of queries, and of keys.
      biased: with a bias on the keys.
      adds: the backward adds to the gradients of keys that arrived, as on a ring.
    """
    mesh = jax.sharding.Mesh(target.devices()[:1], "x")
    chunks = (pair.q_chunk, pair.k_chunk)
    window = pair.window or None
    array: Callable[..., Any] = partial(abstract_array, mesh, PartitionSpec())  # what is lowered instead of arrays
    f32 = jnp.float32
    bf16 = jnp.bfloat16
    int32 = jnp.int32
    q = array(bf16, 1, key_heads, pair.heads, tokens, pair.head_dim)
    kv = array(bf16, 2, 1, key_heads, tokens, pair.head_dim)
    ids = array(int32, 1, tokens) if pair.packed else None
    o = array(f32, *q.shape)
    row = array(f32, *q.shape[:-1])
    rows = array(f32, 2, *q.shape[:-1])
    columns = (array(int32, PAIRS),) * 6
    length = array(int32)
    bias = array(f32, 1, tokens) if biased else None
    dkv = array(f32, *kv.shape) if adds else None

    def forward(state, queries, keys, bias, columns, length):
        table = PairTable(columns, length, (PAIRS, 0))
        return flash_forward(state, queries, keys, bias, table, chunks, Logits(0.1, window=window))

    def backward(dq, dkv, queries, keys, bias, do, rows, columns, length):
        table = PairTable(columns, length, (PAIRS, 0))
        return flash_backward(dq, dkv, queries, keys, bias, do, rows, table, chunks, Logits(0.1, window=window), 0.1)

    queries = Queries(q, ids)
    keys = Keys(kv, ids, None)
    if kind == "forward":
        return jax.jit(forward).trace(Softmax(o, row, row), queries, keys, bias, columns, length)
    return jax.jit(backward).trace(o, dkv, queries, keys, bias, q, rows, columns, length)


if __name__ == "__main__":
    only_compilers()
    generation, kind, *numbers = sys.argv[1:]
    trace_kernel(find_target(TARGETS[generation]), cast(Kind, kind), Pair(*map(int, numbers))).lower().compile()
