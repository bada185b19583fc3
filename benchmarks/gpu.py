"""Measurements on one GPU: parity of the op, TFLOP/s of attention and products, inference, MFU and kernels of train
steps, and peak memory beside the estimate.

Attention by XLA's blocks and by cuDNN's, this one beside the calls of cuDNN alone.

    python benchmarks/gpu.py --out results/gpu.json                  # measures; needs the GPU
    python benchmarks/gpu.py --missing --out results/gpu.json        # measures what the file lacks
    python benchmarks/gpu.py --target=1xH200 --out results/gpu.json  # adds what the estimates say; needs no GPU
    JAX_PLATFORMS=cpu python benchmarks/gpu.py --small               # the same at toy size, on a CPU: does it run?

Every part is a process of its own: a peak belongs to one program, and a failure to one part. The file is written after
each. Times are medians of rounds after a warm-up; the predicted peak comes from `ringformer estimate` for `--target`,
compiled without a device, and is compared with the most that the allocator held during the steps.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.device_timing import median_seconds
from benchmarks.gpu_inference import INFERENCE, inference, predicted_inference, token_attention
from benchmarks.gpu_shares import head_sizes, products, profiled
from benchmarks.result_files import made, write_results
from ringformer.cli.parser import output_file

ATTENTION = {"full": [(16384, 32, 8), (65536, 8, 2), (4096, 32, 8)], "small": [(256, 4, 2), (512, 4, 2)]}
"""Local length, query heads, key heads; head dim 128."""

FAST = {"remat": "attention"}
STEPS = {
    "full": [
        ("llama_3b", 16384, {}),
        ("llama3.2_1b", 32768, FAST),
        ("llama3.2_1b", 131072, FAST),
        ("llama3.2_1b", 8192, {"kernel": "xla"}),
        ("llama3.2_1b", 65536, {"kernel": "xla", "head_groups": 4}),
    ],
    "small": [("tiny", 512, {}), ("tiny", 256, {"remat_group": 2})],
}
"""Preset, tokens, settings of LlamaConfig: three configurations of different balance of weights and activations, and
the fastest attention."""

PROFILED = {
    "full": [("llama3.2_1b", 32768, FAST), ("llama3.2_1b", 8192, {"kernel": "xla"})],
    "small": [("tiny", 512, {})],
}
"""Train steps whose kernels are timed one by one, as `STEPS`."""

SOME_OUTPUTS = {"optimizer_offload": "state", "offload": True, "remat": "attention"}
OFFLOADED = {
    "full": [
        ("llama3.2_1b", 8192, {"optimizer_offload": "none"}),
        ("llama3.2_1b", 8192, {"optimizer_offload": "moments"}),
        ("llama3.2_1b", 8192, {"optimizer_offload": "state"}),
        ("llama_3b", 16384, {"optimizer_offload": "state"}),
        ("llama_3b", 16384, {"optimizer_offload": "all"}),
        ("llama_3b", 32768, SOME_OUTPUTS | {"head_groups": 4, "full_remat_layers": 10}),
    ],
    "small": [
        ("tiny", 256, {"optimizer_offload": "none"}),
        ("tiny", 256, {"optimizer_offload": "all"}),
        ("tiny", 256, SOME_OUTPUTS | {"full_remat_layers": 1}),
    ],
}
"""Train steps with parts of the state in the host's memory, and one with what layers keep, as `STEPS`."""

WINDOWS = {
    "full": [(4096, 8, 4, 256, 1024), (4096, 8, 8, 128, 2048), (16384, 16, 8, 256, 1024), (16384, 32, 32, 128, 4096)],
    "small": [(256, 4, 2, 32, 48), (8192, 2, 1, 32, 48)],
}
"""Tokens, query heads, key heads, head size, window; the longest are Gemma 3 12B's and OLMo 3 7B's at 128K on eight
devices."""
MOST_DENSE = 4096
"""Tokens up to which dense attention is computed, for errors instead of TFLOP/s."""

BY_ROW = {
    "attention": ATTENTION,
    "windows": WINDOWS,
    "inference": INFERENCE,
    "steps": STEPS,
    "step_kernels": PROFILED,
    "offload": OFFLOADED,
}
"""Parts that measure one configuration after the other, each in a process of its own."""
PARTS = (
    "parity",
    "products",
    "head_sizes",
    "attention",
    "windows",
    "token_attention",
    "inference",
    "steps",
    "step_kernels",
    "offload",
)
ENOUGH_SECONDS = 60
"""Seconds of steps after which four of a configuration are enough."""


