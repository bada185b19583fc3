"""Tests for the table of collectives: every transfer in one group, bytes and executions kept."""

import pytest

from ringformer.estimate.compiler.collectives import collectives_table, grouped, purpose
from ringformer.estimate.seconds.overlap import Transfer

SCOPE = "jit(step)/shard_map/while/body/closed_call"


def transfer(
    kind, count=1.0, *, size=2**20, shape=(512, 512), seconds=1.0, cover=2.0, asynchronous=True, ring=False, op_name=""
) -> Transfer:
    return Transfer(
        kind,
        "bf16",
        shape,
        count,
        size,
        asynchronous,
        seconds,
        cover,
        max(0.0, seconds - cover),
        ring,
        f"{SCOPE}/{op_name}",
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (transfer("collective-permute", ring=True), "ring, inside its loops"),
        (transfer("collective-permute"), "ring, at their ends"),
        (transfer("all-to-all"), "head exchange"),
        (transfer("all-gather", op_name="attention/ring_gathered/all_gather"), "ring, gathered"),
        (transfer("all-gather", op_name="gather_weight/all_gather"), "weights gathered"),
        (transfer("all-gather", op_name="jvp(gather_weight)/all_gather"), "weights gathered"),
        (transfer("reduce-scatter", op_name="scatter_gradient/reduce_scatter"), "gradients reduced"),
        (transfer("all-reduce", op_name="psum_invariant"), "gradients reduced"),
        (transfer("all-reduce", shape=(), op_name="psum_invariant"), "other"),
        (transfer("all-gather", op_name="all_gather"), "other"),
        (transfer("reduce-scatter", op_name="reduce_scatter"), "other"),
    ],
)
def test_what_a_collective_is_for(found, expected):
    assert purpose(found) == expected


def test_groups_hold_every_byte_and_execution():
    ring = transfer("collective-permute", 10.0, ring=True)
    waits = transfer("collective-permute", 3.0, ring=True, seconds=5.0)
    queues = transfer("collective-permute", 1.0, ring=True, size=4, seconds=9.0, cover=9.0)
    alone = transfer("all-gather", 2.0, size=7, asynchronous=False, op_name="gather_weight/all_gather")
    groups = grouped([alone, ring, waits, queues])
    assert [g.purpose for g in groups] == ["ring, inside its loops", "weights gathered"]
    assert (groups[0].executions, groups[0].synchronous) == (14, 0)
    assert (groups[0].hidden_bytes, groups[0].exposed_bytes) == (10 * 2**20 + 4, 3 * 2**20)
    assert groups[0].longest is waits, "not a small one that queued behind it"
    assert (groups[1].executions, groups[1].synchronous, groups[1].exposed_bytes) == (2, 2, 14)


def test_the_table_has_a_line_a_group():
    lines = collectives_table([transfer("collective-permute", 1024.0, ring=n % 2 == 0) for n in range(200)])
    assert len(lines) == 3
    assert lines[1].split()[:4] == ["ring,", "inside", "its", "loops"] and "102,400" in lines[1]
    assert "100.00" in lines[1], "GiB hidden"
    assert collectives_table([]) == []
