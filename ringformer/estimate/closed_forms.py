"""Closed forms: what a step takes by count, before any compiler is asked. Everything here is modelled."""

from dataclasses import dataclass

from ringformer.estimate.seconds.overlap import Schedule
from ringformer.estimate.seconds.program_seconds import USUAL, Efficiency, efficiency
from ringformer.estimate.targets import Target
from ringformer.estimate.workload import Workload
from ringformer.hardware import Chip
from ringformer.models.flops import (
    PAIR_BACKWARD,
    PAIR_FORWARD,
    PAIR_LOGITS_AGAIN,
    executed_attention_flops,
    executed_flops,
    forward_runs,
)
from ringformer.models.llama_config import LlamaConfig
from ringformer.ops.layouts import Layout
from ringformer.ops.work_list import default_chunk

CLOSED_FORM = "closed form"
"""How the source of seconds begins that are none of a compiled program."""

LOGITS_ON_CHIP = {"v4": 32 * 2**20, "v5e": 32 * 2**20, "v6e": 32 * 2**20}
"""Bytes of a chunk pair's float32 logits that the TPU compiler keeps on the chip, by generation: larger ones, and all
of the other generations in every program that was compiled, lie in HBM. Compiled programs say it themselves."""

SPILLED = {"tpu": (3.4, 4.2), "gpu": (6.5, 11.0)}
"""HBM bytes of a chunk pair, forward and backward, for each byte of its logits where these lie there: of compiled
programs of v5e and A100 (there 5.2 to 8.0, and 9.7 to 12.2)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the target."""

    compute: float
    exposed: float
    """Communication that the schedule leaves uncovered, at the link's full rate."""
    tokens: int
    floor: float = 0.0
    """The roofline: no instruction faster than its FLOPs at the peak and its bytes allow."""
    serial: float = 0.0
    """As long as it takes if no instruction's bytes move while it computes: the other end of the error band."""
    counted: float = 0.0
    """The share of `compute` that machine code or HBM bytes say."""
    has_machine_code: bool = True
    """Whether machine code is counted at all, which it is on TPU."""
    closed_form: bool = False
    """Whether `compute` is none of a compiled program."""
    assumed: Efficiency = USUAL
    """What the rest counts on."""

    @property
    def step(self) -> float:
        return self.compute + self.exposed

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step

    @property
    def source(self) -> str:
        """Where the seconds come from, in words."""
        if self.closed_form:
            spilling = "" if self.assumed.pairs_of else ", and logits that spill at the memory's rate"
            return f"{CLOSED_FORM}: {self.assumed}{spilling}"
        if self.counted == 0:
            return str(self.assumed)
        by = "machine code or HBM bytes" if self.has_machine_code else "HBM bytes"
        return f"{self.counted:.0%} of the computation by {by}, the rest {self.assumed}"

    def days(self, tokens: float) -> float:
        """Days that it takes to train on so many tokens."""
        return tokens / self.tokens_per_second / 86400


def step_time(schedule: Schedule, tokens: int) -> StepTime:
    """The time of a compiled step, from its program and its schedule."""
    seconds = schedule.seconds
    return StepTime(
        seconds.overlapped,
        schedule.exposed_seconds,
        tokens,
        floor=seconds.floor,
        serial=seconds.busy + seconds.memory,
        counted=seconds.counted / max(seconds.overlapped, 1e-30),
        assumed=schedule.rates.efficiency,
        has_machine_code=schedule.rates.cycles > 0,
    )