def parity(size: str) -> list[dict]:
    """Relative error of o, dq, dk, dv against dense attention in float32, by layout of the heads, dtype and kernel;
    also of cuDNN's calls outside of `jit`."""
    import jax
    import jax.numpy as jnp

    from ringformer.ops.dense_reference import dense_attention
    from ringformer.ops.ring_attention import ring_attention

    rows = []
    T = 4096 if size == "full" else 256  # packed documents: pieces of 1,024 tokens, so two levels of rectangles
    for heads, key_heads, segments in ((8, 8, 1), (8, 2, 1), (8, 1, 3), (8, 2, 40)):
        keys = jax.random.split(jax.random.key(heads + key_heads), 4)
        shapes = [(1, T, heads, 128), (1, T, key_heads, 128), (1, T, key_heads, 128), (1, T, heads, 128)]
        q, k, v, do = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
        ids = jnp.sort(jnp.arange(T) % segments)[None]
        with jax.default_matmul_precision("highest"):
            dense = jax.jit(
                partial(_with_gradients, lambda q, k, v, ids=ids: dense_attention(q, k, v, segment_ids=ids))
            )
            expected = dense(q, k, v, do)
            cases = [("float32", "xla", True), ("bfloat16", "xla", True)]
            cases += [("bfloat16", "cudnn", True)] if _on_gpu() else []
            cases += [("bfloat16", "cudnn", False)] if _on_gpu() and key_heads == 8 else []
            for dtype, kernel, jitted in cases:
                given = {} if segments == 1 else {"segment_ids": ids, "segments": "ascending"}
                op = partial(ring_attention, axis_name=None, kernel=kernel, **given)
                both = jax.jit(partial(_with_gradients, op)) if jitted else partial(_with_gradients, op)
                ours = both(*(x.astype(dtype) for x in (q, k, v, do)))
                errors = [
                    float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b))
                    for a, b in zip(ours, expected, strict=True)
                ]
                rows.append(
                    {
                        "heads": heads,
                        "key_heads": key_heads,
                        "segments": segments,
                        "dtype": dtype,
                        "kernel": kernel,
                        "jitted": jitted,
                        **dict(zip(("o", "dq", "dk", "dv"), errors, strict=True)),
                    }
                )
    return rows


