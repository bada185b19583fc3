"""Check of the attention kernel on the devices that will run it, against XLA's blocks: the safety of `kernel="auto"`.

Counts and compilers are used to judge a kernel, but they say nothing about the numbers that a chip, its driver and its
libraries compute. So a run, an evaluation or a generation first tries the kinds of chunk pairs that it will compute,
forward and backward, in its own shapes.
"""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from ringformer.files.hashes import content_hash, hash_sources
from ringformer.models.attention_options import attention_options
from ringformer.models.decoder_config import DecoderConfig
from ringformer.models.interface import ModelConfig
from ringformer.models.layer_kinds import LayerKind
from ringformer.ops import kernels, online_softmax
from ringformer.ops.attention import Attention, Blocks, Mask, Shard
from ringformer.ops.blockwise_attention import Cotangents, Keys, Queries
from ringformer.ops.head_exchange import key_copies
from ringformer.ops.kernels.block_kernels import Kernel, without_padding
from ringformer.ops.layouts import Layout
from ringformer.ops.ring import Ring
from ringformer.ops.ring_vjp import attention_on_ring
from ringformer.ops.streams import Stream, halves_of_heads
from ringformer.ops.work_list import WorkList

MOST_TOKENS = 8192
"""Most tokens of the shards that are tried."""

FACTOR = 2.0
"""Largest error of a kernel, relative to the error of XLA's blocks in the same dtype."""

INPUTS = ("q", "k", "v", "do")
OUTPUTS = ("o", "dq", "dk", "dv")

