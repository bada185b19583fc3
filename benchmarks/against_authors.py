"""Time our ring attention against the authors' (`ringattention` 0.1.2), forward + backward on simulated CPU devices.

    pip install --no-deps ringattention==0.1.2
    python benchmarks/against_authors.py --out results/against_authors.json

The authors' pure-JAX file is found in the installed package and loaded by itself: the package does not import on
current JAX. Same arrays, same chunks, float32, causal, and the outputs and gradients are compared before anything
is timed. The ops alternate in one process; the ratio is the median over rounds of ours / theirs. Times themselves
mean little on a shared machine.
"""

import argparse
import importlib.metadata
import importlib.util
import platform
import statistics
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from benchmarks.result_files import made, write_results
from ringformer.cli.parser import output_argument
from ringformer.ops.sharded_ring_attention import sharded_ring_attention

AUTHORS = "ringattention"
AUTHORS_FILE = "ringattention/ringattention_jax.py"


def load_authors_op():
    try:
        files = importlib.metadata.files(AUTHORS) or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"{AUTHORS} is not installed: pip install --no-deps ringattention==0.1.2")
    path = next(f.locate() for f in files if str(f) == AUTHORS_FILE)
    spec = importlib.util.spec_from_file_location("authors_ring_attention", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ring_attention


def authors_attention(op, mesh, chunk):
    """Their op on whole arrays; it knows the contiguous layout only."""
    settings = dict(
        causal_block_size=1,
        query_chunk_size=chunk,
        key_chunk_size=chunk,
        deterministic=True,
        dropout_rng=None,
        attn_pdrop=0.0,
        dtype=jnp.float32,
        policy=jax.checkpoint_policies.nothing_saveable,
        precision=None,
        prevent_cse=True,
    )

    def per_device(q, k, v):
        return op(q, k, v, None, None, None, "sp", True, settings)

    return jax.shard_map(per_device, mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"), check_vma=False)


def forward_and_backward(attention):
    def run(q, k, v, do):
        o, vjp = jax.vjp(attention, q, k, v)
        return o, *vjp(do)

    return jax.jit(run)


def relative_error(a, b):
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ring", type=int, default=8)
    parser.add_argument("--local_length", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head_dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=output_argument, help="write the result here as JSON")
    args = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", args.ring)
    mesh = jax.make_mesh((args.ring,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))
    authors = load_authors_op()
    rows = []
    for T in args.local_length:
        shape = (1, args.ring * T, args.heads, args.head_dim)
        q, k, v, do = (jnp.asarray(np.random.default_rng(i).normal(size=shape), jnp.float32) for i in range(4))
        ours = partial(sharded_ring_attention, mesh=mesh, q_chunk=args.chunk, k_chunk=args.chunk)
        runs = {
            "authors": forward_and_backward(authors_attention(authors, mesh, args.chunk)),
            "contiguous": forward_and_backward(partial(ours, layout="contiguous")),
            "zigzag": forward_and_backward(partial(ours, layout="zigzag")),
        }
        expected = runs["authors"](q, k, v, do)
        for name, run in runs.items():
            worst = max(map(relative_error, run(q, k, v, do), expected))
            if worst > 1e-5:
                sys.exit(f"{name} disagrees with the authors' op by {worst:.1e}: nothing is timed")
        seconds = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                jax.block_until_ready(run(q, k, v, do))
                seconds[name].append(time.perf_counter() - start)
        for name in ("contiguous", "zigzag"):
            ratio = statistics.median(a / b for a, b in zip(seconds[name], seconds["authors"], strict=True))
            rows.append(
                {
                    "local_length": T,
                    "layout": name,
                    "ours_over_authors": round(ratio, 3),
                    "ours_s": round(statistics.median(seconds[name]), 3),
                    "authors_s": round(statistics.median(seconds["authors"]), 3),
                }
            )
            print(f"T={T:6d}  {name:10s}  ours/authors = {ratio:.3f}")
    if args.out:
        result = {
            "what": "measured: forward+backward time of our op over the authors', float32, causal, CPU",
            "command": " ".join(["python", "benchmarks/against_authors.py", *sys.argv[1:]]),
            **made(),
            "versions": {
                "jax": jax.__version__,
                "python": platform.python_version(),
                AUTHORS: importlib.metadata.version(AUTHORS),
            },
            "settings": {k: v for k, v in vars(args).items() if k != "out"},
            "rows": rows,
        }
        write_results(args.out, result)


if __name__ == "__main__":
    main()
