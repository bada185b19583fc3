"""Memory settings to compile a workload with. Closed forms choose them; the compiler decides what fits."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from ringformer.estimate.closed_forms.training import computation_seconds, host_bytes, peak_bytes, state_bytes
from ringformer.estimate.compiler.process import compile_apart
from ringformer.estimate.compiler.program_estimate import Estimate
from ringformer.estimate.workloads.training import MemorySettings, Workload
from ringformer.models.decoder_config import DecoderConfig


def possible_settings(model: DecoderConfig) -> Iterator[MemorySettings]:
    """Yield the settings worth trying: head groups save memory at the cost of latency, two-level remat saves memory at
    the cost of a forward pass."""
    groups = [g for g in (1, 4, 8, 13, 16) if g in possible_head_groups(model)]

    def kept(layers: int) -> int:
        """Count the inputs that are kept at once with groups of so many layers."""
        whole_groups, single = divmod(model.num_layers, layers)
        # Layers outside the groups need a second loop in the program, so they must save much to be worth it.
        return whole_groups + layers + 2 * (single > 0)

    fewest = min(range(1, model.num_layers), default=1, key=kept)
    remat_groups = [1]
    if fewest > 1 and not model.full_remat_layers:
        remat_groups.append(fewest)
    for remat_group in remat_groups:
        for g in groups:
            yield MemorySettings(g, remat_group, model.q_chunk, model.k_chunk)


def possible_head_groups(model: DecoderConfig) -> list[int]:
    """Return the numbers of groups that the key heads can be split into."""
    if model.PARTS.qk_norm == "width":  # over the heads of all groups
        return [1]
    return [g for g in range(1, model.num_kv_heads + 1) if model.num_kv_heads % g == 0]


def with_outputs_that_fit(workload: Workload) -> Workload | None:
    """Return the workload with as many layers that offload their attention's outputs as the host's memory can have,
    beside a save; None if that is impossible, if it can have all of them, or none."""
    model = workload.model
    offloads_outputs = model.offload and model.remat == "attention"
    in_one_run = model.has_equal_layers and model.remat_group == 1
    if not offloads_outputs or not in_one_run or workload.gradients_in_host:
        return None
    excess = host_bytes(workload) + state_bytes(workload) - workload.target.host_bytes
    _, of_attention = model.kept_bytes(workload.local_tokens)
    without = model.full_remat_layers + math.ceil(excess / of_attention)
    if excess <= 0 or without >= model.num_layers:
        return None
    return replace(workload, model=replace(model, full_remat_layers=without))


def likely_settings(workload: Workload) -> list[MemorySettings]:
    """Return the settings to compile, in order: the two fastest that fit by the closed forms, and the smallest."""
    model = workload.model
    target = workload.target
    if not model.on_ring:
        return [replace(workload.settings, head_groups=1, remat_group=1)]
    tp = workload.mesh_shape[2]
    heads = model.num_heads // tp
    key_heads = max(1, model.num_kv_heads // tp)
    options = []
    for settings in possible_settings(model):
        groups = settings.head_groups
        if key_heads % groups == 0 and (groups == 1 or heads // groups % model.ulysses == 0):
            options.append(workload.with_settings(settings))
    in_host = [w for w in options if host_bytes(w) <= target.host_bytes] or options
    fitting = [w for w in in_host if peak_bytes(w) <= target.budget]
    fastest = sorted(fitting, key=computation_seconds)[:2]
    smallest = min(in_host, key=peak_bytes)
    return list(dict.fromkeys(w.settings for w in (*fastest, smallest)))


def compile_first_accepted(
    workload: Workload,
    settings: list[MemorySettings],
    accepts: Callable[[Estimate], bool],
    announce: Callable[[Workload], None],
    generate_code: bool = False,
    prefers: Callable[[Estimate], bool] = lambda estimate: True,
) -> tuple[Workload, Estimate]:
    """Compile a workload with one setting after another. Return, with its estimate, the first workload that is accepted
    and preferred, otherwise the first that is accepted, otherwise the last.

    `announce` is called with each workload before it is compiled. Raises the errors of `compile_apart`.
    """
    kept = None
    for option in settings:
        workload = workload.with_settings(option)
        announce(workload)
        estimate = compile_apart(workload, generate_code=generate_code)
        if accepts(estimate):
            kept = kept or (workload, estimate)
            if prefers(estimate):
                return workload, estimate
    return kept or (workload, estimate)
