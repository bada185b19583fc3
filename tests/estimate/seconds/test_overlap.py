"""Which permutes a schedule hides, on programs of known answer: a product takes one second, a permute half of one."""

import pytest

from ringformer.estimate.seconds.link_loads import Network
from ringformer.estimate.seconds.overlap import read_schedule
from ringformer.estimate.seconds.program_seconds import USUAL, Rates
from ringformer.estimate.seconds.transfers import FROM_HOST, TO_HOST

RATES = Rates(
    flops=2 * 8**3 / USUAL.products,
    network=Network(places=((0, 0, 0, 0), (1, 0, 0, 0)), link_bandwidth=2 * 8 * 8 * 4),
    hbm_bytes=float("inf"),
    cycles=0.0,
)
PRODUCT = "%m{0} = f32[8,8] dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
START = "%s{0} = (f32[8,8], f32[8,8]) collective-permute-start(%x), source_target_pairs={{{{0,1}},{{1,0}}}}"
DONE = "%d{0} = f32[8,8] collective-permute-done(%s{0})"
SYNCHRONOUS = "%c{0} = f32[8,8] collective-permute(%x), source_target_pairs={{{{0,1}},{{1,0}}}}"


def transfers(*lines):
    body = "\n".join(f"  {line.format(i)}" for line, i in lines)
    text = f"ENTRY %main (x: f32[8,8]) -> f32[8,8] {{\n  %x = f32[8,8] parameter(0)\n{body}\n}}\n"
    return read_schedule(text, RATES)


def test_two_permutes_share_the_link_under_one_product():
    schedule = transfers((START, 1), (START, 2), (PRODUCT, 1), (DONE, 1), (DONE, 2))
    assert [t.seconds for t in schedule.transfers] == [0.5, 1.0]
    assert all(t.hidden for t in schedule.transfers) and schedule.exposed_seconds == 0


def test_opposite_directions_have_links_of_their_own():
    """Four devices in a line: two permutes along it share its links, one of the other direction does not."""
    rates = RATES._replace(network=RATES.network._replace(places=tuple((x, 0, 0, 0) for x in range(4))))
    there, back = "{{0,1},{1,2},{2,3}}", "{{3,2},{2,1},{1,0}}"
    for pairs, seconds in ((there, [0.5, 1.0]), (back, [0.5, 0.5])):
        lines = [START.format(1), START.format(2), PRODUCT.format(1), DONE.format(1), DONE.format(2)]
        lines[0] = lines[0].replace("{{0,1},{1,0}}", there)
        lines[1] = lines[1].replace("{{0,1},{1,0}}", pairs)
        body = "\n".join(f"  {line}" for line in lines)
        text = f"ENTRY %main (x: f32[8,8]) -> f32[8,8] {{\n  %x = f32[8,8] parameter(0)\n{body}\n}}\n"
        assert [t.seconds for t in read_schedule(text, rates).transfers] == seconds


def test_an_exchange_of_heads_queues_behind_a_permute():
    """Half of its bytes stay on the device."""
    exchange = ("%a{0} = f32[8,8] all-to-all(%x), replica_groups={{{{0,1}}}}, dimensions={{0}}", 1)
    schedule = transfers((START, 1), exchange, (DONE, 1), (PRODUCT, 1))
    times = {t.kind: t.seconds for t in schedule.transfers}
    assert times == {"collective-permute": 0.5, "all-to-all": 0.75} and schedule.exposed_seconds == 0.75


def test_three_do_not_fit_under_it():
    schedule = transfers((START, 1), (START, 2), (START, 3), (PRODUCT, 1), (DONE, 3), (DONE, 1), (DONE, 2))
    assert [t.hidden for t in schedule.transfers] == [True, True, False]
    assert schedule.exposed_seconds == pytest.approx(0.5) and schedule.exposed_permute_bytes == 8 * 8 * 4


