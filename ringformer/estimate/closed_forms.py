"""Closed forms of a train step: seconds and bytes from counts alone, without a compiler. Every number is modelled."""

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
"""Start of `StepTime.source` for seconds that are not based on a compiled program."""

LOGITS_ON_CHIP = {"v4": 32 * 2**20, "v5e": 32 * 2**20, "v6e": 32 * 2**20}
"""Largest float32 logits of a chunk pair, in bytes, that the TPU compiler keeps on the chip, by generation. In every
program compiled so far, larger logits spill to HBM, and so do all logits on other generations."""

SPILLED = {"tpu": (3.4, 4.2), "gpu": (6.5, 11.0)}
"""HBM bytes per byte of a chunk pair's logits where these spill, (forward, backward), from compiled programs: v5e for
TPU, A100 for GPU (range on A100: 5.2 to 8.0 forward, 9.7 to 12.2 backward)."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the target."""

    compute: float
    exposed: float
    """Communication that the schedule leaves exposed, at the link's full rate."""
    tokens: int
    floor: float = 0.0
    """Lower bound (roofline): each instruction takes its FLOPs at the peak or its bytes, whichever is longer."""
    serial: float = 0.0
    """Upper bound: no data moves while an instruction computes."""
    counted: float = 0.0
    """Share of `compute` that is based on machine code or HBM bytes."""
    has_machine_code: bool = True
    """True if cycles of machine code can be counted, as on TPU."""
    closed_form: bool = False
    """True if `compute` is not based on a compiled program."""
    assumed: Efficiency = USUAL
    """Shares of the peak assumed for the rest of `compute`."""

    @property
    def step(self) -> float:
        return self.compute + self.exposed

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step

    @property
    def source(self) -> str:
        """Description of what the seconds are based on."""
        if self.closed_form:
            spilling = "" if self.assumed.pairs_of else ", and logits that spill at the memory's rate"
            return f"{CLOSED_FORM}: {self.assumed}{spilling}"
        if self.counted == 0:
            return str(self.assumed)
        by = "machine code or HBM bytes" if self.has_machine_code else "HBM bytes"
        return f"{self.counted:.0%} of the computation by {by}, the rest {self.assumed}"

    def days(self, tokens: float) -> float:
        """Return the days it takes to train on `tokens`."""
        return tokens / self.tokens_per_second / 86400


