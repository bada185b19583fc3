"""Reports on plans."""

from collections.abc import Iterator

from ringformer.data.packing.ring_balance import MOST_RANKS
from ringformer.estimate.choices.candidates import Candidate, meshes, weighed
from ringformer.estimate.compiler.program_estimate import Estimate, fitting
from ringformer.estimate.reports.binding_term import binding_text
from ringformer.estimate.reports.packed_documents import ways_to_pack
from ringformer.estimate.reports.run_estimate import save_line, verdict_line
from ringformer.estimate.reports.time_report import figures, seconds_of
from ringformer.estimate.search.plan import Plan
from ringformer.estimate.workloads.trained_state import state_keys
from ringformer.estimate.workloads.training import Workload, described
from ringformer.hardware import GiB


def _verdict(c: Candidate, e: Estimate | None) -> str:
    """Return the line on a candidate's memory and time, compiled or by the closed form."""
    have = c.workload.target.chip.hbm_bytes
    time = c.timed(e)
    exposed = ""
    need = c.peak
    host = c.host
    how = "closed form, not compiled"
    if e:
        need = e.peak_bytes
        host = e.host_bytes
        how = "compiled"
    if e and e.schedule:
        exposed = f"{e.schedule.exposed_in_ring_loops / GiB:.1f} GiB of the ring exposed in its loops; "
    of_host = f", {host / GiB:.1f} GiB of host memory per device" if host else ""
    return (
        f"  {how}: {need / GiB:.2f} of {have / GiB:.2f} GiB{of_host}; {exposed}modelled {seconds_of(time.step)} per "
        f"step of {time.tokens:,} tokens, {time.tokens_per_second:,.0f} tokens/s ({time.source})"
    )


def how_it_fits(planned: Plan) -> str:
    """Describe whether the plan fits, and what was not tried."""
    if planned.run:
        return fitting(planned.run.untried_kernels).lower()
    if planned.chosen:
        return "should fit by the closed form"
    return "fits"


WAYS = 5
"""Number of ways to compute attention to list for a mesh, the fastest first."""


def _ways(planned: Plan) -> Iterator[str]:
    """Yield, for each mesh without tp, the ways to compute attention that were weighed; always the plain ring."""
    for mesh in meshes(planned.goal):
        if mesh.mesh_shape[2] > 1:
            continue
        windows = described(mesh.model)
        names: dict[str, float] = {}
        for c in weighed(mesh):
            way = described(c.workload.model).removeprefix(windows).strip()
            names[way or "plain ring"] = c.time.step / mesh.batch_size
        listed = dict(list(names.items())[:WAYS]) | {"plain ring": names["plain ring"]}
        seconds = ", ".join(f"{name} {figures(time)}" for name, time in listed.items())
        yield f"mesh {mesh.mesh_dim} batch {mesh.batch_size}: {seconds}"


LISTED = 8
"""Number of rejected candidates to list, the fastest first."""


def plan_text(planned: Plan) -> str:
    """Return the report on a plan."""
    title = f"{planned.goal.name} on {planned.goal.target.name}, {planned.seq_len:,} tokens"
    if planned.chosen is None:
        lines = [f"{title}: no candidate fits and is fast enough", *_why_none(planned)]
    else:
        programs = "  evaluation, init, saves and machine code were not checked: this needs the compiler"
        if run := planned.run:
            programs = f"  {verdict_line(run)}\n  {save_line(run.step)}"
        lines = [
            f"{title}: {planned.chosen}",
            _verdict(planned.chosen, planned.estimate),
            programs,
            "  the config to use:",
            *_config_text(planned.chosen.workload),
        ]
    lines.append("  ways to compute attention, in modelled seconds of a sequence (closed form, remat=full):")
    for way in _ways(planned):
        lines.append(f"    {way}")
    refused = sorted(planned.refused, key=lambda item: item[0].seconds_per_token)
    lines.append(f"  rejected candidates (the fastest {min(LISTED, len(refused))} of {len(refused)}):")
    for candidate, why in refused[:LISTED]:
        lines.append(f"    {candidate!s:60s} {why}")
    return "\n".join(lines)


def _config_text(w: Workload) -> list[str]:
    """Return the overrides of a config that train a workload."""
    m = w.model
    memory = (
        f"    --config.model.compute_dtype={m.compute_dtype} --config.model.remat={m.remat} "
        f"--config.model.head_groups={m.head_groups} --config.model.remat_group={m.remat_group} "
        f"--config.model.offload={m.offload}"
    )
    if m.full_remat_layers:
        memory += f" --config.model.full_remat_layers={m.full_remat_layers}"
    if not m.fetch_ahead:
        memory += " --config.model.fetch_ahead=False"
    if w.optimizer.offload != "none":
        memory += f" --config.optimizer.offload={w.optimizer.offload}"
    attention = f"    --config.model.layout={m.layout} --config.model.ulysses={m.ulysses} --config.model.ring={m.ring}"
    if m.kernel == "xla":  # others come with auto
        attention += " --config.model.kernel=xla"
        if m.q_chunk:
            attention += f" --config.model.q_chunk={m.q_chunk} --config.model.k_chunk={m.k_chunk}"
    lines = [
        f"    --config.seq_len={w.seq_len} --config.batch_size={w.batch_size} --config.mesh_dim={w.mesh_dim}",
        memory,
        attention,
    ]
    if keys := state_keys(w):
        lines.append("    " + " ".join(f"--config.{key}" for key in keys))
    return lines


def _why_none(planned: Plan) -> list[str]:
    """Return what binds the candidate that needs the least memory, and what would change that."""
    smallest = min((c for c, _ in planned.refused), key=lambda c: c.peak, default=None)
    if smallest is None:
        return ["  the compiler broke down on every candidate; its errors are above"]
    why = binding_text(smallest.workload, planned.excess)
    if not why:
        return ["  a larger slice or a shorter sequence would be faster"]
    return [f"  the smallest candidate: {smallest}", *why]


def packing_text(planned: Plan, store: str) -> str:
    """Return the report on the ways to pack a store's documents for a plan's ring, fastest first."""
    assert planned.chosen, "there is a ring to pack for"
    workload = planned.chosen.workload
    if workload.ring_size > MOST_RANKS:
        return f"  documents are counted on rings of at most {MOST_RANKS} ranks, not of {workload.ring_size}"
    ways = ways_to_pack(workload, store)
    best = ways[0].way
    tokens = workload.step_tokens
    chunks = ""
    if workload.model.kernel == "pallas":  # other kernels keep their own
        chunks = f" --config.model.q_chunk={best.chunk} --config.model.k_chunk={best.chunk}"
    lines = [f"  the documents of {store}, packed whole on rings of at most {workload.ring_size} (closed forms):"]
    for way, step in ways:
        lines.append(
            f"    layout {way.layout}, buckets {way.buckets}, chunks of {way.chunk}: {seconds_of(step)} per step, "
            f"{figures(tokens / step)} tokens/s; attention over its ideal {way.work.product:.2f}"
        )
    lines += [
        "  the config for them, besides the one above:",
        f"    --config.model.layout={best.layout} --config.data.packing=whole "
        f"--config.data.packed_attention=document --config.data.buckets={best.buckets}{chunks}",
    ]
    return "\n".join(lines)
