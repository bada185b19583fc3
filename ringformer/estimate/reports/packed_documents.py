"""Seconds of a step whose sequences are packed documents, each of which attends to itself alone.

Programs and closed forms count a sequence as one document, the most that attention may have to compute. Here the chunk
pairs of a store's documents take its place (`ringformer/data/packing/ring_work.py`): attention takes less, hides less
of the ring's hops, and waits for the rank with the most pairs. Of several groups of devices (dp, fsdp), each is assumed
to have the mean work.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64

from ringformer.data.loader import Loader
from ringformer.data.packing.mixture import parse_mixture
from ringformer.data.packing.ring_balance import CHUNKS, Balance, balances
from ringformer.data.packing.ring_work import Chunk, RingWork, WorkByRings, kernel_share, overall, ring_work
from ringformer.data.stores.folder import open_one
from ringformer.data.stores.token_store import TokenStore
from ringformer.estimate.closed_forms.block_costs import block_seconds
from ringformer.estimate.closed_forms.communication import attention_passes, exposed_seconds
from ringformer.estimate.closed_forms.training import (
    StepTime,
    attention_seconds,
    computation_seconds,
    ring_hops,
)
from ringformer.estimate.compiler.program_estimate import Estimate
from ringformer.estimate.reports.time_report import COSTS, cost_json, duration, figures, seconds_of
from ringformer.estimate.seconds.overlap import Schedule, Transfer
from ringformer.estimate.seconds.program_seconds import ATTENTION
from ringformer.estimate.workloads.training import Workload
from ringformer.ops.kernels.cudnn_documents import count_pieces
from ringformer.ops.layouts import PARTS, Layout
from ringformer.ops.ring_passes import LOOP
from ringformer.ops.work_list import default_chunk


def seconds_of_documents(
    workload: Workload, by_rings: WorkByRings, schedule: Schedule | None = None, chunk: int | None = None
) -> float:
    """Return the mean seconds of a step of documents, by a compiled step's schedule or else by closed forms.

    cuDNN leaves the pairs within pieces of a shard to XLA (`ops/kernels/cudnn_documents.py`).

    Args:
      by_rings: work of the documents in the workload's layout.
      chunk: tokens of the chunks of `by_rings`; None: those of the workload. The TPU kernels are slower with smaller
        ones, by the shares counted on v5e.
    """
    ranks = workload.ring_size
    model = workload.model
    one = one_document(workload).by_hop[0]
    step = _compiled(schedule, one) if schedule else _counted(workload)
    slower = 1.0
    within = 0.0  # pairs within pieces, which XLA computes
    if chunk and model.kernel == "pallas":
        slower = kernel_share(model.q_chunk or default_chunk(workload.ring_tokens)) / kernel_share(chunk)
    if model.kernel == "cudnn" and schedule is None:
        part = workload.ring_tokens // PARTS[model.layout]
        within = PARTS[model.layout] * part**2 / count_pieces(part)
        xla = replace(workload, model=replace(model, kernel="xla", q_chunk=None, k_chunk=None))
        by_xla = sum(attention_seconds(xla).values()) / one.sum()
    seconds = 0.0
    for rings, (share, work) in by_rings.items():
        pairs = slower * work.by_hop / one.sum()  # as shares of one document's
        step_seconds = step.rest + step.attention * float(pairs.sum(axis=1).mean())
        if within:
            of_xla = float(np.minimum(within, work.by_hop.sum(axis=1)).mean())
            step_seconds += of_xla * (by_xla - step.attention / one.sum())
        hops = ranks // rings - 1
        if hops:
            for link, cover in step.links:
                waits = np.maximum(0.0, link - cover * pairs[:, :hops])
                step_seconds += float(waits.sum(axis=1).mean())
        seconds += share * step_seconds
    return seconds


def one_document(workload: Workload) -> RingWork:
    """Count the work of one document that fills a sequence, with the workload's layout and chunks."""
    model = workload.model
    ids = np.zeros(workload.seq_len, np.int8)
    gathered = model.ring == "gathered"
    return ring_work(ids, model.layout, workload.ring_size, _chunks(workload), gathered=gathered)


def _chunks(workload: Workload) -> Chunk:
    default = default_chunk(workload.ring_tokens)
    return workload.model.q_chunk or default, workload.model.k_chunk or default


class _Step(NamedTuple):
    """Seconds of a step of one document."""

    rest: float
    """All seconds but those of attention's pairs and of waiting for its hops."""
    attention: float
    links: list[tuple[float, float]]
    """For each transfer of a hop: seconds of one hop in all layers and passes, and of attention's pairs meanwhile if
    all of them were computed in one hop."""


def _counted(workload: Workload) -> _Step:
    attention = attention_seconds(workload)
    exposed = exposed_seconds(workload)
    pairs = sum(attention.values())
    passes = attention_passes(workload, workload.model.num_layers)
    links = []
    for name, hop in ring_hops(workload).items():
        links.append((hop.link * passes[name], attention[name]))
    rest = computation_seconds(workload) + block_seconds(workload) - pairs
    return _Step(rest + sum(exposed.values()) - exposed["ring"], pairs, links)


