"""What a kernel makes of a core: a dump of known answer, and kernels whose products and copies are known."""

import json

import pytest

from ringformer.data.packing.ring_work import KERNEL_SHARES
from ringformer.estimate.kernels.chunk_search import TIMES
from ringformer.estimate.kernels.pair_kernels import Pair, count_kernel, hbm_bytes_per_cycle
from ringformer.estimate.kernels.slot_use import read_slot_use
from tests.estimate.seconds.test_machine_code import BRANCH, END, PRODUCT, TEST, bundles
from tests.hlo import on_tpu

COPY = "{} : > {{ %9 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1, /*size_in_granules=*/64, /*vmem=*/%s2 }}"
WITHIN = "{} : > {{ %9 = dma.vmem_to_smem /*vmem=*/%s1, /*size_in_granules=*/16, /*smem=*/%s2 }}"
HEAD = """== CAPACTIY:
MATMUL, MATPUSH, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    4     4     3     4     2     1     3     3     1     1     2
== UTILIZATION:
"""


def dump(folder, slots):
    """A program of one bundle, then a loop of 5 turns: a product and a copy; a spill and a fill; its branch."""
    text = bundles([WITHIN], [PRODUCT], [COPY], [TEST, 1, 5], [BRANCH, 1, 1], [END])
    (folder / "1-kernel.1-00-packed-bundles-post-ra.txt").write_text(text)
    (folder / "1-kernel.1-00-schedule-analysis_packed-bundles-post-ra.txt").write_text("something else")
    (folder / "1-kernel.1-01-pre-delay_hlo-static-per-bundle-utilization.txt").write_text(HEAD + "\n".join(slots))
    report = {"hlo_breakdowns": {"kernel.1": {"total_size": 4096}}}
    (folder / "1-TLP-02-vmem_report.html").write_text(f"<script>const DATA ={json.dumps(report)};</script>")


SLOTS = ["0 0 0 0 0 0 0 0 0 0 2", "4 2 0 1 0 1 0 0 0 0 0", "4 0 3 2 0 0 3 2 1 1 0", *["0 0 0 0 0 0 0 0 0 0 1"] * 3]


def test_slots_count_as_often_as_their_bundles_run(tmp_path):
    dump(tmp_path, SLOTS)
    use = read_slot_use(tmp_path, "kernel.1", "v5e")
    assert use.cycles == 1 + 5 * 4 + 1
    slots = {"matrix": 40 / 4, "vector": 15 / 4, "transcendental": 5, "cross_lane": 15 / 3, "load": 15 / 3, "store": 5}
    assert use.units == pytest.approx({name: n / use.cycles for name, n in slots.items()})
    assert (use.fills, use.spills, use.vmem_bytes) == (10, 5, 4096)
    assert use.hbm_bytes == 5 * 64 * 32
    assert read_slot_use(tmp_path, "kernel.1", "v4").hbm_bytes == 5 * 64 * 512


@pytest.mark.parametrize("name, slots, said", [("kernel.2", SLOTS, "0 files"), ("kernel.1", SLOTS[1:], "6 bundles")])
def test_a_dump_without_the_kernel_or_its_slots_is_refused(tmp_path, name, slots, said):
    dump(tmp_path, slots)
    with pytest.raises(ValueError, match=said):
        read_slot_use(tmp_path, name, "v5e")


@on_tpu
@pytest.mark.slow
@pytest.mark.parametrize("chunk", KERNEL_SHARES)
def test_the_shares_by_which_documents_are_balanced(chunk):
    pair, shares = Pair(chunk, chunk, packed=1), []
    uses = {kind: count_kernel("v5e", kind, pair) for kind in TIMES}
    for part in ("whole", "masked"):
        taken = {kind: max(u[part].cycles, u[part].hbm_bytes / hbm_bytes_per_cycle("v5e")) for kind, u in uses.items()}
        ideal = sum(n * pair.ideal_cycles("v5e", kind) for kind, n in TIMES.items())
        shares.append(ideal / sum(n * taken[kind] for kind, n in TIMES.items()))
    assert sum(shares) / 2 == pytest.approx(KERNEL_SHARES[chunk], abs=0.01)


@on_tpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_window_costs_a_masked_step_little(kind):
    """In the chunks that a window of 4,096 has, a step keeps 0.95 of the causal kernel's share of ideal."""
    causal, window = (count_kernel("v5e", kind, Pair(window=window)) for window in (0, 4096))
    assert causal["whole"].cycles == window["whole"].cycles
    assert causal["masked"].cycles >= 0.95 * window["masked"].cycles


@pytest.mark.slow
@on_tpu
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_step_multiplies_and_moves_what_its_shape_says(kind):
    """Its products fill the matrix units for just the ideal cycles. Keys and values come at every step of the forward;
    of the backward q, do, dq, and what stays while the keys do, all counted as if it moved."""
    pair = Pair(256, 512)
    uses = count_kernel("v5e", kind, pair)
    for part in ("whole", "masked"):
        use = uses[part]
        assert use.units["matrix"] * use.cycles == pytest.approx(pair.ideal_cycles("v5e", kind))
        assert all(0 <= share <= 1 for share in use.units.values())
    queries, keys = 256 * 128, 2 * 512 * 128
    if kind == "forward":
        assert uses["whole"].hbm_bytes == 2 * keys
        assert uses["visit"].hbm_bytes >= queries * (2 + 4 + 4)
    else:
        assert uses["whole"].hbm_bytes >= queries * (2 + 2 + 4 + 4) + keys * (2 + 4)
    assert 2 * keys < uses["whole"].vmem_bytes < 16 * 2**20