def causal_excess(layout: Layout, local: int, ranks: int, chunk: int | None = None) -> float:
    """Pairs of a query and a key that a ring's busiest ranks compute, over those that a causal mask leaves a rank.

    Every hop waits for its busiest rank: an uneven layout costs up to 2. With m chunks a shard, blocks that a mask cuts
    along their diagonal cost 1 + 1/m: the own block, and with stripes all of them.
    """
    m = -(-local // (chunk or default_chunk(local)))
    cut = m * (m + 1) / 2
    visiting = {"zigzag": m * m / 2, "striped": cut, "contiguous": m * m}[layout]
    return (cut + (ranks - 1) * visiting) / (ranks * m * m / 2)


def computation_seconds(workload: Workload) -> float:
    """Seconds of one step's computation on its busiest devices, as if all communication were hidden."""
    model, target = workload.model, workload.target
    peak, (_, forwards) = target.chip.flops(model.compute_dtype), forward_runs(model)
    ring = workload.mesh_shape[3] if model.attention == "ring" else 1
    excess = causal_excess(model.layout, workload.seq_len // ring, ring, model.q_chunk)
    each = workload.batch_size / target.num_devices  # of a sequence's work, a device's
    attention = executed_attention_flops(model, workload.seq_len) * each
    rest = executed_flops(model, workload.seq_len) * each - attention
    parts = ((forwards, PAIR_FORWARD * forwards), (1, PAIR_BACKWARD + PAIR_LOGITS_AGAIN))  # passes, FLOPs of all
    share = efficiency(target.generation, model.kernel, model.head_dim)
    seconds = rest / (share.products * peak)
    for spilled, (passes, flops) in zip(SPILLED[target.chip.kind], parts, strict=True):
        pairs = excess * attention / sum(all_ for _, all_ in parts) / model.head_dim  # of a query and a key, in a head
        memory = 0.0 if _logits_on_chip(workload) else 4 * spilled * passes * pairs / target.chip.hbm_bandwidth
        seconds += max(flops * model.head_dim * pairs / (share.pairs * peak), memory)
    return seconds


def _logits_on_chip(workload: Workload) -> bool:
    """Whether the logits of a chunk pair of all heads that are computed at once stay out of HBM."""
    if workload.model.kernel != "xla":
        return True
    model, (_, _, tp, sp) = workload.model, workload.mesh_shape
    usual = default_chunk(workload.seq_len // (sp if model.attention == "ring" else 1))
    pair = (model.q_chunk or usual) * (model.k_chunk or usual)
    return 4 * pair * model.num_heads / (tp * model.head_groups) <= LOGITS_ON_CHIP.get(workload.target.generation, 0)


def hop_flops(model: LlamaConfig, local: int, *, backward: bool, causal: bool = True) -> float:
    """Attention FLOPs of one device in one hop of a balanced ring, `local` tokens of one sequence on a device.

    4 d per visible pair of a query and a key forward (two products), 10 d backward (five); a causal mask leaves half.
    """
    pairs = local * local * (0.5 if causal else 1.0)
    each = PAIR_BACKWARD + PAIR_LOGITS_AGAIN if backward else PAIR_FORWARD
    return float(each) * model.head_dim * model.num_heads * pairs


def hop_bytes(model: LlamaConfig, local: int, *, backward: bool, itemsize: int = 2) -> float:
    """Bytes that a device sends in one hop: keys and values, and in the backward their float32 gradients."""
    return 2.0 * local * model.num_kv_heads * model.head_dim * (itemsize + (4 if backward else 0))


@dataclass(frozen=True)
class Hop:
    """One hop of the ring on one device, at the peak rates of device and link."""

    flops: float
    bytes: float
    compute: float
    """Seconds."""
    link: float
    """Seconds."""

    @property
    def intensity(self) -> float:
        """FLOPs for each byte on the link."""
        return self.flops / self.bytes


def hop(model: LlamaConfig, target: Target, local: int, *, ranks: int, tp: int, backward: bool) -> Hop:
    """A hop of `local` tokens of one sequence, on a ring whose ranks spread their heads over `tp`; `ranks`: sp x tp."""
    flops = hop_flops(model, local, backward=backward) / tp
    sent = hop_bytes(model, local, backward=backward, itemsize=itemsize(model)) / tp
    return Hop(flops, sent, flops / target.chip.flops(model.compute_dtype), sent / target.ring_bandwidth(ranks))


def ring_hops(workload: Workload) -> dict[str, Hop]:
    """A hop of the ring "forward" and "backward"; nothing without a ring."""
    _, _, tp, sp = workload.mesh_shape
    if workload.model.attention != "ring" or sp == 1:
        return {}
    return {
        name: hop(
            workload.model, workload.target, workload.seq_len // sp, ranks=sp * tp, tp=tp, backward=name == "backward"
        )
        for name in ("forward", "backward")
    }


def smallest_local_length(model: LlamaConfig, chip: Chip, *, causal: bool = True, backward: bool = False) -> float:
    """The local length from which a hop's computation takes as long as its transfer (paper, Table 2).

    The paper's column, forward and without a mask, is F/B; a balanced causal ring needs 2 (K/H) F/B, and its backward
    2.4 (K/H) F/B with float32 gradients on the way.
    """
    seconds = hop_bytes(model, 1, backward=backward) / chip.link_bandwidth
    return seconds * chip.bf16_flops / hop_flops(model, 1, backward=backward, causal=causal)


def host_bytes(workload: Workload) -> float:
    """Bytes of offloaded activations in host memory, per device."""
    return float(workload.model.offloaded_bytes(workload.local_tokens))


def state_bytes(workload: Workload) -> float:
    """Bytes of the run's state on a device: parameters and two moments, float32."""
    return 12 * workload.model.num_params / workload.state_shards


def memory(workload: Workload) -> dict[str, float]:
    """Bytes of device memory of a train step by what they are for.

    Kept inputs and state are exact; the numbers of [T, D] arrays that are alive at the peak of a layer's backward (7,
    and 18 over the number of head groups) were fitted to compiled TPU programs.
    """
    model, local, (_, _, tp, _) = workload.model, workload.local_tokens, workload.mesh_shape
    D, F, V = model.hidden_size, model.intermediate_size, model.vocab_size
    item = itemsize(model)
    stream = local * D * item
    layer = (2 * D * model.head_dim * (model.num_heads + model.num_kv_heads) + 3 * D * F) / tp
    of_input, of_attention = model.kept_bytes(local)
    groups, single = model.remat_groups
    here = 0 if model.offload else groups * of_input + single * (of_input + of_attention)
    here += model.remat_group * (of_input + of_attention) if groups else 0
    working = 7 * stream + 18 * stream / model.head_groups
    chunks, usual = (model.q_chunk or 0) * (model.k_chunk or 0), default_chunk(local) ** 2
    if chunks:  # p, its gradient and the logits, float32, as they differ from those of the fit
        working += 12 * model.num_heads / tp / model.head_groups * (chunks - usual)
    if model.attention in ("vanilla", "memory_efficient"):
        working += 4 * item * local * F / tp
    if model.attention == "vanilla":
        working += 12 * model.num_heads / tp * local * local
    state = 20 * model.num_params / workload.state_shards
    if workload.accumulate > 1:  # the sum of the microbatches' gradients
        state += 4 * model.num_params / workload.state_shards
    return {
        "kept layer inputs": here,
        "working set of a layer": working,
        "weights of a layer, their gradients, embedding gradient": (item + 4) * layer + 4 * V * D,
        "parameters, optimizer and gradients": state,
    }


ADVICE = {
    "kept layer inputs": "--remat_group (two levels), --offload, or more devices on sp",
    "working set of a layer": "--head_groups, or more devices on sp",
    "weights of a layer, their gradients, embedding gradient": "tp",
    "parameters, optimizer and gradients": "more devices on fsdp or sp",
}
"""What makes each part of `memory` smaller."""


def peak_bytes(workload: Workload) -> float:
    """The sum of `memory`: to choose what to compile, and the answer where there is no compiler."""
    return sum(memory(workload).values())


def itemsize(model: LlamaConfig) -> int:
    """Bytes of an element in the compute dtype."""
    return 2 if model.compute_dtype == "bfloat16" else 4
