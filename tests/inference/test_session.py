"""What a session writes, and the logits it has after each token, against whole forward passes in float64."""

from dataclasses import replace

import numpy as np
import pytest

from ringformer.inference.cache.chunk_attention import Reads
from ringformer.inference.programs import Programs
from ringformer.inference.sampling import Sampling
from tests.inference.models import CONFIG, Transcript, generator, losses

PROMPTS = [[5, 9, 20, 3, 1, 2, 60, 33, 12, 7, 4], [1]]
TURN = [[4], [5, 6, 7, 8, 9, 1, 2, 3, 10, 40]]
GQA = {"num_kv_heads": 1}

CASES = {
    "one device": ("1,1,1,1", {}, None, {"queries"}),
    "ring of 2, in chunks": ("1,1,1,2", {}, 4, {"queries"}),
    "ring of 3, striped": ("1,1,1,3", {"layout": "striped", "tie_embeddings": True}, None, {"queries"}),
    "ring of 8": ("1,1,1,8", {}, None, {"queries"}),
    "keys travel": ("1,1,1,4", GQA, 8, {"keys", "queries"}),
    "keys travel, contiguous": ("1,1,1,2", GQA | {"layout": "contiguous"}, 6, {"keys", "queries"}),
    "dp x sp": ("2,1,1,4", {}, None, {"queries"}),
    "fsdp x tp x sp": ("1,2,2,2", {}, 8, {"queries"}),
    "heads exchanged in pairs": ("1,1,1,4", {"ulysses": 2}, 8, {"queries"}),
    "keys travel both ways": ("1,1,1,4", {"ring": "both_ways"}, 8, {"queries"}),
    "heads exchanged as far as tp allows": ("1,1,2,4", {"ulysses": 4}, None, {"queries"}),
    "fewer key heads than tp": ("1,1,4,2", {"layout": "striped"}, None, {"queries"}),
    "windows": ("1,1,1,4", {"window": 9}, 8, {"queries"}),
    "windows, one device": ("1,1,1,1", {"window": 3}, 6, {"queries"}),
    "windows longer than the text": ("1,1,1,2", {"window": 40, "layout": "contiguous"}, 4, {"queries"}),
    "windows, heads exchanged": ("1,1,2,4", {"window": 5, "ulysses": 2}, 16, {"queries"}),
    "windows, dp": ("2,1,1,4", {"window": 1, "layout": "contiguous"}, None, {"queries"}),
}
SLOW = (
    "ring of 2, in chunks",
    "ring of 3, striped",
    "keys travel, contiguous",
    "dp x sp",
    "heads exchanged as far as tp allows",
    "fewer key heads than tp",
    "windows, one device",
    "windows longer than the text",
    "windows, heads exchanged",
    "windows, dp",
)


@pytest.mark.usual("windows", "one device")
@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in CASES])
def test_every_logit_is_that_of_a_whole_forward(case, monkeypatch):
    """Two turns of ragged prompts (one of a token alone, so that ranks have no keys for a row), each decoded."""
    mesh_dim, changes, chunk, travels = CASES[case]
    config, used = replace(CONFIG, **changes), set()
    compile_prefill = Programs.prefill

    def prefill(self, rows, slots, tokens, reads, *others):
        used.update([reads.travels] if reads else [])
        return compile_prefill(self, rows, slots, tokens, reads, *others)

    monkeypatch.setattr(Programs, "prefill", prefill)
    transcript = Transcript(generator(config, mesh_dim, prefill_chunk=chunk).session(2))
    for turn in (PROMPTS, TURN):
        transcript.turn(turn, new=5)
    assert [len(text) for text in transcript.text] == transcript.session.lengths == [22, 21]
    assert transcript.error(config) <= 1e-4
    assert used == travels


def test_a_long_cache_is_read_in_part(monkeypatch):
    """Half of 512 slots a rank, until tokens lie behind them: then all, by new tokens and by the next turn."""
    read, programs = [], {"prefill": Programs.prefill, "decode": Programs.decode}

    def noted(name, place):
        def compile_program(self, *sizes):
            size = sizes[place]
            read.append(size.slots if isinstance(size, Reads) else size or 0)
            return programs[name](self, *sizes)

        return compile_program

    monkeypatch.setattr(Programs, "prefill", noted("prefill", 3))
    monkeypatch.setattr(Programs, "decode", noted("decode", 2))
    session = generator(CONFIG, "1,1,1,2", max_length=1024, prefill_chunk=256).session(1)
    rng, text, found = np.random.default_rng(0), [], {}
    for turn, new in ((508, 8), (12, 1)):
        text += (tokens := rng.integers(0, 61, turn).tolist())
        session.append([tokens])
        found[len(text)] = np.asarray(session.logits[0], np.float64)
        for (token,) in session.decode(max_new_tokens=new):
            text.append(token)
            found[len(text)] = np.asarray(session.logits[0], np.float64)
    text.append(7)
    expected = losses(CONFIG, text)
    for length, logits in found.items():
        loss = np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[text[length]]
        assert abs(loss - expected[length - 1]) <= 1e-4, length
    assert read == [0, 256] + [256] * 5 + [512] * 3 + [512] * 2


