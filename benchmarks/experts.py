"""Count what experts would cost: products of grouped tokens on v5e, and the bytes of their weights and tokens.

    python benchmarks/experts.py [--out=results/experts.json] [--page=docs/decisions.md]

Compiled, not run: FLOPs of `jax.lax.ragged_dot` and of `megablox.gmm` over those due, on one chip and within a
`shard_map` of four. Counted: the seconds to gather the weights of a layer's experts, to compute the experts of a rank's
tokens, and to send the tokens instead, at the rates of the estimator (`ringformer/estimate/workloads/link_rates.py`).
"""

import argparse
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.result_files import made, write_results
from benchmarks.tables import write_table
from ringformer.cli.parser import output_argument
from ringformer.estimate.seconds.program_seconds import efficiency
from ringformer.estimate.workloads.link_rates import exchange_rate, weights_rate
from ringformer.estimate.workloads.targets import compiler_versions, find_target, only_compilers
from ringformer.estimate.workloads.training import preset_workload

TOKENS, WIDTH, EXPERT_WIDTH, EXPERTS, CHOSEN = 4096, 2048, 768, 128, 8
"""A rank's tokens of a million on 256 ranks; and sizes of Qwen3-30B-A3B."""
COUNTS = 1, 4, 16, 64
BEGIN, END = "<!-- experts: written by benchmarks/experts.py -->", "<!-- end -->"


def compiled(multiply, experts: int, mesh: Mesh, tokens: P, check_vma: bool | None) -> float:
    """FLOPs of a device's product of grouped tokens over those due; `check_vma` None: without `shard_map`."""
    devices = mesh.size
    shapes = (TOKENS * devices, WIDTH), (experts, WIDTH, EXPERT_WIDTH), (experts * devices,)
    specs, dtypes = (tokens, P(), tokens), (jnp.bfloat16, jnp.bfloat16, jnp.int32)
    if check_vma is not None:
        multiply = jax.shard_map(multiply, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=check_vma)
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(shapes, dtypes, specs, strict=True)
    ]
    analysis = jax.jit(multiply).lower(*arrays).compile().cost_analysis() or {}
    return analysis["flops"] / (2 * TOKENS * WIDTH * EXPERT_WIDTH)


def products() -> dict:
    """Excess of each product, or the error that refuses it."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    one, four = (Mesh(np.asarray(find_target(name).devices()).ravel(), ("x",)) for name in ("v5e:1x1", "v5e:2x2"))
    entries: dict = {f"ragged_dot, {n} experts": compiled(jax.lax.ragged_dot, n, one, P(), None) for n in COUNTS}
    grouped = partial(gmm, preferred_element_type=jnp.float32)
    for check in (False, True):

        def multiply(x, w, sizes, check=check):
            return grouped(x, jax.lax.pcast(w, ("x",), to="varying") if check else w, sizes)

        try:
            entry: float | str = compiled(multiply, 16, four, P("x"), check)
        except ValueError as error:
            entry = str(error).partition(". ")[0]
        entries[f"gmm, 16 experts, check_vma={check}"] = entry
    return entries


def counts() -> dict:
    """Bytes and seconds of a layer on v5e-256."""
    workload = preset_workload("qwen3_8b", find_target("v5e-256"), 256 * TOKENS)
    heads = preset_workload("qwen3_8b", find_target("v5e-256"), 256 * TOKENS, ulysses=8)
    weights, moved = 2 * EXPERTS * 3 * WIDTH * EXPERT_WIDTH, 2 * TOKENS * CHOSEN * WIDTH
    rate = efficiency("v5e").products * workload.target.chip.bf16_flops
    return {
        "weight_bytes": weights,
        "gather_seconds": weights / weights_rate(workload),
        "compute_seconds": 2 * TOKENS * CHOSEN * 3 * WIDTH * EXPERT_WIDTH / rate,
        "token_bytes": moved,
        "exchange_seconds": 2 * moved / exchange_rate(heads),
    }


def table(entries: dict) -> str:
    """The table of the page."""
    lines = ["| product | FLOPs over those due |", "|---|---|"]
    for name, excess in entries["products"].items():
        lines.append(f"| {name} | {f'{excess:.1f}' if isinstance(excess, float) else f'refused: {excess}'} |")
    c = entries["counts"]
    lines += [
        "",
        "| a layer of 128 experts of Qwen3-30B-A3B on v5e-256, 4,096 tokens a rank | bytes | seconds |",
        "|---|---|---|",
        f"| gather all weights of experts | {c['weight_bytes'] / 1e9:.2f} GB | {c['gather_seconds'] * 1e3:.1f} ms |",
        f"| compute eight experts a token | | {c['compute_seconds'] * 1e3:.1f} ms |",
        f"| send the tokens to experts among 8 neighbours, and back | 2 x {c['token_bytes'] / 1e6:.0f} MB | "
        f"{c['exchange_seconds'] * 1e3:.1f} ms |",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=output_argument, default=Path("results/experts.json"))
    parser.add_argument("--page", type=Path, default=Path("docs/decisions.md"))
    asked = parser.parse_args()
    only_compilers()
    entries = {
        "what": "compiled: FLOPs of products of grouped tokens; modelled: seconds of a layer's experts",
        "command": "python benchmarks/experts.py",
        **made(),
        "versions": compiler_versions(find_target("v5e-8")),
        "products": products(),
        "counts": counts(),
    }
    write_results(asked.out, entries)
    print(table(entries))
    write_table(asked.page, BEGIN, table(entries), END)
