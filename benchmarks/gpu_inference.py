"""Inference on one GPU: attention of new tokens to a cache, and whole prefills and decode steps. Parts of `gpu.py`."""

import statistics
import time
from functools import partial

TOKEN_ATTENTION = {"full": [(32, 1, 131072), (8, 4, 262144), (8, 8, 262144)], "small": [(4, 1, 512), (2, 4, 512)]}
"""Key heads, query heads per key head, cached tokens; head dim 128."""

INFERENCE = {
    "full": [
        ("llama_7b", 131072, 16384, "compute"),
        ("llama_7b", 131072, 16384, "int8"),
        ("llama3_8b", 131072, 16384, "compute"),
    ],
    "small": [("tiny", 512, 128, "compute"), ("tiny", 512, 128, "int8")],
}
"""Preset, tokens of the context, tokens of a chunk, dtype of the cache."""

NEW = 33
"""Tokens to generate; the first compiles the step."""


def token_attention(size: str) -> list[dict]:
    """GB/s of the cached bytes that new tokens attend to, a layer after the other, by the form of the products."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from benchmarks.device_timing import median_seconds
    from ringformer.inference.cache import token_attention
    from ringformer.inference.cache.arrays import Cache, Entries, as_entries, layer_cache
    from ringformer.parallel.mesh import make_mesh

    mesh, rows = make_mesh("1,1,1,1", jax.devices()[:1]), []
    P = jax.sharding.PartitionSpec()
    layers = 8 if size == "full" else 2

    def steps(q, cache, loop):
        cache = token_attention.for_tokens(cache, q.shape[2], jax.default_backend())

        def one(q, layer):
            caches = [layer_cache(cache, layer, cache.positions.shape[1])]
            return token_attention.attend_token(q, q[:, :, 0], q[:, :, 0], caches, "sp").astype(q.dtype), None

        if loop:
            return lax.scan(one, q, jnp.arange(layers))[0]
        for layer in range(layers):
            q = one(q, layer)[0]
        return q

    for K, G, S in TOKEN_ATTENTION[size]:
        for dtype in ("compute", "int8"):

            @partial(jax.jit, static_argnums=0)
            def made(int8, K=K, S=S):
                shape = layers, 1, K, S, 128
                entries = (Entries(jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)) for i in (0, 1))
                like = Entries(jnp.int8(0), jnp.float32(0))
                k, v = (as_entries(x.values, like) if int8 else x for x in entries)
                return Cache(k, v, jnp.zeros((1, S), jnp.int32))

            cache = made(dtype == "int8")
            q = jax.random.normal(jax.random.key(2), (1, K, G, 128), jnp.bfloat16)
            byte = sum(x.nbytes for x in jax.tree.leaves(cache[:2]))
            for form, most, loop in (("sums of words", G, True), ("product", 0, True), ("product, no loop", 0, False)):
                token_attention.MOST_SUMS = most
                run = jax.jit(jax.shard_map(partial(steps, loop=loop), mesh=mesh, in_specs=P, out_specs=P))
                seconds = median_seconds(partial(run, q, cache))
                rows.append(
                    {
                        "key_heads": K,
                        "queries_per_key_head": G,
                        "cached": S,
                        "cache_dtype": dtype,
                        "form": form,
                        "gigabytes_per_second": byte / seconds / 1e9,
                    }
                )
                del run
            del cache
    return rows


def inference(size: str, index: int) -> dict:
    """Seconds and MFU of a prefill in chunks, seconds of a token with that cache beside the floor, and memory."""
    import jax
    import numpy as np

    from ringformer.estimate.closed_forms.inference import floor_seconds, prefill_flops
    from ringformer.estimate.workloads.inference import InferenceWorkload
    from ringformer.estimate.workloads.targets import find_target
    from ringformer.hardware import chip_of
    from ringformer.inference.generator import Generator
    from ringformer.inference.weight_shares import weight_shares
    from ringformer.models.families.llama import LlamaConfig, preset
    from ringformer.parallel.mesh import make_mesh
    from ringformer.parallel.parameters import weight_shardings
    from ringformer.train.state import make_init

    name, T, chunk, cache_dtype = INFERENCE[size][index]
    config, mesh = LlamaConfig(**preset(name)), make_mesh("1,1,1,1", jax.devices()[:1])
    drawn = make_init(config, weight_shardings(config, mesh), mesh, seed=0)()

    def in_dtype(x, share):
        y = jax.block_until_ready(x.astype(share.dtype))
        if y.dtype != x.dtype:
            x.delete()
        return y

    params = jax.tree.map(in_dtype, drawn, weight_shares(config, mesh))
    del drawn
    model = Generator(config, params, mesh, max_length=T, prefill_chunk=chunk, cache_dtype=cache_dtype)
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, T - NEW).tolist()
    prefills: list[list[float]] = []
    for _ in range(2):  # the first compiles
        session, seconds = model.session(1), []
        for start in range(0, len(prompt), chunk):
            before = session.timings.prefill_seconds
            session.append([prompt[start : start + chunk]])
            seconds.append(session.timings.prefill_seconds - before)
        prefills.append(seconds)
        if len(prefills) == 1:
            del session
    tokens, moments = [], [time.perf_counter()]
    for (token,) in session.decode(max_new_tokens=NEW):
        tokens.append(token)
        moments.append(time.perf_counter())
    step = statistics.median(np.diff(moments)[1:])
    chip = chip_of(jax.devices()[0].device_kind)
    target = find_target("1xH200" if chip is None else f"1x{chip.name.split()[1]}")
    workload = InferenceWorkload(model.config, target, "1,1,1,1", T, prefill_chunk=chunk, cache_dtype=cache_dtype)
    flops, floor = sum(prefill_flops(workload)), floor_seconds(workload)
    measured = chip is not None
    return {
        "model": name,
        "tokens": T,
        "chunk": chunk,
        "cache_dtype": cache_dtype,
        "kernel_line": model.kernel,
        "prefill_seconds": sum(prefills[-1]),
        "prefill_mfu_causal": flops / sum(prefills[-1]) / chip.bf16_flops if chip else None,
        "chunk_seconds": prefills[-1],
        "token_seconds": step,
        "token_floor_seconds": floor if measured else None,
        "token_over_floor": step / floor if measured else None,
        "peak_bytes_allocator": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "first_tokens": tokens[:4],
    }


def predicted_inference(size: str, row: dict, target: str) -> dict:
    """Return what `ringformer estimate` predicts for the inference of a row, without a device."""
    from ringformer.estimate.compiler.process import compile_apart
    from ringformer.estimate.inference.report import inference_json
    from ringformer.estimate.workloads.inference import DECODE, FIRST_CHUNK, PREFILL, InferenceWorkload
    from ringformer.estimate.workloads.targets import find_target
    from ringformer.models.families.llama import LlamaConfig, preset

    model, options = LlamaConfig(**preset(row["model"])), {"cache_dtype": row["cache_dtype"]}
    workload = InferenceWorkload(
        model, find_target(target), "1,1,1,1", row["tokens"], prefill_chunk=row["chunk"], **options
    ).with_kernel()[0]
    assert isinstance(workload, InferenceWorkload)
    estimates = {name: compile_apart(workload, name) for name in (PREFILL, FIRST_CHUNK, DECODE)}
    prefill = inference_json(workload, PREFILL, estimates)
    decode = inference_json(workload, DECODE, estimates)
    return {
        "peak_bytes_estimate": max(e.peak_bytes for e in estimates.values()),
        "prefill_seconds_model": prefill["prefill_seconds_model"],
        "token_seconds_model": decode["decode_seconds_model"],
        "seconds_source": prefill["seconds_source"],
    }