def attention(size: str, index: int) -> list[dict]:
    """TFLOP/s of the op at one length, forward and forward + backward, causal, bfloat16; masked pairs are not counted.
    By kernel, plain and of 16 equal documents; on a GPU also cuDNN's with one document in the form of packed ones, and
    cuDNN's calls alone."""
    import jax
    import jax.numpy as jnp

    from ringformer.ops.ring_attention import ring_attention

    rows = []
    T, heads, key_heads = ATTENTION[size][index]
    shapes = (1, T, heads, 128), (1, T, key_heads, 128), (1, T, key_heads, 128), (1, T, heads, 128)
    keys = jax.random.split(jax.random.key(T), 4)
    q, k, v, do = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    kernels = ("xla", "cudnn") if _on_gpu() else ("xla",)
    ops = {kernel: partial(ring_attention, axis_name=None, kernel=kernel) for kernel in kernels}
    runs = {kernel: (op, partial(_with_gradients, op)) for kernel, op in ops.items()}
    runs |= {"cuDNN's calls": (_call, _calls)} if _on_gpu() else {}
    packed = [("cudnn", "one packed document", 1)] if _on_gpu() else []
    packed += [(kernel, "16 documents", 16) for kernel in kernels]
    for kernel, name, documents in packed:
        ids = (jnp.arange(T) * documents // T)[None]
        op = partial(ring_attention, axis_name=None, kernel=kernel, segment_ids=ids, segments="ascending")
        runs[f"{kernel}, {name}"] = op, partial(_with_gradients, op)
    for name, (forward, both) in runs.items():
        pairs = heads * T * T / 2 / (16 if "16 documents" in name else 1)
        tflops = _tflops(forward, both, (q, k, v, do), 128 * pairs)
        rows.append({"kernel": name, "T": T, "heads": heads, "key_heads": key_heads, **tflops})
    return rows


def windows(size: str, index: int) -> list[dict]:
    """TFLOP/s of the op within the window of a model, by kernel, in the two parts that a rank has in zigzag: forward
    and forward + backward, bfloat16; masked pairs are not counted. The error of o and the gradients, relative to dense
    attention in float32, where this takes little memory."""
    import jax
    import jax.numpy as jnp

    from ringformer.ops.dense_reference import dense_attention

    rows = []
    T, heads, key_heads, head_dim, window = WINDOWS[size][index]
    shapes = (1, T, heads, head_dim), (1, T, key_heads, head_dim), (1, T, key_heads, head_dim), (1, T, heads, head_dim)
    keys = jax.random.split(jax.random.key(T), 4)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    expected = None
    if T <= MOST_DENSE:
        with jax.default_matmul_precision("highest"):
            dense = partial(_with_gradients, partial(dense_attention, window=window))
            expected = jax.jit(dense)(*(x.astype(jnp.float32) for x in arrays))
    for kernel in ("xla", "cudnn") if _on_gpu() else ("xla",):
        op = _within_window(kernel, window)
        both = partial(_with_gradients, op)
        row = {"kernel": kernel, "T": T, "heads": heads, "key_heads": key_heads, "head_dim": head_dim, "window": window}
        if expected is None:
            row |= _tflops(op, both, tuple(arrays), head_dim * heads * window * (T - window / 2))
        else:
            for name, ours, exact in zip(("o", "dq", "dk", "dv"), jax.jit(both)(*arrays), expected, strict=True):
                row[name] = float(jnp.linalg.norm(ours.astype(jnp.float32) - exact) / jnp.linalg.norm(exact))
        rows.append(row)
    return rows


def _tflops(forward: Callable[..., Any], both: Callable[..., Any], arrays: tuple, features: float) -> dict[str, float]:
    """Return the TFLOP/s of the forward pass and of both; `features`: visible pairs times head size."""
    import jax

    from ringformer.models.flops import PAIR_BACKWARD, PAIR_FORWARD, PAIR_LOGITS_AGAIN

    seconds = median_seconds(partial(jax.jit(forward), *arrays[:3]))
    seconds_of_both = median_seconds(partial(jax.jit(both), *arrays))
    flops_of_both = PAIR_FORWARD + PAIR_BACKWARD + PAIR_LOGITS_AGAIN
    return {
        "forward_tflops": PAIR_FORWARD * features / seconds / 1e12,
        "both_tflops": flops_of_both * features / seconds_of_both / 1e12,
    }


def _on_gpu() -> bool:
    import jax

    return jax.default_backend() == "gpu"


def _within_window(kernel: str, window: int) -> Callable[..., Any]:
    """Make the op within a window, of the two parts that a rank has in zigzag."""
    import jax
    import numpy as np

    from ringformer.ops.ring_attention import ring_attention

    chunk = max(128, window // 4)
    chunks = {} if kernel == "cudnn" else {"q_chunk": chunk, "k_chunk": chunk}
    op = partial(ring_attention, axis_name="sp", layout="zigzag", kernel=kernel, window=window, **chunks)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("sp",))
    spec = jax.sharding.PartitionSpec(None, "sp")
    return jax.shard_map(op, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)


def _call(q, k, v):
    """cuDNN's forward and nothing else: `(o, lse)`."""
    from ringformer.ops.kernels import cudnn_calls

    return cudnn_calls.forward(q, k, v, q.shape[-1] ** -0.5, causal=True)


def _calls(q, k, v, do):
    """cuDNN's forward and backward."""
    from ringformer.ops.kernels import cudnn_calls

    o, lse = _call(q, k, v)
    return o, *cudnn_calls.backward(q, k, v, o, lse, do, q.shape[-1] ** -0.5, causal=True)


class TrainSteps:
    """Train steps of one configuration on the first device, on random tokens."""

    def __init__(self, name: str, T: int, settings: dict):
        import jax
        import numpy as np
        from jax.sharding import NamedSharding

        from ringformer.data import Batch
        from ringformer.hardware import chip_of
        from ringformer.models.families.llama import LlamaConfig, preset
        from ringformer.models.kernel_check import check_kernel
        from ringformer.models.kernel_choice import with_kernel
        from ringformer.parallel.mesh import BATCH, make_mesh
        from ringformer.runs.config import OptimizerConfig
        from ringformer.train.program import make_program
        from ringformer.train.state import init_state

        of_model = dict(settings)
        optimizer = OptimizerConfig(offload=of_model.pop("optimizer_offload", "none"))
        configured = LlamaConfig(**preset(name) | of_model)
        self.device = jax.devices()[0]
        self.chip = chip_of(self.device.device_kind)
        mesh = make_mesh("1,1,1,1", [self.device])
        model, line = with_kernel(configured, self.device.platform, self.chip, T, True)
        self.model, self.kernel_line = check_kernel(model, line, configured, mesh, T, packed=True)
        program = make_program(self.model, mesh, optimizer, steps=1000, seq_len=T)
        self.state = init_state(self.model, program.optimizer, program.shardings, mesh, seed=0)
        tokens = np.random.default_rng(0).integers(0, self.model.vocab_size, (1, T + 1), np.int32)
        whole, trained = np.arange(T, dtype=np.int32)[None], np.ones((1, T), bool)
        batch = Batch(tokens[:, :-1], tokens[:, 1:], whole, np.ones_like(whole), trained, ends=~trained)
        self.batch = jax.device_put(batch, NamedSharding(mesh, BATCH))
        self._step = program.step

    def run(self) -> float:
        """Run one step and return its loss."""
        self.state, metrics = self._step(self.state, self.batch)
        return float(metrics["loss"])


def step(size: str, index: int) -> dict:
    """Seconds, MFU and peak memory of whole train steps of one configuration."""
    return timed_steps(*STEPS[size][index])


def offload(size: str, index: int) -> dict:
    """The same with a part of the state in the host's memory."""
    return timed_steps(*OFFLOADED[size][index])


def timed_steps(name: str, T: int, settings: dict) -> dict:
    """Seconds, MFU and peak memory of whole train steps."""
    from ringformer.models.flops import model_flops_per_token

    steps = TrainSteps(name, T, settings)
    seconds: list[float] = []
    while len(seconds) < 6 and not (len(seconds) > 3 and sum(seconds) > ENOUGH_SECONDS):
        start = time.perf_counter()
        loss = steps.run()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[2:])
    shares = {}
    if steps.chip:
        per_second = T / median / steps.chip.bf16_flops
        shares["mfu_causal"] = model_flops_per_token(steps.model, T, causal=True) * per_second
        shares["mfu_palm"] = model_flops_per_token(steps.model, T) * per_second
    held = (steps.device.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "model": name,
        "tokens": T,
        **settings,
        "kernel": steps.model.kernel,
        "kernel_line": steps.kernel_line,
        "loss": loss,
        "step_seconds": median,
        **shares,
        "peak_bytes_allocator": held,
    }