def _compiled(schedule: Schedule, one: Float64[np.ndarray, " hops"]) -> _Step:
    of_purpose = {name: spent.overlapped for name, spent in schedule.purposes.items()}
    attention = sum(seconds for name, seconds in of_purpose.items() if name.startswith(f"{ATTENTION} "))
    hops = [t for t in schedule.transfers if t.in_ring_loop]
    exposed = schedule.exposed_seconds - sum(t.count * t.wait for t in hops)
    loops: dict[str, list[Transfer]] = {}
    for t in hops:
        loops.setdefault(t.op_name.partition(f"/{LOOP}/")[0], []).append(t)
    links = []
    for together in loops.values():  # in a hop: each queues behind the others, and the same pairs cover all
        count = max(t.count for t in together) / (len(one) - 1)
        seconds = max(t.seconds for t in together)
        cover = max(t.cover for t in together)
        links.append((count * seconds, count * cover / float(one[1:].mean() / one.sum())))
    return _Step(sum(of_purpose.values()) - attention + exposed, attention, links)


def documents_json(workload: Workload, estimate: Estimate | None) -> dict[str, Any] | None:
    """Return a step's seconds and attention's work by the documents of a config's stores, as a JSON object.

    None if there are no stores yet, if tokens do not attend to their document alone, if they see a window, or if the
    sequence or the ring would take long to count.
    """
    data = workload.data
    if (
        data is None
        or not workload.has_closed_forms
        or set(workload.windows) != {0}
        or data.packed_attention != "document"
    ):
        return None
    folders = parse_mixture(data.mixture) if data.mixture else [(data.store, 1)]
    stores = []
    for path, share in folders:
        folder = Path(path) / "train"
        if not (folder / "store.json").is_file():
            return None
        stores.append((TokenStore(folder), share))
    loader = Loader(
        stores,
        batch_size=workload.batch_size,
        seq_len=workload.seq_len,
        seed=workload.seed,
        layout=workload.model.layout,
        ring_size=workload.ring_size,
        packing=data,
    )
    gathered = workload.model.ring == "gathered"
    by_rings = loader.work_by_rings(_chunks(workload), workload.sequences_at_once, gathered)
    if by_rings is None:
        return None
    schedule = estimate.schedule if estimate else None
    work = overall(by_rings)
    time = StepTime(seconds_of_documents(workload, by_rings, schedule), 0.0, workload.step_tokens)
    return {
        "one_document_step_seconds_model": seconds_of_documents(workload, {1: (1.0, one_document(workload))}, schedule),
        "step_seconds_model": time.step,
        "tokens_per_second_model": time.tokens_per_second,
        **(dict.fromkeys(COSTS) | cost_json(workload, time)),
        "slowest_over_mean": work.balance,
        "computed_over_visible": work.excess,
    }


def documents_text(documents: dict[str, Any]) -> str:
    """Return the line on `documents_json`."""
    balance = documents["slowest_over_mean"]
    excess = documents["computed_over_visible"]
    days = documents["days_model"]
    whole = f", {duration(86400 * days)} in all" if days else ""
    return (
        f"by the documents of its store: modelled {seconds_of(documents['step_seconds_model'])} per step, "
        f"{figures(documents['tokens_per_second_model'])} tokens per second{whole}. One document a sequence takes "
        f"{seconds_of(documents['one_document_step_seconds_model'])} by the same count; attention takes "
        f"{balance * excess:.2f} times its ideal (slowest rank over mean {balance:.2f}, computed over visible pairs "
        f"{excess:.2f})"
    )


def in_layout(workload: Workload, layout: Layout) -> Workload:
    """Return the workload in another layout, of which cuDNN takes documents only in some: `auto` chooses then."""
    model = replace(workload.model, layout=layout)
    if model.kernel == "cudnn":
        model = replace(model, kernel="auto")
    return replace(workload, model=model).with_kernel()[0]


class Packed(NamedTuple):
    """A way to pack documents, and the mean seconds of its step."""

    way: Balance
    step: float


def ways_to_pack(workload: Workload, store: str) -> list[Packed]:
    """Return layouts, chunks and buckets for the documents of a store that are packed whole, with the seconds of closed
    forms, fastest first; among equals to three digits, those with the least work. Only chunks of the TPU kernels are
    chosen, up to the workload's; others keep theirs.

    Raises ValueError for a ring that is too large to count.
    """
    lengths = np.diff(open_one(store, ("train",)).offsets)
    timed = []
    own = workload.model.q_chunk or default_chunk(workload.ring_tokens)
    chunks: tuple[int, ...] = (own,)
    if workload.model.kernel == "pallas":
        smaller = [chunk for chunk in CHUNKS if chunk < own]
        chunks = own, *smaller
    at_once = workload.sequences_at_once
    gathered = workload.model.ring == "gathered"
    for way in balances(lengths, workload.seq_len, workload.ring_size, chunks, at_once, gathered):
        seconds = seconds_of_documents(in_layout(workload, way.layout), way.by_rings, chunk=way.chunk)
        timed.append(Packed(way, seconds))
    return sorted(timed, key=lambda packed: (float(f"{packed.step:.3g}"), packed.way.work.product, packed.way.buckets))