PACKAGES = ("jax", "jaxlib", "libtpu", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
"""Packages whose versions are part of a remembered check; with another version, the check is repeated."""


@dataclass(frozen=True)
class Trial:
    """Shapes and options of the blocks to try."""

    kernel: Kernel
    heads: int
    key_heads: int
    head_dim: int
    dtype: str
    layout: Layout
    tokens: int
    q_chunk: int | None
    k_chunk: int | None
    packed: bool
    """True to try packed documents too."""
    backward: bool
    window: int = 0
    """Keys that a query sees at most in some layers; 0: all."""
    window_chunks: tuple[int | None, int | None] = (None, None)
    """Queries and keys of a chunk pair in the layers with a window."""


def check_kernel(
    model: ModelConfig,
    line: str,
    configured: ModelConfig,
    mesh: Mesh,
    local_tokens: int,
    *,
    packed: bool = False,
    backward: bool = True,
) -> tuple[ModelConfig, str]:
    """Try the kernel of a model on one of this process's devices; return the model with a kernel that passed, and a
    line that describes this kernel.

    All processes agree: if the kernel fails on one of them, all use XLA's blocks. A passed check is remembered in the
    user's cache folder for the chip, the shapes, and the versions of packages and kernels.

    Args:
      model: model with its kernel and chunks; line: their description (`kernel_choice.with_kernel`).
      configured: the model before the kernel was chosen. Only kernel="auto" may become another kernel.
      mesh: mesh (dp, fsdp, tp, sp) of the devices that will run the model.
      local_tokens: tokens of a sequence on a rank of the ring.
      packed: True if the model gets segment ids. backward: True if the model is trained.

    Raises:
      ValueError: the check fails for a kernel that the config names; the message says how to go on.
    """
    if not isinstance(model, DecoderConfig) or model.kernel in ("xla", "auto") or not model.kernel_check:
        return model, line
    if model.attention == "vanilla":  # uses no kernel
        return model, line
    device = next(d for d in mesh.devices.flat if d.process_index == jax.process_index())
    trial = make_trial(model, local_tokens, mesh.shape["tp"], mesh.shape["sp"] // model.ulysses, packed, backward)
    fault = _remembered(trial, device) or ""
    if jax.process_count() > 1:
        failed = np.flatnonzero(multihost_utils.process_allgather(np.int32(bool(fault))))
        if failed.size and not fault:
            fault = f"it failed on process {failed[0]}"
    if not fault:
        return model, f"{line}; checked on {device.device_kind}"
    if getattr(configured, "kernel", "auto") != "auto":
        raise ValueError(
            f"kernel={model.kernel!r} is wrong on {device.device_kind}: {fault}. kernel='xla' works; "
            "kernel_check=false uses it all the same"
        )
    chunks = {name: getattr(configured, name) for name in ("q_chunk", "k_chunk")}
    return replace(model, kernel="xla", **chunks), (
        f"kernel xla: WARNING: kernel={model.kernel!r} FAILED its check on {device.device_kind}: {fault}"
    )


def make_trial(model: DecoderConfig, local_tokens: int, tp: int, ring_size: int, packed: bool, backward: bool) -> Trial:
    """Choose blocks that represent those of a model: they have its heads and chunks, and at least two chunks in each
    part."""
    chunks = max(model.q_chunk or 0, model.k_chunk or 0)
    window = model.window
    parts = model.sequence_parts(ring_size)
    of_window = attention_options(model, LayerKind(window), local_tokens, documents=packed, parts=parts)
    if of_window["kernel"] != model.kernel:
        window = 0  # XLA computes these layers
    heads, key_heads = (max(1, n // tp // model.head_groups) for n in (model.num_heads, model.num_kv_heads))
    tokens = min(local_tokens, max(4 * chunks, MOST_TOKENS // 2), MOST_TOKENS)
    return Trial(
        model.kernel,  # type: ignore[arg-type]
        heads // model.ulysses,
        key_heads * key_copies(model.ulysses, key_heads) // model.ulysses,
        model.head_dim,
        model.compute_dtype,
        model.layout,
        max(2, tokens // 2 * 2),
        model.q_chunk,
        model.k_chunk,
        packed,
        backward,
        window,
        (of_window["q_chunk"], of_window["k_chunk"]),
    )


def find_fault(trial: Trial, device: jax.Device) -> str | None:
    """Compare the kernel with XLA's blocks on a device. Return a description of the first difference, or of the error
    that kept it from being checked; None if there is none."""
    try:
        with jax.default_device(device):
            arrays = _arrays(trial)
            with jax.default_matmul_precision("highest"):
                truth = _blocks(replace(trial, kernel="xla", dtype="float32"), arrays)
            limits = _errors(_blocks(replace(trial, kernel="xla"), arrays), truth)
            errors = _errors(_blocks(trial, arrays), truth)
    except Exception as error:  # any error of a compiler, a library or the memory is a verdict
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
    for name, limit in limits.items():
        if not errors[name] <= max(FACTOR * limit, 1e-5):
            return f"the error of {name} is {errors[name]:.1e}, that of kernel='xla' is {limit:.1e}"
    return None


def _arrays(trial: Trial) -> dict[str, np.ndarray]:
    """Draw queries, keys, values and cotangents, and ids of documents over the keys and then the queries."""
    rng = np.random.default_rng(0)
    T = trial.tokens
    shapes = dict.fromkeys(("q", "do"), (1, T, trial.heads, trial.head_dim))
    shapes |= dict.fromkeys(("k", "v"), (1, T, trial.key_heads, trial.head_dim))
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    ends = np.array([T + 1])
    if T >= 8:
        ends = np.sort(rng.choice(np.arange(T // 2, 3 * T // 2), 5, replace=False))
    ids = np.searchsorted(ends, np.arange(2 * T), side="right").astype(np.int32)[None]
    return {**arrays, "before": ids[:, :T], "own": ids[:, T:]}


def _blocks(trial: Trial, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Compute a rank's own block, a block of an earlier rank and one of a later rank, each without and with
    documents."""
    outputs: dict[str, np.ndarray] = {}
    for source, earlier in (("own", None), ("earlier", True), ("later", False)):
        kinds: dict[str, tuple[np.ndarray | None, np.ndarray | None]] = {"block": (None, None)}
        if trial.packed and source != "later":
            of_keys = "own" if source == "own" else "before"
            kinds["documents"] = arrays["own"], arrays[of_keys]
        for kind, ids in kinds.items():
            inputs = [jnp.asarray(arrays[name], trial.dtype) for name in INPUTS]
            block = jax.jit(partial(_block, trial, earlier))(*inputs, *ids)
            for key in OUTPUTS:
                if key in block:
                    outputs[f"{key} of the {source} {kind}"] = np.asarray(block[key], np.float32)
    if trial.window:
        results = jax.jit(partial(_window, trial))(*(jnp.asarray(arrays[name], trial.dtype) for name in INPUTS))
        outputs |= {f"{key} in a window": np.asarray(x, np.float32) for key, x in results.items()}
    return outputs


def _window(trial: Trial, q, k, v, do) -> dict[str, jax.Array]:
    """Compute o and the gradients within a window that leaves out some pairs of chunks."""
    blocks = Blocks(trial.head_dim**-0.5, trial.kernel, *trial.window_chunks)
    mask = Mask(window=min(trial.window, trial.tokens * 3 // 8))
    attention = Attention(Ring(None, trial.layout), blocks, mask)
    o, vjp = jax.vjp(lambda *qkv: attention_on_ring(attention, *qkv, None, None, None, None)[0], q, k, v)
    if not trial.backward:
        return {"o": o}
    return dict(zip(OUTPUTS, (o, *vjp(do)), strict=True))


def _block(trial: Trial, earlier: bool | None, q, k, v, do, q_ids, k_ids) -> dict[str, jax.Array]:
    """Compute o and the gradients of one block, with the softmax over only its keys."""
    K = trial.key_heads
    attention = Attention(
        Ring(None, trial.layout), Blocks(trial.head_dim**-0.5, trial.kernel, trial.q_chunk, trial.k_chunk)
    )
    attention, (q, k, v, _, q_ids, k_ids) = attention.in_whole_chunks(Shard(q, k, v, None, q_ids, k_ids))
    blocks = attention.blocks
    do = attention.whole_queries(do)
    queries = Queries(rearrange(q, "b t (k g) d -> b k g t d", k=K), q_ids)
    keys = Keys(rearrange(jnp.stack([k, v]), "two b s k d -> two b k s d"), k_ids, None)
    source = None if earlier is None else jnp.asarray(earlier)
    work_list = attention.work_list(q.shape[1], k.shape[1], source, Stream())
    state = online_softmax.init(queries.q.shape[:-1], trial.head_dim)
    state = blocks.forward(state, queries, keys, work_list)
    o = online_softmax.output(state)
    outputs = {"o": o}
    if trial.backward:
        do = rearrange(do, "b t (k g) d -> b k g t d", k=K)
        rows = [*online_softmax.shift_and_weight(state.m, state.l), (o * do).sum(-1)]
        cotangents = blocks.code.prepare(Cotangents(do, jnp.stack(rows), o.astype(q.dtype), None))
        dq = jnp.zeros(queries.q.shape, jnp.float32)
        if earlier is not None and blocks.code.adds_gradients and blocks.code.has_even_halves(K):
            dq, (dk, dv) = _backward_by_halves(blocks, queries, keys, cotangents, work_list)
        else:
            dq, gradients = blocks.backward(dq, queries, keys, cotangents, work_list)
            dk, dv = gradients.kv
        outputs |= {"dq": dq, "dk": dk, "dv": dv}
    return {name: without_padding(x, attention.ring.parts, trial.tokens, x.ndim - 2) for name, x in outputs.items()}


def _backward_by_halves(
    blocks: Blocks, queries: Queries, keys: Keys, cotangents: Cotangents, work_list: WorkList
) -> tuple[jax.Array, jax.Array]:
    """Compute dq and [dk, dv] by halves of the key heads, as on a ring. Each half is computed twice: the second time
    adds to gradients that are there, and both are divided by two."""
    dqs = []
    sums = []
    for half in halves_of_heads(keys.kv.shape[2], (1, 1)):
        heads = half.heads
        do, rows, *_ = cotangents
        their = queries._replace(q=queries.q[:, heads]), keys._replace(kv=keys.kv[:, :, heads])
        mine = *their, Cotangents(do[:, heads], rows[:, :, heads]), work_list
        dq, once = blocks.backward(jnp.zeros(mine[0].q.shape, jnp.float32), *mine)
        dq, twice = blocks.backward(dq, *mine, once)
        dqs.append(dq)
        sums.append(jnp.asarray(twice.kv))
    return jnp.concatenate(dqs, axis=1) / 2, jnp.concatenate(sums, axis=2) / 2


def _errors(outputs: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the relative norm of each difference; for an array that should be 0, the norm itself."""
    norms = {name: float(np.linalg.norm(x)) or 1.0 for name, x in truth.items()}
    return {name: float(np.linalg.norm(outputs[name] - x)) / norms[name] for name, x in truth.items()}


# --- checks that passed before ------------------------------------------------------------------------------------


def _remembered(trial: Trial, device: jax.Device) -> str | None:
    """Run a trial on a device, unless it passed there before; return the fault, or None."""
    path = _cache_folder() / _key(trial, device)
    if path.is_file():
        return None
    fault = find_fault(trial, device)
    if fault is None:
        with suppress(OSError):  # a home that cannot be written costs a second at the next start
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return fault


def _cache_folder() -> Path:
    """Return the folder with an empty file for each trial that passed, named by a hash."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "ringformer" / "checked_kernels"


def _key(trial: Trial, device: jax.Device) -> str:
    versions = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    folder = Path(next(iter(kernels.__path__)))
    sources = hash_sources(folder.parent)
    text = json.dumps([asdict(trial), device.device_kind, versions, sources], sort_keys=True)
    return content_hash(text.encode())