def step_kernels(size: str, index: int) -> dict:
    """Seconds of the kernels of one train step, by kind and by name."""
    name, T, settings = PROFILED[size][index]
    steps = TrainSteps(name, T, settings)
    for _ in range(2):
        steps.run()
    found = profiled(steps.run() for _ in range(1))
    return {"model": name, "tokens": T, **settings, "kernel": steps.model.kernel, **found}


def predicted(size: str, row: dict, target: str) -> dict:
    """Return what `ringformer estimate` predicts for the configuration of a row, without a device."""
    from ringformer.estimate.compiler.process import compile_apart
    from ringformer.estimate.reports.report import estimate_json
    from ringformer.estimate.workloads.targets import find_target
    from ringformer.estimate.workloads.training import Workload, estimate_command
    from ringformer.models.families.llama import LlamaConfig, preset

    name, T, settings = next(configuration for configuration in STEPS[size] if _is_of(row, "steps", configuration))
    model = LlamaConfig(**preset(name) | settings)
    workload = Workload(model, find_target(target), "1,1,1,1", T, name=name).with_kernel()[0]
    estimate = compile_apart(workload)
    said = estimate_json(workload, estimate)
    found = {
        "peak_bytes_estimate": estimate.peak_bytes,
        "step_seconds_model": said["step_seconds_model"],
        "host_waits": sum(said["host_waits"].values()),
        "seconds_source": said["seconds_source"],
    }
    with suppress(ValueError):  # settings that no flag says
        found["estimate_command"] = estimate_command(workload)
    return found