def test_one_that_starts_as_the_link_falls_idle_does_not_queue():
    """Their spans overlap, but no computation passes while they do."""
    schedule = transfers(
        (START, 1), (START, 2), (PRODUCT, 1), (START, 3), (DONE, 1), (DONE, 2), (PRODUCT, 2), (DONE, 3)
    )
    assert schedule.transfers[2].seconds == 0.5 and all(t.hidden for t in schedule.transfers)


@pytest.mark.parametrize("lines", [[(SYNCHRONOUS, 1), (PRODUCT, 1)], [(PRODUCT, 1), (START, 1), (DONE, 1)]])
def test_one_without_computation_is_waited_for(lines):
    schedule = transfers(*lines)
    assert not schedule.transfers[0].hidden and schedule.exposed_seconds == 0.5


@pytest.mark.parametrize("mark", ["true", "false"])
def test_a_start_on_the_stream_that_computes_is_synchronous(mark):
    """A GPU's compiler marks it, and writes an end all the same."""
    start = f'{START}, backend_config={{{{"collective_backend_config":{{{{"is_sync":{mark}}}}}}}}}'
    (t,) = transfers((start, 1), (PRODUCT, 1), (DONE, 1)).transfers
    assert t.asynchronous == t.hidden == (mark == "false")


@pytest.mark.parametrize(
    "instruction, sent",
    [
        ("%s = ((f32[8,8], f32[8,8]), (f32[8,8], f32[8,8])) collective-permute-start(%x, %x)", 2 * 8 * 8 * 4),
        ("%s = ((f32[8,8], f32[8,8]), (f32[32,8], f32[8,32])) all-gather-start(%x, %x)", 2 * 32 * 8 * 4),
        ("%s = ((f32[8,8], f32[8,8]), (f32[2,8], f32[8,2])) reduce-scatter-start(%x, %x)", 2 * 8 * 8 * 4),
        ("%s = (f32[8,8], f32[8,8]) all-reduce-start(%x, %x)", 2 * 2 * 8 * 8 * 4),
        ("%s = (f32[8,8], f32[8,8]) all-reduce(%x, %x)", 2 * 2 * 8 * 8 * 4),
        ("%s = f32[32,8] all-gather(%x)", 32 * 8 * 4),
        ("%s = f32[2,8] reduce-scatter(%x)", 8 * 8 * 4),
    ],
)
def test_all_arrays_of_a_combined_collective_travel(instruction, sent):
    """Compilers combine small ones; of a sum, each array travels twice."""
    (t,) = transfers((instruction, 1)).transfers
    assert t.bytes == sent


SPARSE = """
%on_sparse_core (x: f32[8,8]) -> f32[1,8] {
  %x = f32[8,8] parameter(0)
  ROOT %r = f32[1,8] reduce-scatter(%x), dimensions={0}
}, execution_thread="sparsecore"

"""


def test_a_sparse_core_computes_from_the_update_to_the_end():
    """The program is loaded before; all of the operand travels, whose sum is scattered."""
    rates = RATES._replace(network=RATES.network._replace(link_bandwidth=8 * 8 * 2))  # a second for the operand
    load = (
        '%s = ((), (), (s32[9664512])) custom-call-start(), custom_call_target="x", '
        'called_computations={%on_sparse_core}, metadata={op_name="scatter_gradient"}'
    )
    hand, wait = "%u = ((f32[8,8]), f32[1,8]) custom-call-update(%s, %x)", "%d = f32[1,8] custom-call-done(%u)"
    product = PRODUCT.format(1)
    for lines, hidden in (([load, hand, product, wait], True), ([load, product, hand, wait], False)):
        body = "\n".join(f"  {line}" for line in lines)
        text = f"{SPARSE}ENTRY %main (x: f32[8,8]) -> f32[1,8] {{\n  %x = f32[8,8] parameter(0)\n{body}\n}}\n"
        schedule = read_schedule(text, rates)
        (t,) = schedule.transfers
        assert (t.kind, t.bytes, t.op_name, t.asynchronous) == ("reduce-scatter", 256, "scatter_gradient", True)
        assert t.hidden == hidden and schedule.exposed_seconds == (0 if hidden else 1)
        assert schedule.seconds.overlapped == 1, "loading and waiting take no time of the TensorCore"


