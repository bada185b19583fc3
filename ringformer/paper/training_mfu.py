"""The paper's Table 4: model FLOPs utilisation of the ring and of the blockwise baseline, and the ring's expected MFU.

Each configuration trains batches of the paper's tokens in two ways. The baseline is sharded by FSDP, with a whole
sequence on each rank (and by tensor parallelism, if a batch would otherwise have too few sequences for the devices).
The other uses the ring, over n ranks for a context that is n times as long. Both have the same tokens per device, the
same chunks and the same memory settings, which the estimator chooses for the ring; only the ring differs. MFU is
modelled from the compiled schedule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ringformer.estimate.choices.memory_settings import compile_first_accepted, likely_settings
from ringformer.estimate.compiled.dump import CompilerFailure
from ringformer.estimate.kernels.kernel_cycles import with_machine_code
from ringformer.estimate.reports.report import fields
from ringformer.estimate.search.longest_context import brief_json
from ringformer.estimate.workloads.targets import find_target
from ringformer.estimate.workloads.training import MemorySettings, Workload, estimate_command
from ringformer.models.families.llama import LlamaConfig, preset
from ringformer.models.flops import model_flops_per_token
from ringformer.models.kernel_choice import USUAL
from ringformer.ops.kernels.block_kernels import Kernel, check_kernel
from ringformer.ops.work_list import default_chunk
from ringformer.paper.attempts import compilable, read_runs, stamp, write_results
from ringformer.paper.cells import K, TableRow

TABLE = "table4"
"""First part of the names of its cells."""

PAPER_MFU = (0.30, 0.35)
"""Approximate range of all MFU numbers in the paper, for baseline and ring. It is approximate because the table is an
image in our copy."""

RING = "ring"
BLOCKWISE = "blockwise"
SHORTER = "blockwise, half the context"
RUNS = (RING, BLOCKWISE, SHORTER)
"""Runs of a cell: the ring and two baselines. The second baseline has twice as many sequences, of half the length."""


@dataclass(frozen=True)
class Configuration(TableRow):
    """A row of the paper's table; contexts are in K tokens."""

    blockwise: int
    ring: int
    step_tokens: int
    tp: int = 1

    @property
    def contexts(self) -> str:
        """Both contexts as printed."""
        return f"{self.blockwise}K → {self.ring:,}K"


CONFIGURATIONS = (
    Configuration("8xA100-80", "llama_7b", 32, 256, 2 * K * K),
    Configuration("8xA100-80", "llama_13b", 16, 128, 2 * K * K),
    Configuration("32xA100-80", "llama_13b", 64, 2048, 2 * K * K),
    Configuration("v4-1024", "llama_30b", 16, 2048, 4 * K * K, tp=2),  # 512 devices x 16K would exceed the batch
    Configuration("v4-1024", "llama_65b", 8, 1024, 4 * K * K),
)


class Variant(NamedTuple):
    """Dtype of the computation, and the code that computes attention's blocks."""

    compute_dtype: str
    kernel: Kernel


VARIANTS = (
    Variant("float32", "xla"),
    Variant("bfloat16", "xla"),
    Variant("bfloat16", "pallas"),
    Variant("bfloat16", "cudnn"),
)
"""float32 is the paper's variant: float32 arrays, whose products are bf16 passes on TPU and TF32 on GPU."""


