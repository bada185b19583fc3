"""`ringformer tune`."""

import argparse
import datetime
import json
import sys
from collections.abc import Callable

from ringformer.cli.parser import output_file
from ringformer.files.atomic import write_whole


def add_tune(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], int]:
    """Add the arguments of `ringformer tune`."""
    parser.description = (
        "Find the chunks with which the TPU kernels (model.kernel=pallas) take the fewest cycles and fit a chip's "
        "VMEM, and write the table that the kernels read. Cycles are counted in machine code, without the chip: 5 to "
        "30 minutes per target."
    )
    parser.add_argument("--target", required=True, help="v4, v5e, v5p, v6e, tpu7x, or a slice of one of them")
    parser.add_argument("--out", metavar="FILE", help="file of the table; default: in the installed package")
    return _tune


def _tune(args: argparse.Namespace) -> int:
    from ringformer.estimate.compiled.dump import CompilerFailure
    from ringformer.estimate.kernels.chunk_search import HEAD_DIMS, best_of, search
    from ringformer.estimate.kernels.pair_kernels import TARGETS, find_generation
    from ringformer.estimate.workloads.targets import compiled_by, find_target
    from ringformer.ops.kernels.chunk_sizes import STRETCH, TABLES

    generation = find_generation(args.target)
    out = output_file(str(TABLES / f"{generation}.json") if args.out is None else args.out)
    table = {
        "generation": generation,
        "what": f"compiled, nothing was run: cycles of a causal stretch of {STRETCH:,} tokens, two forwards and one "
        "backward, over those that the needed matrix products take",
        "compiled_by": compiled_by(find_target(TARGETS[generation])),
        "date": datetime.date.today().isoformat(),
    }
    sizes = []
    for head_dim in HEAD_DIMS:
        candidates = []
        try:
            for candidate in search(generation, head_dim):
                candidates.append(candidate)
                result = candidate.why or f"{candidate.share_of_ideal:.1%} of ideal"
                chunks = f"{candidate.q_chunk} x {candidate.k_chunk}"
                print(f"{generation}, heads of {head_dim}: {chunks}: {result}", flush=True)
        except CompilerFailure as failure:
            print(f"ringformer tune: heads of {head_dim}: the compiler broke down: {failure}", file=sys.stderr)
            return 1
        best = best_of(candidates)
        print(f"{generation}, heads of {head_dim}: best chunks {best.q_chunk} x {best.k_chunk}", flush=True)
        sizes.append(
            {
                "head_dim": head_dim,
                "q_chunk": best.q_chunk,
                "k_chunk": best.k_chunk,
                "share_of_ideal": best.share_of_ideal,
                "candidates": [candidate._asdict() for candidate in candidates],
            }
        )
    write_whole(out, json.dumps(table | {"sizes": sizes}, indent=1) + "\n")
    print(f"written to {out}")
    return 0