def step_time(schedule: Schedule, tokens: int) -> StepTime:
    """Return the time of a compiled step from its schedule."""
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
    """Return the pairs of a query and a key that a ring's busiest ranks compute, relative to a rank's causal share.

    Every hop waits for its busiest rank, so an uneven layout costs up to 2. With m chunks per shard, blocks that the
    mask cuts along their diagonal cost 1 + 1/m: a rank's own block, and with stripes every block.
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
    each = workload.batch_size / target.num_devices  # a device's share of the work on one sequence
    attention = executed_attention_flops(model, workload.seq_len) * each
    rest = executed_flops(model, workload.seq_len) * each - attention
    parts = ((forwards, PAIR_FORWARD * forwards), (1, PAIR_BACKWARD + PAIR_LOGITS_AGAIN))  # passes, FLOPs in all
    share = efficiency(target.generation, model.kernel, model.head_dim)
    seconds = rest / (share.products * peak)
    for spilled, (passes, flops) in zip(SPILLED[target.chip.kind], parts, strict=True):
        pairs = excess * attention / sum(all_ for _, all_ in parts) / model.head_dim  # query-key pairs of all heads
        memory = 0.0 if _logits_on_chip(workload) else 4 * spilled * passes * pairs / target.chip.hbm_bandwidth
        seconds += max(flops * model.head_dim * pairs / (share.pairs * peak), memory)
    return seconds


def _logits_on_chip(workload: Workload) -> bool:
    """Return True if the logits of one chunk pair, for all heads computed at once, stay out of HBM."""
    if workload.model.kernel != "xla":
        return True
    model, (_, _, tp, sp) = workload.model, workload.mesh_shape
    usual = default_chunk(workload.seq_len // (sp if model.attention == "ring" else 1))
    pair = (model.q_chunk or usual) * (model.k_chunk or usual)
    return 4 * pair * model.num_heads / (tp * model.head_groups) <= LOGITS_ON_CHIP.get(workload.target.generation, 0)


def hop_flops(model: LlamaConfig, local: int, *, backward: bool, causal: bool = True) -> float:
    """Attention FLOPs of one device in one hop of a balanced ring, with `local` tokens of one sequence per device.

    Each visible pair of a query and a key takes 4 d FLOPs forward (two products) and 10 d FLOPs backward (five
    products); a causal mask leaves half of the pairs visible.
    """
    pairs = local * local * (0.5 if causal else 1.0)
    each = PAIR_BACKWARD + PAIR_LOGITS_AGAIN if backward else PAIR_FORWARD
    return float(each) * model.head_dim * model.num_heads * pairs


def hop_bytes(model: LlamaConfig, local: int, *, backward: bool, itemsize: int = 2) -> float:
    """Bytes that a device sends in one hop: keys and values, plus their float32 gradients in the backward pass."""
    return 2.0 * local * model.num_kv_heads * model.head_dim * (itemsize + (4 if backward else 0))


@dataclass(frozen=True)
class Hop:
    """One hop of the ring on one device, at the peak rates of the device and the link."""

    flops: float
    bytes: float
    compute: float
    """Seconds of computation."""
    link: float
    """Seconds of transfer."""

    @property
    def intensity(self) -> float:
        """FLOPs per byte on the link."""
        return self.flops / self.bytes


def hop(model: LlamaConfig, target: Target, local: int, *, ranks: int, tp: int, backward: bool) -> Hop:
    """Return a hop of `local` tokens of one sequence on a ring of sp ranks of `tp` devices; `ranks` is sp x tp."""
    flops = hop_flops(model, local, backward=backward) / tp
    sent = hop_bytes(model, local, backward=backward, itemsize=itemsize(model)) / tp
    return Hop(flops, sent, flops / target.chip.flops(model.compute_dtype), sent / target.ring_bandwidth(ranks))


def ring_hops(workload: Workload) -> dict[str, Hop]:
    """Return a hop of the ring for "forward" and "backward"; empty without a ring."""
    w, (_, _, tp, sp) = workload, workload.mesh_shape
    if w.model.attention != "ring" or sp == 1:
        return {}
    return {
        name: hop(w.model, w.target, w.seq_len // sp, ranks=sp * tp, tp=tp, backward=name == "backward")
        for name in ("forward", "backward")
    }


def smallest_local_length(model: LlamaConfig, chip: Chip, *, causal: bool = True, backward: bool = False) -> float:
    """Return the local length from which a hop's computation takes as long as its transfer (paper, Table 2).

    The paper's column (forward, no mask) is F/B. A balanced causal ring needs 2 (K/H) F/B, and 2.4 (K/H) F/B in the
    backward pass, which also sends float32 gradients.
    """
    seconds = hop_bytes(model, 1, backward=backward) / chip.link_bandwidth
    return seconds * chip.bf16_flops / hop_flops(model, 1, backward=backward, causal=causal)


def host_bytes(workload: Workload) -> float:
    """Bytes of offloaded activations in host memory, per device."""
    return float(workload.model.offloaded_bytes(workload.local_tokens))


def state_bytes(workload: Workload) -> float:
    """Bytes of the training state on a device: float32 parameters and two moments."""
    return 12 * workload.model.num_params / workload.state_shards


def memory(workload: Workload) -> dict[str, float]:
    """Bytes of device memory of a train step, by purpose.

    Kept inputs and state are exact. The numbers of [T, D] arrays alive at the peak of a layer's backward pass (7, plus
    18 divided by the number of head groups) were fitted to compiled TPU programs.
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
    if chunks:  # float32 p, its gradient and the logits: the difference to the fitted chunks
        working += 12 * model.num_heads / tp / model.head_groups * (chunks - usual)
    if model.attention in ("vanilla", "memory_efficient"):
        working += 4 * item * local * F / tp
    if model.attention == "vanilla":
        working += 12 * model.num_heads / tp * local * local
    state = 20 * model.num_params / workload.state_shards
    if workload.accumulate > 1:  # the sum of the microbatch gradients
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
"""Settings that reduce each part of `memory`."""


def peak_bytes(workload: Workload) -> float:
    """Sum of `memory`, used to choose what to compile and as the answer where there is no compiler."""
    return sum(memory(workload).values())


def itemsize(model: LlamaConfig) -> int:
    """Bytes of an element in the compute dtype."""
    return 2 if model.compute_dtype == "bfloat16" else 4