@pytest.mark.slow
@pytest.mark.parametrize("mesh_dim", ["1,1,1,1", "1,2,2,2"])
def test_an_int8_cache_changes_little(mesh_dim):
    """Chunks, two turns and decoded tokens: no log-probability is further from float64 than 0.13 (it was 0.111; heads
    have only eight features)."""
    made = generator(CONFIG, mesh_dim, prefill_chunk=8, cache_dtype="int8")
    transcript = Transcript(made.session(2))
    for turn in (PROMPTS, TURN):
        transcript.turn(turn, new=5)
    assert 1e-3 < transcript.error(CONFIG) <= 0.13
    assert {str(x.dtype) for x in (made.session(2)._state.cache.k.values, made.session(2)._state.cache.v.values)} == {
        "int8"
    }


def test_rows_end_one_by_one_and_go_on():
    """A row that ended waits, its logits and cache untouched, while the other goes on; then both have another turn."""
    transcript = Transcript(generator(CONFIG, "1,1,1,8").session(2))
    session = transcript.session
    transcript.turn(PROMPTS, new=1)
    steps = []
    for step in session.decode(max_new_tokens=4):
        steps.append(step)
        if len(steps) == 2:
            session.end(0)
    assert [step[0] is None for step in steps] == [False, False, True, True]
    for step in steps:
        for text, token in zip(transcript.text, step, strict=True):
            text += [] if token is None else [token]
    assert session.lengths == [len(text) for text in transcript.text] == [14, 6]
    transcript._look([0, 1])
    transcript.turn(TURN, new=2)
    assert transcript.error(CONFIG) <= 1e-4


def test_the_caller_may_stop_early():
    transcript = Transcript(generator(CONFIG, "1,1,1,1").session(2))
    session = transcript.session
    transcript.turn(PROMPTS, new=1)
    for text, token in zip(transcript.text, next(session.decode(max_new_tokens=9)), strict=True):
        text.append(token)
    assert session.lengths == [13, 3]
    transcript.turn([[7], [8]], new=1)
    assert transcript.error(CONFIG) <= 1e-4


def test_timings_count_every_token():
    session = generator(CONFIG, "1,1,1,1").session(2)
    session.append(PROMPTS)
    list(session.decode(max_new_tokens=3))
    timings = session.timings
    assert (timings.prefill_tokens, timings.decode_tokens) == (12, 6)
    assert timings.prefill_tokens_per_second == 12 / timings.prefill_seconds > 0
    assert timings.decode_tokens_per_second == 6 / timings.decode_seconds > 0


@pytest.mark.parametrize("mesh_dim", ["1,1,1,8", "1,1,2,4"])
def test_the_cache_is_shared_out(mesh_dim):
    """Bytes of keys and values on a device: those of all tokens over sp and tp, within 2%."""
    session = generator(CONFIG, mesh_dim, max_length=4096).session(2)
    for x in (session._state.cache.k.values, session._state.cache.v.values):
        total = CONFIG.num_layers * 2 * 4096 * CONFIG.num_kv_heads * CONFIG.head_dim * 4
        held = {shard.data.nbytes for shard in x.addressable_shards}
        assert len(held) == 1 and total / 8 <= held.pop() <= 1.02 * total / 8


def test_a_full_row_is_full():
    """To the last token of max_length, on a ring that it does not divide; then no further."""
    transcript = Transcript(generator(CONFIG, "1,1,1,4", max_length=21).session(1))
    transcript.turn([PROMPTS[0]], new=10)
    assert transcript.error(CONFIG) <= 1e-4
    with pytest.raises(ValueError, match="the prompt alone fills it"):
        transcript.session.decode(max_new_tokens=1)
    with pytest.raises(ValueError, match="row 0 would have 22 tokens, but max_length is 21: append at most 0"):
        transcript.session.append([[1]])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1], []], "prompt 1 is empty"),
        ([[1], [61]], "prompt 1 has the id 61, which is outside the vocabulary"),
        ([[-1], [2]], "prompt 0 has the id -1"),
        ([[1]], "1 rows given, but the session has 2"),
        ([[1], [2] * 65], "row 1 would have 65 tokens, but max_length is 64: append at most 64"),
    ],
)
def test_bad_rows(rows, message, monkeypatch):
    session = generator(CONFIG, "1,1,1,1").session(2)
    monkeypatch.setattr(Programs, "prefill", lambda *_: pytest.fail("computed"))
    with pytest.raises(ValueError, match=message):
        session.append(rows)
    with pytest.raises(ValueError, match="append a prompt first"):
        session.decode(max_new_tokens=1)


def test_turns_of_unequal_length_meet_the_end_of_the_cache():
    """Rows share slots: what one row's long turn takes, the other's cannot have twice. Refused, not overwritten."""
    session = generator(CONFIG, "1,1,1,1").session(2)
    session.append([[1] * 40, [2]])
    with pytest.raises(ValueError, match="room for 24: give each conversation a session of its own"):
        session.append([[3], [4] * 30])
    assert session.lengths == [40, 1]
    np.testing.assert_array_equal(np.asarray(session._state.lengths), [40, 1])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=3)], ids=["greedy", "drawn"])
def test_weights_that_are_no_numbers_end_the_text(sampling, monkeypatch):
    """A token would be said, else: 0, or whatever a draw from NaN comes to."""
    model = generator(CONFIG, "1,1,1,2")
    norm = model._weights["norm"]
    monkeypatch.setitem(norm, "scale", norm["scale"].at[3].set(np.nan))
    session = model.session(2)
    session.append(PROMPTS)
    with pytest.raises(FloatingPointError, match="the logits after the 11 tokens of row 0 are not finite"):
        next(session.decode(max_new_tokens=4, sampling=sampling))
