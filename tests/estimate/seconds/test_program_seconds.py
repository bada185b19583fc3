"""Seconds of programs of known answer: a product of 8 x 8 does 1024 FLOPs."""

import pytest

from ringformer.estimate.compiled.program_text import Program
from ringformer.estimate.seconds.kernel_keys import KernelKeys
from ringformer.estimate.seconds.link_loads import Network
from ringformer.estimate.seconds.program_seconds import Efficiency, ProgramSeconds, Rates, efficiency, purpose

PAIRS, BACKWARD, PRODUCTS = 0.5, 0.4, 0.8
SHARES = Efficiency(PAIRS, BACKWARD, PRODUCTS, source="assumed: here")
RATES = Rates(1024.0, network=Network((), 1.0), hbm_bytes=256.0, cycles=10.0, efficiency=SHARES)
DOT = "f32[8,8]{1,0:S(1)} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
TEXT = """
%body (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0:S(1)} parameter(0)
  ROOT %m = DOT, metadata={op_name="jit(step)/attention/ring/while/body/at_most_3_trips/while/body/dot_general"}
}
%condition (x: f32[8,8]) -> pred[] {
  %x = f32[8,8]{1,0:S(1)} parameter(0)
  ROOT %p = pred[] constant(true)
}
%idle (x: f32[8,8]) -> f32[8,8] {
  ROOT %x = f32[8,8]{1,0:S(1)} parameter(0)
}
ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0:S(1)} parameter(0)
  %w = f32[8,8]{1,0:S(1)} while(%x), condition=%condition, body=%body, known_trip_count={"n":"3"}
  %c = f32[8,8]{1,0:S(1)} conditional(%i, %x, %x), branch_computations={%idle, %body}
  %l = DOT, metadata={op_name="jit(step)/jvp(loss)/dot_general"}
  ROOT %n = f32[8,8]{1,0} negate(%l), metadata={op_name="jit(step)/optimizer/neg"}
}
""".replace("DOT", DOT)


def seconds(cycles=None, text=TEXT):
    return ProgramSeconds(Program.parse(text), RATES, cycles or {})


def test_loops_multiply_and_the_slowest_branch_is_taken():
    """Three turns and one branch of a product at the share of the peak that pairs reach; of the branch nothing is
    certain. Its bytes take the negation a second."""
    found = seconds().purposes
    assert found["attention forward"].overlapped == pytest.approx(4 / PAIRS)
    assert sum(s.certain for s in found.values()) == pytest.approx(3 / PAIRS + 1 / PRODUCTS + 1)
    assert found["loss"].overlapped == pytest.approx(1 / PRODUCTS) and found["loss"].counted == 0
    assert found["optimizer"].overlapped == found["optimizer"].counted == 1
    assert sum(s.floor for s in found.values()) == pytest.approx(4 + 1 + 1)


def test_shares_say_where_they_come_from():
    """Counted in machine code, measured, or assumed to be those of another chip."""
    counted = "machine code: results/part_cycles.json"
    assert str(efficiency("v4")) == f"FLOPs at 27% of the peak in attention, 70% elsewhere ({counted})"
    assert str(efficiency("H200", "cudnn", 128)) == (
        "FLOPs at 58% of the peak in attention forward, 52% backward, 71% elsewhere, bytes at 71% of the memory's rate "
        "(measured: results/gpu.json, 2026-11-27)"
    )
    h100 = efficiency("H100", "cudnn", 128)
    assert h100 == efficiency("H200", "cudnn", 128)._replace(source="assumed: H200's, which were measured")
    assert efficiency("v3")._replace(source="") == efficiency("v5e")._replace(source="")
    assert "(the kernels' by their machine code), 85% elsewhere" in str(efficiency("v5e", "pallas"))


