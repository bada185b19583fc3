"""The tails are those of gzip itself, and a report says where they begin."""

import gzip
import json
import random
import subprocess
from itertools import pairwise

import pytest

from ringformer.cli import main
from ringformer.data import TokenStore
from ringformer.data.sources.compressibility import between_tails, gzip_ratio

SENTENCE = "the ring carries keys and values around all of its ranks until every query has seen them"
WORDS = SENTENCE.split()


def texts(number: int) -> list[str]:
    """Texts from noise to one word repeated."""
    rng = random.Random(5)
    pools = [[f"{rng.getrandbits(64):x}" for _ in range(200)], *(WORDS[: 1 + i % len(WORDS)] for i in range(1, number))]
    return [" ".join(rng.choice(pool) for _ in range(300)) + f" {i}" for i, pool in enumerate(pools)]


def by_command(text: str) -> float:
    """The ratio by the command gzip."""
    content = text.encode()
    packed = subprocess.run(["gzip", "-6", "-c"], input=content, capture_output=True, check=True).stdout
    return len(content) / len(packed)


def test_the_ratio_is_that_of_the_command():
    for text in texts(20):
        assert gzip_ratio(text) == pytest.approx(by_command(text), rel=2e-3)


@pytest.mark.parametrize("tails", [0.2, 0.05, 0.49])
def test_as_many_are_left_out_at_both_ends(tmp_path, capsys, tails):
    number = 60
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(number)))
    words = [f"--source=jsonl:{tmp_path}/a.jsonl", f"--store={tmp_path / 's'}", "--held_out=0"]
    assert main(["data", "prepare", *words, f"--compressibility_tails={tails}"]) == 0
    store = TokenStore(tmp_path / "s" / "train")
    ratios = [len(text.encode()) / len(gzip.compress(text.encode(), 6)) for text in texts(number)]
    each = int(tails * number)
    kept = sorted(sorted(range(number), key=ratios.__getitem__)[each : number - each])
    found = [bytes(store.tokens[a : b - 1].astype("uint8")).decode() for a, b in pairwise(store.offsets)]
    assert found == [texts(number)[i] for i in kept], "in their order"
    low, high = min(ratios[i] for i in kept), max(ratios[i] for i in kept)
    line = f"{2 * each} documents dropped: gzip compresses them less than {low:.2f} or more than {high:.2f} times"
    assert line in capsys.readouterr().out


def test_nothing_left_is_an_error():
    assert between_tails(["a", "b", "c"], 0.34).keep.tolist() == [False, True, False]
    for texts, message in ((["a"] * 4, "drops none of 4 documents"), ([], "leaves none of 0 documents")):
        with pytest.raises(ValueError, match=f"compressibility_tails=0.2 {message}: change it"):
            between_tails(texts, 0.2)
