"""Seconds of a step whose sequences are packed documents, each of which attends to itself alone.

Programs and closed forms count a sequence as one document, the most that attention may have to compute. Here the chunk
pairs of a store's documents take its place (`ringformer/data/packing/ring_work.py`): attention takes less, hides less
of the ring's hops, and waits for the rank with the most pairs. Of several groups of devices (dp, fsdp), each is assumed
to have the mean work.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ringformer.data.loader import Loader
from ringformer.data.packing.mixture import parse_mixture
from ringformer.data.packing.ring_balance import CHUNKS, Balance, balances
from ringformer.data.packing.ring_work import WorkByRings, kernel_share, overall
from ringformer.data.stores.folder import open_one
from ringformer.data.stores.token_store import TokenStore
from ringformer.estimate.block_costs import block_seconds
from ringformer.estimate.closed_forms import (
    StepTime,
    attention_seconds,
    causal_excess,
    computation_seconds,
    ring_hops,
)
from ringformer.estimate.communication import attention_passes, exposed_seconds
from ringformer.estimate.program_estimate import Estimate
from ringformer.estimate.seconds.overlap import Schedule
from ringformer.estimate.seconds.program_seconds import ATTENTION
from ringformer.estimate.time_report import figures
from ringformer.estimate.workload import Workload
from ringformer.ops.layouts import Layout
from ringformer.ops.work_list import default_chunk


def seconds_of_documents(
    workload: Workload, by_rings: WorkByRings, schedule: Schedule | None = None, chunk: int | None = None
) -> float:
    """Return the mean seconds of a step of documents, by a compiled step's schedule or else by closed forms.

    cuDNN computes the pairs that come with hops, and XLA those of a rank's own keys (`ops/kernels/cudnn_documents.py`).

    Args:
      by_rings: work of the documents in the workload's layout.
      chunk: tokens of the chunks of `by_rings`; None: those of the workload. The TPU kernels are slower with smaller
        ones, by the shares counted on v5e.
    """
    ranks, model = workload.ring_size, workload.model
    excess = causal_excess(model.layout, workload.ring_tokens, ranks, model.q_chunk)
    one_document = workload.seq_len**2 / 2 * excess / ranks  # pairs of the slowest rank
    split = model.kernel == "cudnn"
    step = _compiled(schedule) if schedule and not split else _counted(workload)
    if chunk and model.kernel == "pallas":
        one_document *= kernel_share(chunk) / kernel_share(model.q_chunk or default_chunk(workload.ring_tokens))
    by_xla = sum(attention_seconds(replace(workload, model=replace(model, kernel="xla"))).values())
    seconds = 0.0
    for rings, (share, work) in by_rings.items():
        pairs, hops = work.slowest / one_document, (ranks / rings - 1) / max(1, ranks - 1)
        own = work.own / one_document if split else 0.0
        seconds += share * (step.rest + own * by_xla + step.attention(pairs - own) + step.waits(pairs - own, hops))
    return seconds


class _Step(NamedTuple):
    """Seconds of a step of one document: those without attention and its hops, and those of each pass of attention."""

    rest: float
    passes: Mapping[str, float]
    """Seconds of chunk pairs."""
    links: list[tuple[float, float]]
    """Seconds of all executions of a hop on the ring's links, and of the chunk pairs meanwhile."""

    def attention(self, pairs: float) -> float:
        """Return the seconds of a share of the pairs."""
        return pairs * sum(self.passes.values())

    def waits(self, pairs: float, hops: float) -> float:
        """Return the seconds that shares of the pairs leave exposed of a share of the hops."""
        return sum(max(0.0, hops * link - pairs * cover) for link, cover in self.links)


def _counted(workload: Workload) -> _Step:
    attention, exposed = attention_seconds(workload), exposed_seconds(workload)
    rest = computation_seconds(workload) + block_seconds(workload) - sum(attention.values())
    passes = attention_passes(workload)
    links = [
        ((workload.ring_size - 1) * hop.link * passes[name], attention[name])
        for name, hop in ring_hops(workload).items()
    ]
    return _Step(rest + sum(exposed.values()) - exposed["ring"], attention, links)


def _compiled(schedule: Schedule) -> _Step:
    of_purpose = {name: spent.overlapped for name, spent in schedule.purposes.items()}
    attention = {name: seconds for name, seconds in of_purpose.items() if name.startswith(f"{ATTENTION} ")}
    hops = [t for t in schedule.transfers if t.in_ring_loop]
    links = [(t.count * t.seconds, t.count * t.cover) for t in hops]
    exposed = schedule.exposed_seconds - sum(t.count * t.wait for t in hops)
    return _Step(sum(of_purpose.values()) - sum(attention.values()) + exposed, attention, links)


def documents_json(workload: Workload, estimate: Estimate | None) -> dict | None:
    """Return a step's seconds and attention's work by the documents of a config's stores, as a JSON object.

    None if there are no stores yet, if tokens do not attend to their document alone, if they see a window, or if the
    sequence or the ring would take long to count.
    """
    data = workload.data
    if data is None or not workload.has_closed_forms or workload.window or data.packed_attention != "document":
        return None
    folders = parse_mixture(data.mixture) if data.mixture else [(data.store, 1)]
    if not all((Path(path) / "train" / "store.json").is_file() for path, _ in folders):
        return None
    loader = Loader(
        [(TokenStore(Path(path) / "train"), share) for path, share in folders],
        batch_size=workload.batch_size,
        seq_len=workload.seq_len,
        seed=workload.seed,
        layout=workload.model.layout,
        ring_size=workload.ring_size,
        packing=data,
    )
    by_rings = loader.work_by_rings(workload.model.q_chunk)
    if by_rings is None:
        return None
    schedule, work = estimate.schedule if estimate else None, overall(by_rings)
    time = StepTime(seconds_of_documents(workload, by_rings, schedule), 0.0, workload.step_tokens)
    return {
        "step_seconds_model": time.step,
        "tokens_per_second_model": time.tokens_per_second,
        "days_model": workload.tokens and time.days(workload.tokens),
        "slowest_over_mean": work.balance,
        "computed_over_visible": work.excess,
    }


def documents_text(documents: dict) -> str:
    """Return the line on `documents_json`."""
    balance, excess = documents["slowest_over_mean"], documents["computed_over_visible"]
    days = f", {documents['days_model']:,.3g} days" if documents["days_model"] else ""
    return (
        f"by the documents of its store: modelled {figures(documents['step_seconds_model'])} s per step, "
        f"{figures(documents['tokens_per_second_model'])} tokens per second{days}; attention takes "
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
    forms, fastest first. Only chunks of the TPU kernels are chosen; others keep theirs."""
    lengths, timed = np.diff(open_one(store, ("train",)).offsets), []
    model = workload.model
    chunks = CHUNKS if model.kernel == "pallas" else (model.q_chunk or default_chunk(workload.ring_tokens),)
    for way in balances(lengths, workload.seq_len, workload.ring_size, chunks):
        seconds = seconds_of_documents(in_layout(workload, way.layout), way.by_rings, chunk=way.chunk)
        timed.append(Packed(way, seconds))
    return sorted(timed, key=lambda packed: packed.step)