def _with_gradients(run, q, k, v, do):
    import jax

    o, pullback = jax.vjp(run, q, k, v)
    return o, *pullback(do)


def _part(name: str, size: str) -> Any:
    """One part, in a process of its own; its error if it fails."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    words = [sys.executable, __file__, "--part", name, *(["--small"] if size == "small" else [])]
    done = subprocess.run(words, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {"error": done.stderr[-2000:]}
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def add_predictions(results: dict, size: str, target: str) -> None:
    """Add to each measured step and inference what the estimate says of it."""
    for part, prediction in (("steps", predicted), ("inference", predicted_inference)):
        for row in results.get(part, ()):
            if "error" not in row:
                row |= prediction(size, row, target)
            if row.get("peak_bytes_allocator"):
                row["estimate_over_allocator"] = row["peak_bytes_estimate"] / row["peak_bytes_allocator"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="add predictions for this machine, e.g. 1xH200, to the file --out")
    parser.add_argument("--small", action="store_true", help="toy sizes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="measure only these parts")
    parser.add_argument("--missing", action="store_true", help="measure what the file --out lacks, on the same device")
    parser.add_argument("--out", help="write the JSON there, too")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    size = "small" if args.small else "full"
    if args.part:
        import jax

        kind, _, index = args.part.partition(":")
        found = {
            "parity": parity,
            "token_attention": token_attention,
            "products": products,
            "head_sizes": head_sizes,
            "device": lambda _: jax.devices()[0].device_kind,
        }
        of_rows = {
            "attention": attention,
            "windows": windows,
            "steps": step,
            "step_kernels": step_kernels,
            "offload": offload,
            "inference": inference,
        }
        print(json.dumps(of_rows[kind](size, int(index)) if kind in of_rows else found[kind](size)))
        return
    from ringformer.estimate.workloads.targets import find_target

    try:  # before anything is measured
        out = None if args.out is None else output_file(args.out)
        if args.target is not None:
            find_target(args.target)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    adds = "--target" if args.target else "--missing" if args.missing else None
    if adds and (out is None or not out.exists()):
        parser.exit(2, f"{parser.prog}: {adds} adds to measurements: give their file with --out\n")
    if args.target:
        results = json.loads(out.read_text())
        add_predictions(results, size, args.target)
        write_results(out, results)
        return
    results = {
        "what": "measured on one device, but for peak_bytes_estimate (compiled without it)",
        "command": "python benchmarks/gpu.py",
        **made(),
        "jax": version("jax"),
        "device": _part("device", size),
    }
    if args.missing:
        earlier = json.loads(out.read_text())
        if (earlier["device"], earlier["jax"]) != (results["device"], results["jax"]):
            parser.exit(2, f"{parser.prog}: {out} is of {earlier['device']} with JAX {earlier['jax']}\n")
        results = earlier
    for part in args.parts or PARTS:
        measure(results, part, size, args.missing, out)
    print(json.dumps(results, indent=1))


def measure(results: dict, part: str, size: str, missing: bool, out: Path | None) -> None:
    """Measure a part, or with `missing` those of its rows that the results lack, and write the results after each."""
    rows = [row for row in results.get(part, ()) if missing and "error" not in row]
    configurations = BY_ROW[part][size] if part in BY_ROW else [None]
    for index, configuration in enumerate(configurations):
        measured = [row for row in rows if "error" not in row]
        if any(configuration is None or _is_of(row, part, configuration) for row in measured):
            continue
        found = _part(part if configuration is None else f"{part}:{index}", size)
        rows += found if isinstance(found, list) else [found]
        results[part] = rows
        if missing:
            results["added"] = results.get("added", {}) | {part: made()}
        if out:
            write_results(out, results)


def _is_of(row: dict, part: str, configuration: tuple) -> bool:
    """Return whether a row of results is of this configuration."""
    if part == "attention":
        return row["T"] == configuration[0]
    if part == "windows":
        return (row["T"], row["head_dim"]) == (configuration[0], configuration[3])
    if part == "inference":
        return (row["model"], row["tokens"], row["chunk"], row["cache_dtype"]) == configuration
    model, tokens, settings = configuration
    return (row["model"], row["tokens"]) == (model, tokens) and settings.items() <= row.items()


if __name__ == "__main__":
    main()