def test_bytes_take_as_long_as_the_memory_lets_them():
    """A product at 40% of the peak in the backward; a negation at half of the memory's rate, at a quarter in attention
    to an int8 cache. The lower bound is at the full rate."""
    backward = TEXT.replace("jit(step)/attention", "transpose(jvp())/attention")
    assert seconds(text=backward).purposes["attention backward"].overlapped == pytest.approx(4 / BACKWARD)
    slow = RATES._replace(efficiency=SHARES._replace(memory=0.5, cached=0.25))
    cached = TEXT.replace("optimizer/neg", "attend_token/neg")
    for text, name, expected in ((TEXT, "optimizer", 2.0), (cached, "attention to the cache", 4.0)):
        found = ProgramSeconds(Program.parse(text), slow).purposes[name]
        assert (found.overlapped, found.floor) == (expected, 1.0)


def test_known_machine_code_replaces_the_assumption():
    program = Program.parse(TEXT)
    product = program.computations["body"]["m"]
    found = seconds({KernelKeys(program).key("body", product): 25.0}).purposes["attention forward"]
    assert found.overlapped == found.counted == pytest.approx(4 * 2.5)


def test_a_computation_that_two_loops_share_is_each_loops_own():
    """The recomputation's names stand in the body that the forward calls, too: a GPU compiler's habit."""
    again = TEXT.replace("jit(step)/attention", "transpose(jvp())/rematted_computation/attention")
    loop = 'known_trip_count={"n":"3"}, metadata={op_name="jit(step)/attention/at_most_3_trips/while"}'
    found = seconds(text=again.replace('known_trip_count={"n":"3"}', loop)).purposes
    assert found["attention forward"].overlapped == pytest.approx(3 / PAIRS)
    assert found["attention recomputed"].overlapped == pytest.approx(1 / PAIRS)


def test_bytes_that_cannot_pass_while_the_program_runs_are_waited_for():
    """An asynchronous copy of four arrays takes four seconds of the memory's time, and the product little over one."""
    text = """
ENTRY %main (x: f32[32,8], y: f32[8,8]) -> f32[8,8] {
  %big = f32[32,8]{1,0} parameter(0)
  %x = f32[8,8]{1,0:S(1)} parameter(1)
  %s = (f32[32,8]{1,0:S(1)}, f32[32,8]{1,0}, u32[]{:S(2)}) copy-start(%big)
  %m = DOT
  %d = f32[32,8]{1,0:S(1)} copy-done(%s)
}
""".replace("DOT", DOT)
    assert sum(s.overlapped for s in seconds(text=text).purposes.values()) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        ("jit(step)/jvp()/while/body/attention/ring/while/body/at_most_9_trips/while/body/exp", "attention forward"),
        ("transpose(jvp())/checkpoint/rematted_computation/attention/ring/while/body/add", "attention recomputed"),
        ("transpose(jvp())/checkpoint/transpose(jvp(attention))/at_most_9_trips/while/body/exp", "attention backward"),
        ("jit(step)/jvp()/while/body/attention/bthd,hdD->btD/dot_general", "projections"),
        ("jit(step)/transpose(jvp(feed_forward))/while/body/dot_general", "feed-forward"),
        ("state.params['layers']['attention']['wq']", "other"),
    ],
)
def test_purposes(scope, expected):
    text = f'ENTRY %m (x: f32[]) -> f32[] {{\n  ROOT %x = f32[] add(%a), metadata={{op_name="{scope}"}}\n}}\n'
    assert purpose(Program.parse(text).computations["m"]["x"]) == expected


def test_a_fusion_without_a_name_has_the_purpose_of_its_result():
    fused = """
%f (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %m = f32[8,8]{1,0} negate(%x), metadata={op_name="jit(step)/optimizer/neg"}
}
ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %r = f32[8,8]{1,0} fusion(%x), kind=kLoop, calls=%f
}
"""
    assert {name: s.overlapped for name, s in seconds(text=fused).purposes.items()} == {"optimizer": 2.0}
