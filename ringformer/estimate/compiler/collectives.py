"""Collectives of a compiled step, grouped by purpose in a short table instead of hundreds of lines."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from ringformer.estimate.seconds.link_loads import QUEUED
from ringformer.estimate.seconds.overlap import Transfer
from ringformer.estimate.seconds.transfers import ACROSS_GROUPS, ACROSS_SLICES, FROM_HOST, OTHER_ACROSS_GROUPS, TO_HOST
from ringformer.hardware import GiB
from ringformer.ops.ring import GATHERED
from ringformer.parallel.gather_weight import GATHER, SCATTER

PURPOSES = (
    "ring, inside its loops",
    "ring, at their ends",
    "ring, gathered",
    "head exchange",
    "weights gathered",
    "gradients reduced",
    "summed across slices",
    "summed across groups",
    "other across groups",
    "activations gathered",
    "partial results merged",
    "other",
    "offloaded, to the host",
    "offloaded, from the host",
)
"""Purposes of transfers, in the order of the table. The ends of a ring's loops are the hops before the first and after
the last iteration. A gathered ring gathers keys; where the compiler rewrites the sums of their gradients, these lose
their name and count as gradients reduced. Heads are exchanged among the devices that are one rank of the ring. Only
training has gradients. Only inference gathers activations and merges partial results, for split products and for
attention to a cache that is spread over devices. "Other" are activations over tp, and scalars like the loss."""


_OF_KIND = {
    ACROSS_SLICES: "summed across slices",
    ACROSS_GROUPS: "summed across groups",
    OTHER_ACROSS_GROUPS: "other across groups",
    TO_HOST: "offloaded, to the host",
    FROM_HOST: "offloaded, from the host",
}
"""Purposes of the kinds that have a single one."""


class Group(NamedTuple):
    """The collectives of one kind and purpose in one step on one device."""

    purpose: str
    kind: str
    executions: float
    synchronous: float
    """Number of executions without a separate start; these cannot be hidden behind other work."""
    hidden_bytes: float
    exposed_bytes: float
    longest: Transfer
    """The transfer with the most bytes, which occupies the link longest; if several have equally many bytes, the
    slowest of them."""


def purpose(t: Transfer) -> str:
    """Return the purpose of a collective, one of `PURPOSES`."""
    if t.kind in _OF_KIND:
        return _OF_KIND[t.kind]
    if t.kind == "collective-permute":
        return "ring, inside its loops" if t.in_ring_loop else "ring, at their ends"
    if GATHERED in t.op_name:
        return "ring, gathered"
    if t.kind == "all-to-all":
        return "head exchange"
    if GATHER in t.op_name:
        return "weights gathered"
    # Gradients of weights that are whole on every device are summed where the weights were replicated, which has no
    # scope. Reduce-scatters that the compiler rewrote have no name at all, nor has anything on joined slices.
    rewritten = t.kind == "reduce-scatter" and not t.op_name
    if t.kind == "all-gather" and not t.op_name:
        return "weights gathered"
    if SCATTER in t.op_name or rewritten or (t.kind == "all-reduce" and math.prod(t.shape) > 1):
        return "gradients reduced"
    return "other"


def inference_purpose(t: Transfer) -> str:
    """Return the purpose of a collective in a program without gradients."""
    if t.kind in QUEUED or GATHER in t.op_name or GATHERED in t.op_name:
        return purpose(t)
    return "activations gathered" if t.kind == "all-gather" else "partial results merged"


def grouped(transfers: list[Transfer], purpose: Callable[[Transfer], str] = purpose) -> list[Group]:
    """Group transfers in the order of `PURPOSES`; within a purpose, the kind with the most bytes comes first."""
    members: dict[tuple[str, str], list[Transfer]] = defaultdict(list)
    for t in transfers:
        members[purpose(t), t.kind].append(t)
    groups = [_group(*key, together) for key, together in members.items()]
    return sorted(groups, key=lambda g: (PURPOSES.index(g.purpose), -g.hidden_bytes - g.exposed_bytes))


def _group(purpose: str, kind: str, transfers: list[Transfer]) -> Group:
    """Sum up the transfers of one purpose and kind."""
    executions: float = 0
    synchronous: float = 0
    hidden: float = 0
    exposed: float = 0
    for t in transfers:
        executions += t.count
        if not t.asynchronous:
            synchronous += t.count
        if t.hidden:
            hidden += t.all_bytes
        else:
            exposed += t.all_bytes
    longest = max(transfers, key=lambda t: (t.bytes, t.seconds))
    return Group(purpose, kind, executions, synchronous, hidden, exposed, longest)


def collectives_table(transfers: list[Transfer], purpose: Callable[[Transfer], str] = purpose) -> list[str]:
    """Return the lines of a table of the groups; empty for a step without collectives."""
    lines = [
        f"{'transfers':26}{'kind':20}{'executed':>10}{'synchronous':>13}{'hidden GiB':>12}{'exposed GiB':>13}"
        "  longest single transfer"
    ]
    for g in grouped(transfers, purpose):
        t = g.longest
        single = f"{t.dtype}{list(t.shape)}, {t.bytes / 2**20:,.1f} MiB, {t.seconds * 1e3:,.2f} ms"
        lines.append(
            f"{g.purpose:26}{g.kind:20}{g.executions:>10,.0f}{g.synchronous:>13,.0f}{g.hidden_bytes / GiB:>12,.2f}"
            f"{g.exposed_bytes / GiB:>13,.2f}  {single}"
        )
    if len(lines) == 1:
        return []
    return lines


def group_json(g: Group) -> dict[str, Any]:
    """Return a group as a JSON object."""
    numbers = g._asdict() | {"longest_seconds": g.longest.seconds, "longest_bytes": g.longest.bytes}
    del numbers["longest"]
    return numbers
