"""Where a GPU waits for its host: programs of known answer."""

from ringformer.estimate.closed_forms.training import step_time
from ringformer.estimate.compiled.program_text import Program
from ringformer.estimate.reports.time_report import purposes_text, seconds_by_purpose
from ringformer.estimate.seconds.link_loads import Network
from ringformer.estimate.seconds.overlap import read_schedule
from ringformer.estimate.seconds.program_seconds import USUAL, Rates, host_waits

TEXT = """
%pair (x: f32[8]) -> f32[8] {
  ROOT %x = f32[8] parameter(0)
}
%more (x: f32[8]) -> pred[] {
  %x = f32[8] parameter(0)
  ROOT %p = pred[] constant(true)
}
%hop (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  %w = f32[8] while(%x), condition=%more, body=%pair, metadata={op_name="jvp()/attention/at_most_9_trips/while"}
  ROOT %c = f32[8] conditional(%i, %w, %w), branch_computations={%pair}, metadata={op_name="jit(step)/optimizer/cond"}
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  ROOT %r = f32[8] while(%x), condition=%more, body=%hop, backend_config={"known_trip_count":{"n":"4"}}
}
"""


def test_a_loop_of_unknown_length_waits_before_each_turn_and_a_branch_once():
    """Four hops, each with at most nine pairs of chunks and a branch; the loop over hops waits for nobody."""
    assert host_waits(Program.parse(TEXT)) == {"attention forward": 4 * (9 + 1), "optimizer": 4}


def test_a_program_of_known_lengths_never_waits():
    assert (
        host_waits(
            Program.parse(
                TEXT.replace("at_most_9_trips/while", "")
                .replace("body=%pair,", 'body=%pair, known_trip_count={"n":"9"},')
                .replace("conditional", "call")
            )
        )
        == {}
    )


def test_waits_take_the_seconds_that_were_measured():
    """Forty-four waits: nothing where no share says how long one takes."""
    rates = Rates(1.0, Network((), 1.0), hbm_bytes=1.0, cycles=0.0)
    assert read_schedule(TEXT, rates).host_seconds == 0
    measured = rates._replace(efficiency=USUAL._replace(host_wait=0.5))
    schedule = read_schedule(TEXT, measured)
    time = step_time(schedule, tokens=1)
    assert time.host == schedule.host_seconds == seconds_by_purpose(schedule).get("waiting for the host") == 22
    assert time.step == time.compute + 22 and time.at_most - time.serial == 22 and time.at_least == time.floor
    assert "44 times, 5e+05 microseconds each in the seconds above" in "\n".join(purposes_text(schedule))