@pytest.mark.parametrize(("around", "inside"), [("layers/while", False), ("layers/while/body/ring/while", True)])
def test_a_loop_of_one_turn_that_was_inlined_is_no_loop(around, inside):
    trips, pairs = 'known_trip_count={"n":"3"}', "source_target_pairs={{0,1}}"
    text = f"""
%body (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8] parameter(0)
  %c = f32[8,8] collective-permute(%x), {pairs}, metadata={{op_name="layers/while/body/ring/while/body/ppermute"}}
}}
%condition (x: f32[8,8]) -> pred[] {{
  %x = f32[8,8] parameter(0)
  ROOT %p = pred[] constant(true)
}}
ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8] parameter(0)
  %w = f32[8,8] while(%x), condition=%condition, body=%body, metadata={{op_name="{around}"}}, {trips}
}}
"""
    schedule = read_schedule(text, RATES)
    assert [t.in_ring_loop for t in schedule.transfers] == [inside]
    assert schedule.exposed_permute_bytes == 3 * 8 * 8 * 4


HOST = "f32[4,8,8]{{2,1,0:S(5)}}"
SLICE = "%s{0} = ((" + HOST + ", s32[]), f32[8,8]{{1,0}}, u32[]) dynamic-slice-start(%h, %i)"
SLICED = "%d{0} = f32[8,8]{{1,0}} dynamic-slice-done(%s{0})"
UPDATE = "%u{0} = ((" + HOST + ", f32[8,8]{{1,0}}, s32[]), " + HOST + ", u32[]) fusion-start(%h, %x, %i)"
UPDATED = "%v{0} = " + HOST + " fusion-done(%u{0})"
AT_ONCE = "%c{0} = " + HOST + " dynamic-update-slice(%h, %x, %i)"


def copies(*lines, host_bytes=8 * 8 * 4):
    """The schedule of a program beside an array in host memory; a slice of it takes a second each way."""
    body = "\n".join(f"  {line.format(i)}" for line, i in lines)
    text = (
        f"ENTRY %main (x: f32[8,8]) -> f32[8,8] {{\n  %x = f32[8,8] parameter(0)\n  %h = {HOST.format()} parameter(1)\n"
        f"  %i = s32[] parameter(2)\n{body}\n}}\n"
    )
    return read_schedule(text, RATES._replace(host_bytes=host_bytes))


def test_a_copy_from_the_host_that_is_waited_for_at_once_is_exposed():
    schedule = copies((SLICE, 1), (SLICED, 1), (PRODUCT, 1))
    (transfer,) = schedule.transfers
    assert (transfer.kind, transfer.bytes, transfer.shape) == (FROM_HOST, 8 * 8 * 4, (8, 8))
    assert schedule.exposed_host_seconds == schedule.exposed_seconds == 1


def test_copies_of_both_directions_travel_under_one_product():
    schedule = copies((SLICE, 1), (UPDATE, 1), (PRODUCT, 1), (SLICED, 1), (UPDATED, 1))
    assert sorted((t.kind, t.hidden) for t in schedule.transfers) == [(FROM_HOST, True), (TO_HOST, True)]
    assert schedule.exposed_seconds == 0


def test_copies_of_one_direction_share_the_link():
    schedule = copies((SLICE, 1), (SLICE, 2), (PRODUCT, 1), (SLICED, 1), (SLICED, 2))
    assert [t.seconds for t in schedule.transfers] == [1, 2] and schedule.exposed_host_seconds == pytest.approx(1)


def test_a_copy_travels_while_a_collective_is_waited_for():
    """A permute that takes half a second, without anything to travel under."""
    schedule = copies((SLICE, 1), (SYNCHRONOUS, 1), (SLICED, 1))
    assert schedule.exposed_host_seconds == pytest.approx(0.5) and schedule.exposed_seconds == pytest.approx(1)


def test_a_copy_without_a_start_is_exposed():
    schedule = copies((AT_ONCE, 1), (PRODUCT, 1))
    assert [t.kind for t in schedule.transfers] == [TO_HOST] and schedule.exposed_host_seconds == 1