class Cell(NamedTuple):
    """A configuration in one variant, which has three runs."""

    configuration: Configuration
    variant: Variant

    @property
    def name(self) -> str:
        return "/".join((TABLE, self.configuration.name, *self.variant))

    @property
    def target(self) -> str:
        return self.configuration.target

    def workload(self, run: str) -> Workload:
        """Return the workload of a run, with the fastest memory settings; all three runs have the same chunks."""
        c = self.configuration
        target = find_target(self.target)
        ranks = target.num_devices // c.tp
        seq_len = K * {RING: c.ring, BLOCKWISE: c.blockwise, SHORTER: c.blockwise // 2}[run]
        attention = "blockwise"
        sp = 1
        if run == RING:
            attention = "ring"
            sp = c.ring // c.blockwise
        q_chunk, k_chunk = USUAL if self.variant.kernel == "pallas" else (default_chunk(c.blockwise * K),) * 2
        options = self.variant._asdict() | dict(attention=attention, q_chunk=q_chunk, k_chunk=k_chunk)
        model = LlamaConfig(**preset(c.model) | options)
        return Workload(
            model,
            target,
            f"1,{ranks // sp},{c.tp},{sp}",
            seq_len,
            batch_size=c.step_tokens // seq_len,
            accumulate=c.step_tokens // (ranks * c.blockwise * K),
            name=c.model,
        )


def cells() -> list[Cell]:
    """Return every cell whose kernel supports its dtype and hardware."""
    supported = []
    for configuration, variant in product(CONFIGURATIONS, VARIANTS):
        if _has_kernel(find_target(configuration.target).chip.kind, variant):
            supported.append(Cell(configuration, variant))
    return supported


def _has_kernel(platform: str, variant: Variant) -> bool:
    try:
        check_kernel(variant.kernel, jnp.dtype(variant.compute_dtype), platform)
    except ValueError:
        return False
    return True


def fill(path: Path, wanted: list[Cell], log: Callable[[str], None]) -> None:
    """Compile the runs of the cells that are missing in the file `path`, which is written after each run.

    Cells whose compiler is not installed are left out. If the compiler breaks down on a run, this is logged, and the
    run is tried again next time.
    """
    for cell, run in product(compilable(wanted, log), RUNS):
        done = read_runs(path).get(cell.name, {})
        if run in done:
            continue
        workload = cell.workload(run)
        if run == RING:
            settings = likely_settings(workload)
        elif RING in done:
            chosen = {name: done[RING][name] for name in vars(workload.settings)}
            settings = [MemorySettings(**chosen)]
        else:
            continue
        log(f"[table 4] {cell.name}, {run}: {workload.seq_len:,} tokens")
        try:
            answer = _attempt(workload, settings, log)
        except CompilerFailure as error:
            log(f"  the compiler broke down: {error}")
            continue
        mfu = answer["mfu_palm_model"]
        verdict = "fits" if answer["fits"] else "does not fit"
        if mfu:
            verdict += f", MFU {mfu:.1%}"
        log(f"  {verdict}")
        results = read_runs(path)
        results[cell.name] = results.get(cell.name, {}) | {run: answer | stamp(workload.target)}
        about = "compiled: train steps of the paper's Table 4; modelled: their seconds and MFU"
        command = f"ringformer tables --only={TABLE}"
        write_results(path, what=about, command=command, cells=dict(sorted(results.items())))


def _attempt(workload: Workload, settings: list[MemorySettings], log: Callable[[str], None]) -> dict[str, Any]:
    """Return the JSON of a run with the first settings that fit or, if none fit, the last. On TPU, its seconds are
    based on the machine code of attention."""
    workload, estimate = compile_first_accepted(
        workload, settings, lambda e: e.fits and e.fits_host, lambda w: log(f"  {estimate_command(w)}")
    )
    estimate = with_machine_code(workload, estimate, lambda line: log(f"  {line}"))
    shape = fields(workload, "batch_size", "accumulate", "mesh_dim")
    return brief_json(workload, estimate) | shape | {"fits": estimate.fits and estimate.fits_host}


class Measured(NamedTuple):
    """Results of one of the baseline's runs at its context."""

    mfu: float
    attention: float
    """Share of attention in its seconds."""


class Utilisation(NamedTuple):
    """Utilisation of the peak by parts of the computation."""

    products: float
    """Utilisation by products with weights (feed-forward, projections, head). All seconds that are not attention's
    count as theirs, including exposed gathers."""
    attention: float


def utilisation(model: LlamaConfig, baseline: Mapping[int, Measured], *, causal: bool) -> Utilisation:
    """Return how well the baseline uses the peak, from its runs by their contexts.

    These are model FLOPs over the seconds that they would take at a peak of 1, summed over runs. Attention could also
    be separated from the rest by the growth of the seconds with the context. But at a short context, other changes with
    the shapes are not small compared with the growth of attention, and the schedule attributes the seconds anyway.
    """
    flops = np.array([_flops(model, seq_len, causal) for seq_len in baseline])
    mfu, share_of_attention = np.transpose(list(baseline.values()))
    seconds = flops.sum(axis=1) / mfu
    attention = seconds @ share_of_attention
    products, pairs = flops.sum(axis=0)
    return Utilisation(products / (seconds.sum() - attention), pairs / attention)


def expected_mfu(model: LlamaConfig, seq_len: int, used: Utilisation, *, causal: bool) -> float:
    """Return the MFU at a context if attention and the rest use the peak as in the baseline."""
    products, attention = _flops(model, seq_len, causal)
    return (products + attention) / (products / used.products + attention / used.attention)


def _flops(model: LlamaConfig, seq_len: int, causal: bool) -> tuple[float, float]:
    """Model FLOPs per token: products with weights, attention."""
    products = model_flops_per_token(model, 0)
    return products, model_flops_per_token(model, seq_len, causal=causal) - products
