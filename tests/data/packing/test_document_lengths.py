"""What a run says of its documents against its context, with numbers that are counted here one by one."""

import numpy as np
import pytest

from ringformer.data import Loader, too_often, too_short
from ringformer.data.packing.options import PackingOptions
from tests.data.packing_samples import MODES, build

LENGTHS = [*range(1, 101), 300]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    return build(folder / "a", LENGTHS), build(folder / "b", [400, 20, 30])


def loader(store, seq_len, packed_attention="document", packing="whole", **limits):
    return Loader(
        store,
        batch_size=2,
        seq_len=seq_len,
        seed=0,
        layout="zigzag",
        ring_size=2,
        packing=PackingOptions(packing, packed_attention, **limits),
    )


def met(loader):
    """The RoPE positions of all sequences of an epoch."""
    (sequences,) = loader.sequences.parts
    read = (sequences.read(i, np.arange(sequences.seq_len)) for i in range(sequences.per_epoch))
    return 1 + max(batch.positions.max() for batch in read)


@pytest.mark.parametrize("packed_attention", MODES)
@pytest.mark.parametrize("packing", ["stream", "whole"])
@pytest.mark.parametrize("seq_len", [64, 200, 600, 5000])
def test_numbers(stores, seq_len, packing, packed_attention):
    one = loader(stores[0], seq_len, packed_attention, packing)
    (found,) = one.document_lengths()
    assert (found.documents, found.median, found.percentile_90, found.longest) == (101, 51, 91, 300)
    of_long = sum(length for length in LENGTHS if length >= seq_len / 2)
    assert found.long_share == pytest.approx(of_long / sum(LENGTHS))
    if packing == "whole" or packed_attention == "sequence":  # a stream may cut the longest document in two
        assert met(one) == found.positions
    else:
        assert met(one) <= found.positions == min(300, seq_len)
    seen = {"document": "own document", "sequence": "packed sequence"}[packed_attention]
    assert str(found) == (
        f"{stores[0].path}: 101 documents; median length 51 tokens, 90th percentile 91, longest 300; "
        f"{of_long / sum(LENGTHS):.1%} of their tokens are in documents of at least half the context of {seq_len:,}; a "
        f"token sees its {seen}, at RoPE positions up to {found.positions - 1:,}"
    )
    assert (too_short([found]) is None) == (seq_len <= 600)


def test_only_the_wanted_documents_count(stores):
    (found,) = loader(stores[0], 600, min_length=11, max_length=20).document_lengths()
    assert (found.documents, found.median, found.longest, found.long_share, found.positions) == (10, 15, 20, 0.0, 20)


def test_a_mixture_is_too_short_if_all_its_stores_are(stores):
    for seq_len, warns in ((600, False), (800, False), (802, True)):
        a, b = loader(list(zip(stores, (3, 1), strict=True)), seq_len // 8 * 8 + 8).document_lengths()
        a, b = (lengths._replace(seq_len=seq_len) for lengths in (a, b))
        assert (a.longest, b.longest) == (300, 400)
        assert (too_short([a, b]) is not None) == warns


def test_the_warning_says_what_to_do(tmp_path):
    """Chats of at most 2,601 tokens in a context of 65,536, and the same seen across the sequence."""
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(200, 2601, 30).tolist(), 2601]
    assert 65_536 / 2 < sum(lengths) < 65_536
    store = build(tmp_path / "s", lengths)
    document, sequence = (
        too_short(loader(store, 65_536, packed_attention).document_lengths()) for packed_attention in MODES
    )
    for said in (document, sequence):
        assert said.startswith("no document reaches half of the context of 65,536 tokens: the longest has 2,601. ")
        assert "train on longer documents (data.min_length excludes short ones), or shorten seq_len" in said
    assert "no RoPE position beyond 2,600 is trained. Set data.packed_attention=sequence to let it" in document
    assert f"RoPE positions reach {sum(lengths):,} tokens, but beyond a document" in sequence
    assert "packed_attention=" not in sequence


@pytest.mark.parametrize("mixed", [False, True])
def test_passes_are_those_of_the_tokens_that_are_met(stores, mixed):
    """Of each store of a mixture for itself, within what one sequence more or less holds."""
    data = loader(list(zip(stores, (3, 1), strict=True)) if mixed else stores[0], 400)
    steps, lengths = 40, {str(store.path): np.diff(store.offsets) for store in stores}
    met = dict.fromkeys(lengths, 0)
    for row in (row for step in range(steps) for row in data.contents(step)):
        met[row["store"]] += lengths[row["store"]][row["documents"]].sum()
    passes = data.passes(steps)
    assert len(passes) == 1 + mixed and max(passes.values()) > 4
    for store, times in passes.items():
        assert times == pytest.approx(met[store] / lengths[store].sum(), rel=0.1)


def test_more_than_four_passes_are_warned_of():
    assert too_often({"a": 0.5, "b": 4.0}) is None
    warning = too_often({"a": 0.5, "b": 4.1, "c": 1234.0})
    assert warning.startswith("the run goes through b 4.1 times, c 1,234.0 times: beyond 4 passes")
    assert "train on more documents, or for fewer steps" in warning
